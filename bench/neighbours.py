"""Every plan of tests/neighbour_plans.py, exported and read by the targets' own code.

    python bench/neighbours.py trl=/venvs/light/bin/python megatron=/venvs/mcore/bin/python:CHECKOUT

TARGET=PYTHON[:CHECKOUT], each with an environment of its own, as the targets pin versions that
exclude each other; CHECKOUT is a clone whose files read the target's where no package has them.
With --keys also every plan with one key changed, for each key that the target says it can tell.
Results go to bench/results/neighbours.json, a target at a time: what was not run stays as it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import neighbour_plans  # noqa: E402
from changed_keys import change, is_described, keys  # noqa: E402
from memfit import api  # noqa: E402
from memfit.core.errors import InvalidRequest  # noqa: E402
from memfit.export.target import Export, find_target  # noqa: E402

RESULTS = HERE / "results" / "neighbours.json"


def run(target: str, python: str, checkout: str, only: set[str]) -> dict[str, Any]:
    """What the target said of each plan: "ok", its error, or memfit's refusal to write it."""
    made: dict[str, Export] = {}
    refused = {}
    for name in neighbour_plans.REQUESTS:
        if only and name not in only:
            continue
        try:
            made[name] = api.export(neighbour_plans.find_plan(name), target)
        except InvalidRequest as error:
            refused[name] = f"refused by memfit: {error.message}"
    found = parse(target, python, checkout, made)
    return {"version": found["version"], "plans": {**found["plans"], **refused}}


def run_keys(target: str, python: str, checkout: str) -> dict[str, Any]:
    """The same of plans with one key changed: files that differ, and what was said of the bad."""
    said = find_target(target).says
    made: dict[str, Export] = {}
    texts = set()
    for name in neighbour_plans.REQUESTS:
        plan = neighbour_plans.find_plan(name)
        for key, value in keys(plan.recipe):
            if not is_described(plan.recipe, key, value):
                continue
            if key not in said and key.partition(".")[0] not in said:
                continue
            try:
                one = api.export(change(plan, key, value), target)
            except InvalidRequest:
                continue
            text = str(sorted(strip(text) for text in one.files.values()))
            if text not in texts:
                texts.add(text)
                made[f"{name} {key}={value}".replace("/", "-")[:200]] = one
    found = parse(target, python, checkout, made)["plans"]
    return {"files": len(found), "bad": {k: v for k, v in found.items() if v != "ok"}}


def strip(text: str) -> str:
    """Without comments, and the same in JSON."""
    if text.startswith("{"):
        data = json.loads(text)
        data.pop("memfit", None)
        return json.dumps(data)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def parse(target: str, python: str, checkout: str, made: dict[str, Export]) -> dict[str, Any]:
    """Write the files and have the target's own code read them."""
    with tempfile.TemporaryDirectory() as place:
        for name, one in made.items():
            api.write_export(one, Path(place) / name)
        command = [python, str(HERE / "neighbour_parsers.py"), target, place]
        if checkout:
            command += ["--source", checkout]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        sys.exit(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    words = sys.argv[1:]
    only = {word.removeprefix("--plan=") for word in words if word.startswith("--plan=")}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for word in words:
        if word.startswith("--"):
            continue
        target, _, where = word.partition("=")
        python, _, checkout = where.partition(":")
        found = run(target, python, checkout, only)
        if "--keys" in words:
            found["changed_keys"] = run_keys(target, python, checkout)
        results[target] = found
        bad = {k: v for k, v in found["plans"].items() if v != "ok" and "refused" not in v}
        print(f"{target} {found['version']}: {len(found['plans'])} plans, {len(bad)} not read")
        for name, said in bad.items():
            print(f"  {name}: {said}")
        if changed := found.get("changed_keys"):
            print(f"  {changed['files']} with a key changed, {len(changed['bad'])} not read")
            for name, said in changed["bad"].items():
                print(f"    {name}: {said}")
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
