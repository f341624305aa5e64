"""src/memfit/catalog/operations.json: operations of each family's block, as torch counts them.

    python scripts/count_operations.py

Those of linear attention, and the bytes it moves, are src/memfit/catalog/linear_attention.json's.
Two minutes on one core. Counting is that of tests/plan/step_time, which the tests repeat.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "plan" / "step_time")]

from counted import WAYS, count_family  # noqa: E402
from counted_linear import count_bytes, count_launches  # noqa: E402

from memfit.plan.step_time.counts import linear_attention  # noqa: E402
from memfit.plan.step_time.counts.operations import FILE  # noqa: E402
from tiny_models import CONFIGS, RECURRENT  # noqa: E402

KINDS = "step", "decode"


def main() -> None:
    """Count and write."""
    found = {
        family: {way: dict(zip(KINDS, count_family(family, way), strict=True)) for way in WAYS}
        for family in CONFIGS
    }
    write(FILE, found)
    write(
        linear_attention.FILE,
        {
            family: {
                way: {"launches": count_launches(family, way), **count_bytes(family, way)}
                for way in WAYS
            }
            for family in RECURRENT
        },
    )


def write(path: Path, found: dict[str, dict[str, Any]]) -> None:
    """A row a family."""
    lines = [f"{json.dumps(family)}: {json.dumps(found[family])}" for family in sorted(found)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
