"""Tensors as certificate and diff show them."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.core import units
from memfit.records.results import Tensor
from memfit.screens.widgets.layout import make_table, plain, show
from memfit.screens.widgets.terminal import Console

NOWHERE = "(outside any module)"


def each(tensor: Tensor) -> str:
    """`32 x 112.00 MiB`."""
    size = units.show_bytes(tensor.nbytes)
    return size if tensor.count == 1 else f"{tensor.count} x {size}"


def show_tensors(console: Console, tensors: Iterable[Tensor]) -> None:
    """One line a row: how large, what, where, by which operator."""
    table = make_table("bytes", "kind", "module", "made by", numbers=("bytes",))
    for t in tensors:
        row = (t.kind, t.module or NOWHERE, t.op)
        table.add_row(each(t), *(plain(console, cell) for cell in row))
    show(console, table)
