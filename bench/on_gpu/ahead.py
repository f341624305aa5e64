"""Certificates of the recipes that will be measured, made while other things are: they are kept."""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from on_gpu import recipes, rollouts
from on_gpu.recipes import Certifying, make_plan

CASES = recipes.CASES | rollouts.CASES
AT_ONCE = 4  # processes, which use the processor while the GPU is measured: few of its cores


def main(row: str) -> int:
    """Certify every recipe on the row's device; `memfit certify` answers from its cache then."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(_certify, [(name, row) for name in CASES]))
    return 0


def _certify(case: tuple[str, str]) -> None:
    name, row = case
    model, _, changes = CASES[name]
    plan = make_plan(model, changes, row)
    with tempfile.TemporaryDirectory() as folder, Certifying(plan, Path(folder)) as certifying:
        certifying.result()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
