"""What CUDA kernels took from the allocator on a real GPU, beside what their rules say today.

The programs of `make gpu` run once more, on fake tensors, and count the rules' bytes; the rows that
a GPU gave (bench/results/gpu/rows.jsonl) have what the same operators took.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from on_gpu import kernels  # noqa: E402
from on_gpu.probe import key_of  # noqa: E402
from on_gpu.rows import LANDED, read_rows  # noqa: E402

ROWS = {
    (row["device"], row["name"].removeprefix("kernel: ")): row["operators"]
    for row in read_rows(LANDED).values()
    if row["slice"] == "kernels" and row["name"].startswith("kernel: ") and "operators" in row
}
ROUNDING = 1024  # the allocator gives multiples of 512 bytes, and a rule names one allocation
# Operators whose bytes the rules do not say: what is known of them, and of the sign of the error.
UNKNOWN = {
    "efficient, bf16, wide heads": "dk and dv in parts: the rule counts all of them, 2.2 x as much",
    "embedding": "a copy of an expanded gradient, which no step has, and what sorting takes",
}


@pytest.mark.parametrize(("device", "name"), sorted(ROWS), ids=str)
def test_a_kernel_takes_what_its_rule_says(device, name):
    if name in UNKNOWN:
        pytest.skip(UNKNOWN[name])
    said = kernels.say(name, device)
    for operator in ROWS[device, name]:
        key = key_of(operator["operator"], operator["shapes"])
        assert abs(said.get(key, 0) - operator["inside"]) <= ROUNDING, key
