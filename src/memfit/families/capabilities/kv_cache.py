"""What generation holds of the tokens it has seen, layer by layer, for planner and loop.

Full layers hold keys and values of all tokens of a row, sliding ones the last of a window. Latent
attention holds what keys and values are made from: the compressed vector, and the one rotated key
of all heads (DeepSeek-V2, 2405.04434; transformers from 5.23 on). Layers whose family declares
states (`Family.states`) hold those in place of keys and values: as large for any row.
"""

from __future__ import annotations

from memfit.families import find_family
from memfit.records import Record
from memfit.records.model import DTYPE_BYTES, Architecture, RowState


class LayerCache(Record, frozen=True, kw_only=True):
    """One layer's cache: elements of a token's key and value, and how many tokens it holds."""

    heads: int = 0
    key: int = 0  # elements of a head's key
    value: int = 0
    window: int = 0  # the last so many tokens; 0 = all
    states: tuple[RowState, ...] = ()  # of a layer without keys and values

    def columns(self, tokens: int) -> int:
        """Return the tokens that it has room for in a row of this length."""
        return min(tokens, self.window) if self.window else tokens

    def sizes(self, tokens: int, dtype: str) -> tuple[int, ...]:
        """Bytes of a row of this length, tensor by tensor; dtype: of keys and values."""
        if self.states:
            return tuple(state.nbytes(dtype) for state in self.states)
        each = self.heads * self.columns(tokens) * DTYPE_BYTES[dtype]
        return each * self.key, each * self.value


def layer_caches(a: Architecture) -> tuple[LayerCache, ...]:
    """What each layer keeps, in the order of layers."""
    latent = a.latent
    if latent.kv_rank:
        layer = LayerCache(heads=1, key=latent.kv_rank, value=latent.rotated)
        return (layer,) * a.layers
    made = {kind: _of_kind(a, kind) for kind in {*a.layer_kinds} or {""}}
    return tuple(made[a.kind(layer)] for layer in range(a.layers))


def _of_kind(a: Architecture, kind: str) -> LayerCache:
    """What a layer of this kind keeps."""
    if states := find_family(a.family).states(a, kind):
        return LayerCache(states=states)
    return LayerCache(heads=a.kv_heads, key=a.head_dim, value=a.head_dim, window=a.window(kind))


def cache_bytes(a: Architecture, *, rows: int, tokens: int, dtype: str, spare: int = 0) -> int:
    """Return the bytes of the slots of these rows in flight, each with room for these tokens.

    spare: the longest prompt, in tokens, where a prompt has several answers: one row more keeps
    what was read of it until the last of them has begun.
    """
    return sum(
        rows * sum(layer.sizes(tokens, dtype)) + (sum(layer.sizes(spare, dtype)) if spare else 0)
        for layer in layer_caches(a)
    )
