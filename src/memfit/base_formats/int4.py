"""GPTQ's weights of 4 bits (Frantar et al. 2210.17323), which other frameworks train beside.

A model in it is published as such, with scales that a calibration found; its step is timed, and
its bytes are not described.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, final

from memfit.base_formats import BaseFormat, Held, Stored, Unpacking, base_formats
from memfit.core.errors import MemoryUnknown

if TYPE_CHECKING:
    from torch import Tensor


@final
class Int4(BaseFormat):
    """Known by its name and its time alone."""

    name = "int4"
    bits = 4
    library = "gptq"
    own = False
    unknown = "weights quantised by GPTQ (`base_format: int4`) are not described"
    unpacking_passes = 1.0  # packed columns with their zeros

    def tensors(self, shape: tuple[int, ...], *, double: bool) -> tuple[Stored, ...]:
        """Raise MemoryUnknown."""
        self._refuse()

    def quantising(
        self, shape: tuple[int, ...], dtype: str, width: int, *, double: bool
    ) -> list[list[int]]:
        """Raise MemoryUnknown."""
        self._refuse()

    def unpacking(self, shape: tuple[int, ...], *, double: bool) -> Unpacking:
        """Raise MemoryUnknown."""
        self._refuse()

    def quantise(self, dense: Tensor, held: Held) -> None:
        """Raise MemoryUnknown."""
        self._refuse()

    def dequantise(self, held: Held) -> Tensor:
        """Raise MemoryUnknown."""
        self._refuse()

    def scales(self, held: Held) -> Tensor:
        """Raise MemoryUnknown."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise MemoryUnknown(self.unknown)


base_formats.register("int4")(Int4())
