"""Qwen3.5, the text model of mixtures (Qwen, 2026; Hugging Face's `qwen3_5_moe_text`).

The vision tower is another class's, and layers that predict further tokens (`mtp`) are no part of
the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.experts import read_gated_experts
from memfit.families.shared.hybrid.decoder import HybridMixture, grid_rotation, read_hybrid
from memfit.records.model import Architecture


@final
class Qwen35MoeText(HybridMixture):
    """Qwen3.5's two kinds of block, each with many small experts and a shared one that is gated."""

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


families.register("qwen3_5_moe_text")(Qwen35MoeText())
