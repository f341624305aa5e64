"""Scores that are written out grow with the square of a document; fused kernels write none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import attention

SHORT, LONG = 2048, 8192


@pytest.mark.parametrize(
    ("kernel", "packed"), [("flash", False), ("flash", True), ("varlen", True)]
)
def test_what_a_fused_kernel_keeps_grows_with_the_row(kernel: str, packed: bool) -> None:
    short, long = (attention.measure(kernel, packed, n) for n in (SHORT, LONG))
    # one document is not joined with another: a row of several holds that copy too
    assert long == pytest.approx(
        LONG / SHORT * short, rel=0.05 if packed and kernel == "flash" else 1e-5
    )


def test_what_written_out_attention_keeps_grows_with_the_square() -> None:
    short, long = (attention.measure("math", False, n) for n in (SHORT, LONG))
    scores = 32 * LONG * LONG * 4  # heads, in fp32; of the shorter row a sixteenth
    assert long - 4 * short == scores - 4 * scores // 16  # what grows with the row cancels


def test_the_page_is_what_the_certificate_says() -> None:
    said = attention.PAGE.read_text()
    assert f"| {attention.show_bytes(attention.measure('flash', False, SHORT))} |" in said
