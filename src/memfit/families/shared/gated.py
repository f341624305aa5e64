"""What decoders share: a family's class declares how it differs, and overrides what it has to.

Abstract, as `Family` is: a family implements them once and is final.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from memfit import meta
from memfit.families import Family
from memfit.families.shared.forward import (
    Embedded,
    Forward,
    Rotation,
    Weights,
    embedding,
    gated_attention,
    gated_mlp,
    positions,
    rms_norm,
    rotation,
)
from memfit.families.shared.weights import gated_weights
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight

# a norm by the name of its weights, and one that has a single weight, such as `rms_norm`; the truth
# says whether a projection reads what it makes
Norm = Callable[[Forward, Weights, str, Tensor, bool], Tensor]
WeightNorm = Callable[[Forward, Tensor, Tensor, bool], Tensor]


def by_name(norm: WeightNorm) -> Norm:
    """The same norm, by the name of its weight."""

    def call(forward: Forward, weights: Weights, name: str, x: Tensor, feeds: bool) -> Tensor:
        return norm(forward, weights[f"{name}.weight"], x, feeds)

    return call


def embed_tokens(forward: Forward, weight: Tensor) -> Tensor:
    """Rows of the token embedding: (batch, tokens, hidden)."""
    return embedding(forward, weight, forward.input_ids)


def kinds(a: Architecture) -> list[str]:
    """The kinds of block that there are."""
    return sorted(set(a.layer_kinds)) or [""]


class Decoder(Family):
    """A residual stream to which each block adds attention and a feed-forward, each behind a norm.

    Llama's, where a family declares nothing else.
    """

    table: ClassVar[str] = "embed_tokens"  # the module of token embeddings
    embed_rows: ClassVar[staticmethod[[Forward, Tensor], Tensor]] = staticmethod(embed_tokens)
    # what all blocks rotate by, two tensors, made for the dtype of the embeddings
    rotation: ClassVar[staticmethod[[Forward, str, Tensor], Rotation]] = staticmethod(rotation)
    rotates_by_kind: ClassVar[bool] = False  # each kind of block by other angles
    norm: ClassVar[staticmethod[[Forward, Weights, str, Tensor, bool], Tensor]] = staticmethod(
        by_name(rms_norm)
    )
    last_norm: ClassVar[str] = "norm"  # its name

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        return gated_weights(a)

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Family.embed`; all blocks share what they rotate by, and position ids."""
        x = self.embed_rows(forward, weights[f"{self.table}.weight"])
        position_ids = positions(forward)
        if self.rotates_by_kind:
            turns = {
                kind: self.rotation(forward, x.dtype, position_ids)
                for kind in kinds(forward.architecture)
            }
            return Embedded(x, (position_ids,), (x,), turns)
        first, second = self.rotation(forward, x.dtype, position_ids)
        return Embedded(x, (first, second, position_ids), (x,))

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """Attention of one block: (batch, tokens, hidden) -> the same."""
        return gated_attention(forward, weights, x, turn)

    def feed_forward(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """The feed-forward of one block: (batch, tokens, hidden) -> the same."""
        return gated_mlp(forward, weights, x)

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual = x
        x = self.norm(forward, weights, "input_layernorm", x, True)
        x = self.attention(forward, weights, x, (shared[0], shared[1]))
        x = meta.add(residual, x)
        residual = x
        x = self.norm(forward, weights, "post_attention_layernorm", x, True)
        x = self.feed_forward(forward, weights, x)
        return meta.add(residual, x)

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Family.finish`."""
        return self.norm(forward, weights, self.last_norm, x, False)


class GatedFamily(Decoder):
    """Llama, Mistral, Qwen2, Qwen3 and Seed-OSS, which differ in their configs alone."""

    lean = True
    compiles = True
    shares_products = True
    liger = True


class SandwichFamily(Decoder):
    """A norm before and one after each of attention and feed-forward."""

    lean = True
    norm_after_blocks = True
    norms: ClassVar[tuple[str, str, str, str]]  # their names, in the order in which they run

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual = x
        x = self.norm(forward, weights, self.norms[0], x, True)
        x = self.attention(forward, weights, x, (shared[0], shared[1]))
        x = self.norm(forward, weights, self.norms[1], x, True)
        x = meta.add(residual, x)
        residual = x
        x = self.norm(forward, weights, self.norms[2], x, True)
        x = self.feed_forward(forward, weights, x)
        x = self.norm(forward, weights, self.norms[3], x, True)
        return meta.add(residual, x)


class PostNormFamily(Decoder):
    """Norms of what attention and feed-forward add, and none before them."""

    lean = True
    norm_after_blocks = True

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual = x
        x = self.attention(forward, weights, x, (shared[0], shared[1]))
        x = self.norm(forward, weights, "post_attention_layernorm", x, True)
        x = meta.add(residual, x)
        residual = x
        x = self.feed_forward(forward, weights, x)
        x = self.norm(forward, weights, "post_feedforward_layernorm", x, True)
        return meta.add(residual, x)
