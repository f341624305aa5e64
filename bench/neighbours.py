"""Every plan of tests/neighbour_plans.py, exported and read by the targets' own code.

    python bench/neighbours.py trl=/venvs/light/bin/python megatron=/venvs/mcore/bin/python:CHECKOUT

TARGET=PYTHON[:CHECKOUT], each with an environment of its own, as the targets pin versions that
exclude each other; CHECKOUT is a clone whose files read the target's where no package has them.
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
from memfit import api  # noqa: E402
from memfit.errors import InvalidRequest  # noqa: E402

RESULTS = HERE / "results" / "neighbours.json"


def run(target: str, python: str, checkout: str, only: set[str]) -> dict[str, Any]:
    """What the target said of each plan: "ok", its error, or memfit's refusal to write it."""
    refused = {}
    with tempfile.TemporaryDirectory() as place:
        for name in neighbour_plans.REQUESTS:
            if only and name not in only:
                continue
            try:
                made = api.export(neighbour_plans.find_plan(name), target)
            except InvalidRequest as error:
                refused[name] = f"refused by memfit: {error.message}"
                continue
            api.write_export(made, Path(place) / name)
        command = [python, str(HERE / "neighbour_parsers.py"), target, place]
        if checkout:
            command += ["--source", checkout]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        sys.exit(done.stderr[-2000:])
    found = json.loads(done.stdout)
    return {"version": found["version"], "plans": {**found["plans"], **refused}}


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
        results[target] = found
        bad = {k: v for k, v in found["plans"].items() if v != "ok" and "refused" not in v}
        print(f"{target} {found['version']}: {len(found['plans'])} plans, {len(bad)} not read")
        for name, said in bad.items():
            print(f"  {name}: {said}")
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
