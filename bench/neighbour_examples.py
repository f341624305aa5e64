"""The tools' own example configurations, read by `memfit check`: whole, in part, refused, crashed.

    python bench/neighbour_examples.py axolotl@067b021=axolotl/examples trl@f2cd577=trl/examples ...

TOOL@VERSION=FOLDER: every YAML, JSON and TOML file below FOLDER that a reader recognises, and each
configuration of torchtitan's registries. Where a
file names a model that is neither in the catalogue nor reachable, or none, as a launcher's does, it
is read with `model: llama-3.1-8b`, since the file is on trial and not the model. A refusal must
name a key or a value of the file. Results go to bench/results/neighbour_examples.json.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # 600 files would ask the hub for as many models

from memfit import api
from memfit.core.errors import InvalidRequest

RESULTS = Path(__file__).resolve().parent / "results" / "neighbour_examples.json"
SUFFIXES = (".yaml", ".yml", ".json", ".toml")
REGISTRY = "config_registry.py"  # torchtitan's: each function without arguments is an example
OF_NO_TOOL = "is of no tool"
SHARED = "is FSDP's"  # one device shares nothing: such a file is read for a machine of eight
NO_MODEL = ("names no model", "is not in the catalogue", "unknown model", "is no configuration")


def read(
    file: Path, config: str = "", model: str = "", count: int | None = None
) -> tuple[str, tuple[str, ...]]:
    """Why it is refused, "" where it is not, and keys that are not described; or what is raised."""
    data: dict[str, Any] = {"hardware": {"device": "h100-sxm"}}
    if count is not None:
        data["hardware"]["count"] = count
    if config:
        data = {"hardware": {"device": "h100-sxm", "count": 8, "nodes": 64}}
    if model:
        data["model"] = model
    try:
        checked = api.check([file], data, config)[0]
    except InvalidRequest as error:
        if any(said in error.message for said in NO_MODEL) and not model:
            return read(file, config, "llama-3.1-8b", count)
        if SHARED in error.message and count is None:
            return read(file, config, model, 8)
        return error.message.replace(f"`{file}`", "the file"), ()
    return "", tuple(one.key for one in checked.undescribed)


def find_examples(folder: Path) -> Iterator[tuple[Path, str]]:
    """Files, with the names of the configurations that those in Python make."""
    for file in sorted(folder.rglob("*")):
        if file.name == REGISTRY:
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    yield file, node.name
        elif file.suffix in SUFFIXES and file.is_file():
            yield file, ""


def run(folder: Path) -> dict[str, Any]:
    understood, in_part, refused, crashed = [], [], Counter[str](), {}
    keys_left = Counter[str]()
    others = 0
    for file, config in find_examples(folder):
        name = ":".join(filter(None, (str(file.relative_to(folder)), config)))
        try:
            why, keys = read(file, config)
        except Exception as error:
            crashed[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        if OF_NO_TOOL in why:
            others += 1
        elif why:
            refused[why.replace(f"{folder}/", "")[:120]] += 1
        else:
            (in_part if keys else understood).append(name)
            keys_left.update(keys)
    return {
        "understood": understood,
        "in_part": in_part,  # answered with what is needed at least
        "not_described": dict(keys_left.most_common()),
        "refused": dict(refused.most_common()),
        "crashed": crashed,
        "of_no_tool": others,
    }


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for word in sys.argv[1:]:
        named, _, folder = word.partition("=")
        tool, _, version = named.partition("@")
        found = results[tool] = {"version": version, **run(Path(folder))}
        print(
            f"{tool} {version}: {len(found['understood'])} understood,"
            f" {len(found['in_part'])} in part, {sum(found['refused'].values())} refused,"
            f" {len(found['crashed'])} crashed,"
            f" {found['of_no_tool']} of no tool"
        )
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    sys.exit(any(one["crashed"] for one in results.values()))


if __name__ == "__main__":
    main()
