"""What CUDA kernels took from the allocator on a real GPU, beside what their rules say today.

The programs of `make gpu` run once more, on fake tensors, and count the rules' bytes; the rows that
a GPU gave (bench/results/gpu/rows.jsonl) have what the same operators took.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memfit.allocator.caching import CachingAllocator
from memfit.allocator.settings import Settings
from memfit.catalog import find_device
from memfit.certify.tracing.workspace import RULES
from memfit.meta import workspace
from memfit.meta.attending.kernels import Heads, usable

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from on_gpu import kernels, trainers  # noqa: E402
from on_gpu.probe import key_of  # noqa: E402
from on_gpu.rows import LANDED, Place, read_rows  # noqa: E402

ROWS = {
    (row["device"], row["name"].removeprefix("kernel: ")): row["operators"]
    for row in read_rows(LANDED).values()
    if row["slice"] == "kernels" and row["name"].startswith("kernel: ") and "operators" in row
}
ROUNDING = 1024  # the allocator gives multiples of 512 bytes, and a rule names one allocation
MIB = 2**20


@pytest.mark.parametrize(("device", "name"), sorted(ROWS), ids=str)
def test_a_kernel_takes_what_its_rule_says(device, name):
    said = kernels.say(name, device)
    for operator in ROWS[device, name]:
        key = key_of(operator["operator"], operator["shapes"])
        if operator["operator"] not in RULES:
            assert operator["inside"] < MIB, key
            continue
        given = said[key] + left_over(operator)
        assert abs(given - operator["inside"]) <= ROUNDING, key


def left_over(operator) -> int:
    """Bytes beyond those asked for that the allocator gave with an embedding's fp32 sums.

    A block of that size comes from a segment of its own, of which less than a MiB would be left.
    """
    if operator["operator"] != "aten.embedding_dense_backward.default":
        return 0
    indices, rows, hidden = 8192, 32000, 1024  # `kernels.embed`
    assert operator["shapes"] == [f"bfloat16 {indices}x{hidden}", f"int64 {indices}"]
    narrow, wide = (
        sum(workspace.embedding_backward(indices, rows, n)) for n in (hidden, 2 * hidden)
    )
    allocator = CachingAllocator(Settings())
    allocator.allocate(0, wide - narrow)
    return allocator.peaks.allocated - (wide - narrow)


def test_cudnns_kernel_was_the_faster_one_where_it_is_taken_first():
    rows = read_rows(LANDED).values()
    for row in (r for r in rows if r["slice"] == "rates" and r["name"] == "attention"):
        best = {c["kernel"]: max(rate for _, rate in c["points"]) for c in row["curves"]
                if c["dtype"] == "bf16"}  # fmt: skip
        at = find_device(row["device"]).capability
        order = usable("bfloat16", Heads(128), platform="cuda", capability=at)
        assert order[0] == max(best, key=best.get)


def test_a_trainer_on_cudnns_kernel_held_what_is_predicted():
    """Hugging Face's, whose peak has what 16 layers keep of attention, and no backward of it."""
    found = [row for row in read_rows(LANDED).values() if row["slice"] == "trainers"]
    ran = [row for row in found if any("cudnn" in call for call in row["attention"])]
    assert ran
    for row in ran:
        place = Place("cuda", row["device"], Path())
        case = dict(trainers.list_cases(place)[row["name"]])
        if "model" not in case:
            case["model"] = trainers.hf_masks.published(row["name"].split(": ")[1])
        said = trainers.predict(case, place)["predicted"]
        assert abs(said - row["measured"]) < 1e-5 * row["measured"]
