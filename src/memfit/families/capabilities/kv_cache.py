"""What generation holds of each token it has seen: keys and values by layer, for planner and loop.

Full layers hold all tokens of a row, sliding ones the last of a window. Latent attention holds
what keys and values are made from: the compressed vector, and the one rotated key of all heads
(DeepSeek-V2, 2405.04434; transformers from 5.23 on).
"""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.records import Record
from memfit.records.model import DTYPE_BYTES, Architecture


class LayerCache(Record, frozen=True, kw_only=True):
    """One layer's cache: elements of a token's key and value, and how many tokens it holds."""

    heads: int
    key: int  # elements of a head's key
    value: int
    window: int = 0  # the last so many tokens; 0 = all

    def columns(self, tokens: int) -> int:
        """Return the tokens that it has room for in a row of this length."""
        return min(tokens, self.window) if self.window else tokens


def layer_caches(a: Architecture) -> tuple[LayerCache, ...]:
    """What each layer keeps, in the order of layers.

    Raises InvalidRequest for linear attention, whose states memfit's loop does not keep.
    """
    if a.recurrent:
        raise InvalidRequest(
            f"answers of a `{a.family}` are not sampled by memfit: its linear attention keeps a"
            " state of each row, which memfit's slots do not hold",
            hint="use an objective that learns from rows, or generate with transformers",
        )
    latent = a.latent
    if latent.kv_rank:
        layer = LayerCache(heads=1, key=latent.kv_rank, value=latent.rotated)
        return (layer,) * a.layers
    return tuple(
        LayerCache(
            heads=a.kv_heads, key=a.head_dim, value=a.head_dim, window=a.window(a.kind(layer))
        )
        for layer in range(a.layers)
    )


def cache_bytes(a: Architecture, *, rows: int, tokens: int, dtype: str, spare: int = 0) -> int:
    """Return the bytes of the slots of these rows in flight, each with room for these tokens.

    spare: the longest prompt, in tokens, where a prompt has several answers: one row more keeps
    what was read of it until the last of them has begun.
    """
    elements = sum(
        layer.heads
        * (layer.key + layer.value)
        * (rows * layer.columns(tokens) + layer.columns(spare))
        for layer in layer_caches(a)
    )
    return elements * DTYPE_BYTES[dtype]
