"""Weights that are stored as they are, in a dtype of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, final

from memfit.base_formats import BaseFormat, Held, Stored, Unpacking

if TYPE_CHECKING:
    from torch import Tensor


@final
class Plain(BaseFormat):
    """Every frozen weight is one tensor of this dtype."""

    def __init__(self, name: str, bits: int, dtype: str) -> None:
        self.name, self.bits, self.dtype = name, bits, dtype

    def tensors(self, shape: tuple[int, ...], *, double: bool) -> tuple[Stored, ...]:
        """See `BaseFormat.tensors`."""
        return (Stored("weight", shape, self.dtype),)

    def quantising(
        self, shape: tuple[int, ...], dtype: str, width: int, *, double: bool
    ) -> list[list[int]]:
        """See `BaseFormat.quantising`: a plain format allocates nothing."""
        return []

    def unpacking(self, shape: tuple[int, ...], *, double: bool) -> Unpacking:
        """See `BaseFormat.unpacking`: nothing is unpacked."""
        return Unpacking()

    def quantise(self, dense: Tensor, held: Held) -> None:
        """See `BaseFormat.quantise`."""
        self._refuse()

    def dequantise(self, held: Held) -> Tensor:
        """See `BaseFormat.dequantise`."""
        self._refuse()

    def scales(self, held: Held) -> Tensor:
        """See `BaseFormat.scales`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(f"`{self.name}` stores weights as they are, without codes")
