"""The replayed allocator beside the real one; skipped with a reason where there is no GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import allocator_parity  # noqa: E402

CASES = list(allocator_parity.make_cases())
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: CASES[n].name)
def test_the_replay_does_what_torch_does(number: int) -> None:
    row = allocator_parity.run_case(number, None)
    assert "failed" not in row, row["failed"]
    assert row["divergence"] is None
    assert row["entries"] > 0
