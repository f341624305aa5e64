"""What Hugging Face's classes with a bias by distance hold: their own attention, and its mask."""

from __future__ import annotations

from memfit import meta
from memfit.families.shared.forward import Forward
from memfit.meta import Tensor
from memfit.meta.attending.slots import Decode


def causal_mask(forward: Forward, dtype: str) -> Tensor:
    """(batch, 1, tokens, tokens): 0 and the smallest number, by way of booleans."""
    if isinstance(forward.slots, Decode):
        return forward.slots.mask(forward.reach, dtype)
    meter, rows, tokens = forward.meter, forward.batch, forward.tokens
    indices = [meta.empty(meter, (n,), "int64") for n in (rows, 1)]
    for _ in ("query", "key"):
        counted = meta.empty(meter, (tokens,), "int64")
        indices.append(meta.empty(meter, (tokens,), "int64"))
        del counted
    lower = meta.empty(meter, (1, 1, tokens, tokens), "bool")
    del indices
    zero = meta.empty(meter, (), dtype)
    mask = meta.empty(meter, (rows, 1, tokens, tokens), dtype)
    del lower, zero
    return mask


def hold_until_next(forward: Forward, scores: Tensor) -> None:
    """Blocks return their attention's weights too; the loop drops them when the next has run."""
    forward.beside[:] = [scores]
