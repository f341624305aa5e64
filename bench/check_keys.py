"""Files of other trainers with one key added: does `memfit check` still say FITS?

    python bench/check_keys.py [--moving] [FIELDS.json] [TOOL=FOLDER ...]

FIELDS.json holds the arguments of the tools' own classes, as `--fields` prints it:

    python bench/check_keys.py --fields SITE...    # site-packages of environments with the tools

Files are the exports of the repository's plans that are answered with FITS. `--moving` adds to each
of them each key that was read from the tools to move memory (tests/mutated_files.py), FIELDS.json
each argument that is not described to one file of each tool, with a value that asks for something.
Of a key that is declared to move no memory the answer stays; of another one it must not be FITS.
TOOL=FOLDER are the tools' own examples, as of
bench/neighbour_examples.py: how many of those that were understood before change their answer.
Results go to bench/results/check_keys.json.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import mutated_files  # noqa: E402

FITTING = ("fits", "at_risk")
RESULTS = ROOT / "bench" / "results" / "check_keys.json"
# of each tool, the modules that hold its argument classes, and the classes that are no arguments
SOURCES = {
    "trl": ("trl/trainer/*_config.py", "trl/experimental/*/*_config.py", "trl/scripts/utils.py"),
    "llamafactory": ("llamafactory/hparams/*_args.py",),
    "axolotl": ("axolotl/utils/schemas/*.py", "axolotl/integrations/*/args.py"),
    "deepspeed": ("deepspeed/runtime/zero/config.py",),
    "transformers": ("transformers/training_args.py",),
}
NOT_KEYS = ("Dataset", "Type", "GPUCapabilities", "EnvCapabilities", "SpecialTokens", "LrGroup",
            "RoleBoundary", "EBFTConfig", "VllmConfig", "TRLConfig", "QATConfig", "PTQConfig",
            "FSDPConfig", "LoftQ", "PeftConfig", "DiffusionConfig", "MoraConfig", "HatcheryConfig",
            "CompressionArgs", "SelectiveCheckpointing", "DynamicCheckpointConfig", "FP8Config",
            "ProcessorArguments", "EvaluationArguments", "GeneratingArguments")  # fmt: skip


def find_fields(sites: list[Path]) -> dict[str, list[str]]:
    """Annotated names of the classes in each tool's modules: what its files may hold."""
    found: dict[str, list[str]] = {}
    for tool, patterns in SOURCES.items():
        names: dict[str, None] = {}
        for pattern in patterns:
            for file in sorted(file for site in sites for file in site.glob(pattern)):
                for node in ast.parse(file.read_text()).body:
                    if isinstance(node, ast.ClassDef) and not node.name.startswith(NOT_KEYS):
                        names.update(dict.fromkeys(_annotated(node)))
        found[tool] = list(names)
    return found


def _annotated(node: ast.ClassDef) -> Iterator[str]:
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id


def run_moving(folder: Path) -> dict[str, Any]:
    """Every key of `mutated_files.MOVING` in every file of its tool."""
    counts: Counter[str] = Counter()
    wrong = []
    for made in mutated_files.make_files(folder):
        for key, value in mutated_files.MOVING[made.tool].items():
            verdict = made.answer(key, value)
            counts[f"{made.name}: {verdict}"] += 1
            if verdict in FITTING:
                wrong.append(f"{made.name}: {key}")
    return {"answers": dict(counts), "wrong": wrong}


def run_fields(folder: Path, fields: dict[str, list[str]]) -> dict[str, Any]:
    """Every argument that is not described, and every one declared, in one file of each tool."""
    counts: Counter[str] = Counter()
    wrong, cried, tried = [], [], set()
    for made in mutated_files.make_files(folder):
        if made.tool in tried:
            continue
        tried.add(made.tool)
        shared = fields["transformers"] if made.tool in ("trl", "llamafactory") else []
        for key in dict.fromkeys((*fields.get(made.tool, []), *shared)):
            named = made.nest(key)
            kind = made.classify(named)
            if kind.startswith("described"):
                counts[f"{made.tool}: {kind}"] += 1
                continue
            verdict = made.answer(named, mutated_files.VALUES.get(key, 7))
            counts[f"{made.tool}: {kind}: {verdict}"] += 1
            if kind == "not described" and verdict in FITTING:
                wrong.append(f"{made.name}: {named}")
            if kind == "moves no memory" and verdict not in ("fits", "refused"):
                cried.append(f"{made.name}: {named}: {verdict}")
    return {"arguments": dict(sorted(counts.items())), "passed_over": wrong, "cried": cried}


def run_examples(folder: Path, before: list[str]) -> dict[str, Any]:
    """Of the examples that were understood before, those whose answer now is another."""
    import neighbour_examples

    keys: Counter[str] = Counter()
    changed = []
    for file, config in neighbour_examples.find_examples(folder):
        name = ":".join(filter(None, (str(file.relative_to(folder)), config)))
        if name not in before:
            continue
        why, left = neighbour_examples.read(file, config)
        if why or left:
            changed.append(name)
            keys.update([why] if why else left)
    return {"understood": len(before), "changed": changed, "keys": dict(keys.most_common())}


def main() -> None:
    if sys.argv[1] == "--fields":
        print(json.dumps(find_fields([Path(word) for word in sys.argv[2:]]), indent=1))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = json.loads((RESULTS.parent / "neighbour_examples.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        for number, word in enumerate(sys.argv[1:]):
            tool, _, examples = word.partition("=")
            if examples:
                known = before[tool]["understood"]
                results.setdefault("examples", {})[tool] = run_examples(Path(examples), known)
            elif word == "--moving":
                results |= run_moving(Path(folder, str(number)))
            else:
                fields = json.loads(Path(word).read_text())
                results |= run_fields(Path(folder, str(number)), fields)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(bool(results.get("wrong") or results.get("passed_over")))


if __name__ == "__main__":
    main()
