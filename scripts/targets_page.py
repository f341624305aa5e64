"""docs/targets: a page for each tool that plans are written for, made by the commands it names."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import msgspec
from click.testing import CliRunner

from memfit.cli.app import app
from memfit.export.target import EVERY_KEY, exports, find_target
from memfit.export.unwritten_keys import HEAD as HEADING
from memfit.records import Record
from memfit.records.recipe import Recipe

MODEL, DEVICE = "llama-3.1-8b", "h100-sxm"
PLAN = {"method": "lora", "precision": "bf16-mixed", "recompute": "full", "micro_batch": "2"}
EIGHT = {"hardware.count": "8"}
TRAINER = {"framework": "hf-trainer", **PLAN}
SHARDED = {**TRAINER, **EIGHT, "parallel.dp_shard": "8"}
# keys of the request behind each page's example; of the others: memfit's own step
EXAMPLES: dict[str, dict[str, str]] = {
    "axolotl": TRAINER,
    "llamafactory": TRAINER,
    "trl": SHARDED,
    "accelerate": {**TRAINER, **EIGHT, "parallel.dp_replicate": "8"},
    "deepspeed": {"framework": "deepspeed", **EIGHT, **PLAN, "method": "full",
                  "parallel.dp_shard": "8"},
    "torchtitan": {"framework": "torchtitan", **EIGHT, "recompute": "full", "micro_batch": "1",
                   "parallel.dp_shard": "4", "parallel.tp": "2",
                   "parallel.sequence_parallel": "true"},
    "megatron": {"framework": "megatron", **EIGHT, "recompute": "none", "micro_batch": "1",
                 "parallel.tp": "2", "parallel.dp_shard": "4", "parallel.zero": "1",
                 "parallel.sequence_parallel": "true"},
}  # fmt: skip
EXAMPLES["torchtitan-main"] = EXAMPLES["torchtitan"]
OWN = {**PLAN, **EIGHT, "parallel.dp_shard": "8"}
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "virtual_pp", "ep")
OUT = "job"
INDEX = """# Tools that plans are written for

Made by `make docs` with the commands that the pages show.

| target | tool | files | reads back | predicted peak there |
|---|---|---|---|---|
"""
KEYS = """
## What the files say

A marked key is written; where the tool has no word for its value, the plan takes the value that
the tool has, and says so, or the export is refused if that decides what is learned. A key without
a mark is listed at the file's head where it changes memory and time alone, and refused where it
decides what is learned; an axis of the mesh that a tool lacks is refused.
`tests/export/test_round_trip.py` changes every marked key of plans for the tools that `check`
reads, and
reads it back.
"""
HEAD = "# For "  # what its first line begins with
LANGUAGES = {".yaml": "yaml", ".yml": "yaml", ".json": "json", ".py": "python", ".sh": "bash",
             ".sbatch": "bash"}  # fmt: skip


def pages() -> dict[str, str]:
    """File name -> content, of all targets and their index."""
    found, rows = {}, []
    os.environ["COLUMNS"] = "80"
    for name in exports.names():
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            found[f"{name}.md"], row = page(name)
        rows.append(row)
    return {"README.md": INDEX + "\n".join([*rows, *carried(), ""]), **found}


def carried() -> list[str]:
    """Which keys of a recipe each trainer's files say."""
    tools = [name for name in exports.names() if find_target(name).says != EVERY_KEY]
    lines = ["", *KEYS.strip().splitlines(), "", f"| key | {' | '.join(tools)} |"]
    lines.append(f"|---|{'---|' * len(tools)}")
    for key in recipe_keys():
        groups = {key, key.partition(".")[0]}
        cells = ["yes" if groups & find_target(name).says else "" for name in tools]
        lines.append(f"| `{key}` | {' | '.join(cells)} |")
    return lines


def recipe_keys() -> Iterator[str]:
    """Dotted keys of a recipe; a framework's own knobs are on its page."""
    for field in msgspec.structs.fields(Recipe):
        if field.name in (*HEADING, "options", "model", "recompute"):
            continue
        if isinstance(field.type, type) and issubclass(field.type, Record):
            axes = AXES if field.name == "parallel" else ()
            names = (inner.name for inner in msgspec.structs.fields(field.type))
            yield from (f"{field.name}.{name}" for name in names if name not in axes)
        else:
            yield field.name


def page(name: str) -> tuple[str, str]:
    """The page of a target, and its row of the index. Writes into the current folder."""
    target = find_target(name)
    title = f"{target.title} {target.version}".strip()
    changes = EXAMPLES.get(name, OWN)
    asked = [MODEL, "--device", DEVICE, *words(changes)]
    export = ["export", *asked, "--to", name, "--out", OUT]
    said = run(export)
    files = sorted(path for path in Path(OUT).iterdir() if path.is_file())
    lines = [f"# {title}", "", (target.__doc__ or "").strip(), "", "## Write", ""]
    lines += shown(export, said)
    for path in files:
        if path.name == "plan.json":
            lines += ["", "`plan.json`: the plan itself, which `memfit train` takes."]
        else:
            lines += ["", f"`{path.name}`, below its head:", "", *fenced(path)]
    if target.reads_back:
        lines += ["", "## Read", "", *reading(json.loads(run([*export, "--json"]))["check"], files)]
    names = ", ".join(path.name for path in files)
    peak = next(line for line in said.splitlines() if line.startswith("predicted peak"))
    known = "unknown" not in peak
    reads = "yes" if target.reads_back else ""
    row = f"| [`{name}`]({name}.md) | {title} | {names} | {reads} | {'yes' if known else 'no'} |"
    return "\n".join([*lines, ""]), row


def reading(command: list[str], files: list[Path]) -> list[str]:
    """What `memfit check` says of the files that were just written, by the export's own command."""
    names = {path.name for path in files}
    check = [f"{OUT}/{word}" if word in names else word for word in command[1:]]
    return shown(check, run(check))


def shown(arguments: list[str], said: str) -> list[str]:
    """A command and what it printed."""
    return ["```console", f"$ memfit {shlex.join(arguments)}", *said.rstrip().splitlines(), "```"]


def run(arguments: list[str]) -> str:
    """What a command prints; its exit code is 0, or 3 where something does not fit."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)
    assert done.return_value in (0, 3), (arguments, done.output)
    return done.stdout


def words(changes: dict[str, str]) -> list[str]:
    """As `--set` options."""
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


def fenced(path: Path) -> list[str]:
    """A file's content without memfit's head, whose digest and version change with memfit."""
    lines = path.read_text().splitlines()
    if path.suffix == ".json":
        data = json.loads(path.read_text())
        del data["memfit"]
        lines = json.dumps(data, indent=2).splitlines()
    elif HEAD in (said := [line[: len(HEAD)] for line in lines]):
        first = last = said.index(HEAD)
        while lines[last].startswith("# "):
            last += 1
        del lines[first:last]
    return [f"```{LANGUAGES.get(path.suffix, '')}", *lines, "```"]
