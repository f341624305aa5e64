"""What the gated decoders share: Llama, Mistral, Qwen2 and Qwen3 differ in their configs alone.

Abstract, as `Family` is: a family implements it once and is final.
"""

from __future__ import annotations

from memfit.families import Family
from memfit.families.shared.forward import (
    Embedded,
    Forward,
    Weights,
    gated_block,
    rms_norm,
    rotary_embed,
)
from memfit.families.shared.weights import gated_weights
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


class GatedFamily(Family):
    """RMSNorm, rotary positions, grouped attention, gated feed-forward; the config is left open."""

    lean = True
    compiles = True
    shares_products = True
    liger = True

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        return gated_weights(a)

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Family.embed`."""
        return rotary_embed(forward, weights["embed_tokens.weight"])

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        return gated_block(forward, weights, x, (shared[0], shared[1]))

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Family.finish`."""
        return rms_norm(forward, weights["norm.weight"], x, feeds=False)
