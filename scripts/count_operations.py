"""src/memfit/catalog/operations.json: operations of each family's block, as torch counts them.

    python scripts/count_operations.py

A minute on one core. Counting is tests/plan/step_time/counted.py's, which the tests repeat.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "plan" / "step_time")]

from counted import WAYS, count_family  # noqa: E402

from memfit.plan.step_time.counts.operations import FILE  # noqa: E402
from tiny_models import CONFIGS  # noqa: E402

KINDS = "step", "decode"


def main() -> None:
    """Count and write."""
    found = {
        family: {way: dict(zip(KINDS, count_family(family, way), strict=True)) for way in WAYS}
        for family in CONFIGS
    }
    lines = [f"{json.dumps(family)}: {json.dumps(found[family])}" for family in sorted(found)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
