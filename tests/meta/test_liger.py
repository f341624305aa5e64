"""Liger-Kernel's operations against the peaks that its own benchmark measured on an A100."""

import json
import sys
from pathlib import Path

import pytest

from memfit.core.units import MIB
from memfit.meta.workspace import Grid, row_sum

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import liger_kernels  # noqa: E402

ROWS = json.loads(liger_kernels.ROWS.read_text(encoding="utf-8"))["rows"]
EXACT = ("rms_norm", "rope", "swiglu")

SEMAPHORES = 512  # bytes of the blocks' semaphores, as the allocator rounds them


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['kernel']}-{r['provider']}-{r['value']}")
def test_each_row_of_the_benchmark_is_reproduced(row):
    found = liger_kernels.predict(row)
    assert found == pytest.approx(row["mib"] * MIB, rel=1e-3)
    if row["kernel"] in EXACT:
        assert abs(found - row["mib"] * MIB) < 0.02 * MIB


def test_the_committed_table_is_what_would_be_written():
    text, worst = liger_kernels.report()
    assert (ROOT / "bench" / "results" / "liger_kernels.md").read_text(encoding="utf-8") == text
    assert worst < liger_kernels.LIMIT


@pytest.mark.parametrize(
    ("columns", "mib"), [(1024, 16), (2048, 32), (4096, 64), (8192, 108), (16384, 112)]
)
def test_partial_results_of_a_sum_over_2048_rows_on_an_a100(columns, mib):
    """Worked out by hand from setReduceConfig, and seen in the benchmark's peaks."""
    assert sum(row_sum(columns, 2048, liger_kernels.A100)) == mib * MIB + SEMAPHORES


@pytest.mark.parametrize(
    ("columns", "rows"),
    [(1024, 512), (1024, 63), (1, 1), (4096 * 256, 2048)],  # few values a thread; enough blocks
)
def test_a_sum_that_one_block_a_column_can_do_takes_nothing(columns, rows):
    assert row_sum(columns, rows, liger_kernels.A100) == ()


def test_more_multiprocessors_share_a_column_among_more_blocks():
    h100 = Grid(multiprocessors=132, threads=2048)
    assert sum(row_sum(8192, 4096, h100)) > sum(row_sum(8192, 4096, liger_kernels.A100))


def test_columns_that_four_do_not_divide_are_read_one_by_one():
    assert (sum(row_sum(1025, 65536, liger_kernels.A100)) - SEMAPHORES) % 1025 == 0


def test_a_chunk_of_the_fused_loss_is_about_as_large_as_the_hidden_states():
    from memfit import meta
    from memfit.meta import Meter

    meter = Meter(cuda=True)
    hidden = meta.parameter(meter, (4096, 1024), "bfloat16", trainable=True)
    weight = meta.parameter(meter, (32768, 1024), "bfloat16", trainable=True)
    labels = meta.parameter(meter, (4096,), "int64", trainable=False)
    start = len(meter.requested)
    loss = liger_kernels.liger_fused_linear_cross_entropy(hidden, weight, labels)
    largest = max(n for n in meter.requested[start:] if n != weight.nbytes)
    assert largest == hidden.nbytes
    meta.backward(loss)
    assert weight.grad is not None
    assert hidden.grad is not None
