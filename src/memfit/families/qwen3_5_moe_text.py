"""Qwen3.5, the text model of mixtures (Qwen, 2026; Hugging Face's `qwen3_5_moe_text`).

The vision tower is another class's, and layers that predict further tokens (`mtp`) are no part of
the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.experts import (
    gated_expert_config,
    gated_expert_rows,
    read_gated_experts,
    sparse_and_gated,
)
from memfit.families.shared.forward import Forward, Weights
from memfit.families.shared.hybrid.decoder import HybridDecoder, grid_rotation, read_hybrid
from memfit.families.shared.weights import Rows
from memfit.meta import Tensor
from memfit.records.model import Architecture


@final
class Qwen35MoeText(HybridDecoder):
    """Qwen3.5's two kinds of block, each with many small experts and a shared one that is gated.

    Memory does not depend on which experts are chosen. The router's auxiliary loss is not part of
    memfit's step: a config that asks for it is refused.
    """

    name = "qwen3_5_moe_text"
    text_of = "qwen3_5_moe"
    scored = False
    rotation = staticmethod(grid_rotation)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen3_5MoeTextConfig`."""
        experts = read_gated_experts(config, count=256, per_token=8, ffn=512, shared_ffn=512)
        # no block has a plain feed-forward, and published files name no width of one
        a = read_hybrid(config, self.name, kv_heads=2, ffn=experts.shared_ffn)
        return replace(a, experts=experts)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return super().config(a) | gated_expert_config(a)

    def feed_forward_rows(self, a: Architecture) -> Rows:
        """See `HybridDecoder.feed_forward_rows`."""
        return gated_expert_rows(a)

    def feed_forward(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Decoder.feed_forward`."""
        return sparse_and_gated(forward, weights, x)


families.register("qwen3_5_moe_text")(Qwen35MoeText())
