"""Keys and values that are concatenated anew in each call of a model, in bytes.

Source: transformers 5.24 (cache_utils.py: DynamicLayer, DynamicSlidingWindowLayer), whose layers
grow by `torch.cat`: the new tensor is made beside the old one. A sliding layer gives up its old
tensors when both new ones are there, and keeps views of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from memfit.meta.meter import Meter
from memfit.meta.tensor import Tensor, empty
from memfit.records.ledger import Kind

OWNER = "cache"


class Grown:
    """The cache of one call: what earlier calls left of each layer, and what this one makes."""

    def __init__(
        self, meter: Meter, before: int = 0, old: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """before: tokens that earlier calls saw; old: keys and values of each layer, in order."""
        self.meter, self.before = meter, before
        self._old = list(reversed(old))
        self._made: list[Tensor] = []

    def store(self, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """(rows, heads, tokens, size) of new tokens -> of all that are in sight."""
        seen = min(self.before, window - 1) if window else self.before
        old = list(self._old.pop()) if self.before else []
        made = []
        for new in (key, value):
            rows, heads, tokens, size = new.shape
            with self._owning():
                shape = (rows, heads, seen + tokens, size)
                made.append(empty(self.meter, shape, new.dtype, Kind.KV_CACHE))
            if old and not window:
                del old[0]
        old.clear()
        self._made += made
        return made[0], made[1]

    @contextmanager
    def _owning(self) -> Iterator[None]:
        before, self.meter.owner = self.meter.owner, OWNER
        try:
            yield
        finally:
            self.meter.owner = before


def leave(
    meter: Meter, shape: tuple[int, int, int], sizes: tuple[int, int], dtype: str
) -> tuple[Tensor, Tensor]:
    """What an earlier call left of a layer: keys and values of (rows, heads, tokens)."""
    before, meter.owner = meter.owner, OWNER
    key = empty(meter, (*shape, sizes[0]), dtype, Kind.KV_CACHE)
    value = empty(meter, (*shape, sizes[1]), dtype, Kind.KV_CACHE)
    meter.owner = before
    return key, value
