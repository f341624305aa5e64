"""What a row carries from token to token beside keys and values, and how large it is."""

from __future__ import annotations

from math import prod
from typing import Literal

from memfit.records import Record
from memfit.records.model import DTYPE_BYTES


class RowState(Record, frozen=True, kw_only=True):
    """A state of one layer and row, which does not grow with the row.

    `conv`: the last inputs of a causal convolution, (channels, tokens), zeros before the first
    token. `recurrent`: what a recurrence sums up of all tokens.
    """

    name: Literal["conv", "recurrent"]  # as Hugging Face's cache calls it
    shape: tuple[int, ...]  # of a row
    dtype: str = ""  # empty: that of keys and values
    passes: int  # over its bytes that a decoding step makes, reads and writes together

    def nbytes(self, dtype: str) -> int:
        """Bytes of a row's; dtype: of keys and values."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype or dtype]
