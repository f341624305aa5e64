"""What Hugging Face's classes with a bias by distance hold: their own attention, and its mask."""

from __future__ import annotations

from memfit import sizes
from memfit.families.forward import Forward
from memfit.sizes import Tensor


def causal_mask(forward: Forward, dtype: str) -> Tensor:
    """(batch, 1, tokens, tokens): 0 and the smallest number, by way of booleans."""
    meter, rows, tokens = forward.meter, forward.batch, forward.tokens
    indices = [sizes.empty(meter, (n,), "int64") for n in (rows, 1)]
    for _ in ("query", "key"):
        counted = sizes.empty(meter, (tokens,), "int64")
        indices.append(sizes.empty(meter, (tokens,), "int64"))
        del counted
    lower = sizes.empty(meter, (1, 1, tokens, tokens), "bool")
    del indices
    zero = sizes.empty(meter, (), dtype)
    mask = sizes.empty(meter, (rows, 1, tokens, tokens), dtype)
    del lower, zero
    return mask


def hold_until_next(forward: Forward, scores: Tensor) -> None:
    """Blocks return their attention's weights too; the loop drops them when the next has run."""
    forward.beside[:] = [scores]
