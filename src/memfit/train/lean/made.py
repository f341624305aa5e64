"""What a tensor was made of, so that a product that reads it in its backward recomputes it.

A norm's output, or gate times up, is one or two cheap kernels away from tensors that backward
holds anyway. It carries a note of them (`mark`); a lean product that reads it (`find`) keeps what
the note names instead of the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Remake = Callable[..., Tensor]  # of the parts: the tensor, bit for bit as the forward made it
_NAME = "_memfit_made"


class Shared:
    """One tensor recomputed for all products that read it: the first makes, the last drops it."""

    __slots__ = ("_uses", "_value", "wanted")

    def __init__(self) -> None:
        self.wanted = 0  # products whose weight's gradient reads the tensor
        self._uses = 0
        self._value: Tensor | None = None

    def take(self, remake: Remake, parts: tuple[Tensor | None, ...], dtype: torch.dtype) -> Tensor:
        """The tensor in the dtype of the products."""
        value = self._value
        if value is None:
            value = remake(*parts).to(dtype)
        self._uses += 1
        last = self._uses % self.wanted == 0
        self._value = None if last else value
        return value


class Made(NamedTuple):
    """A tensor's parts and how they become the tensor."""

    remake: Remake
    parts: tuple[Tensor | None, ...]
    shared: Shared


def mark(tensor: Tensor, remake: Remake, *parts: Tensor | None) -> Tensor:
    """Note on `tensor` what it was made of; returns it."""
    setattr(tensor, _NAME, Made(remake, parts, Shared()))
    return tensor


def find(tensor: Tensor) -> Made | None:
    """The note on a tensor; None where nothing lean made it, or a copy or a view came between."""
    found: Made | None = getattr(tensor, _NAME, None)
    return found
