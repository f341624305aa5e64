"""Qwen3-Next-80B-A3B and Qwen3-Coder-Next (Qwen, 2025; Hugging Face's `qwen3_next`).

Layers that predict further tokens (`mtp`) are no part of the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.config import flag
from memfit.families.shared.experts import every_layer_has_experts, read_gated_experts
from memfit.families.shared.hybrid.decoder import HybridMixture, joined_delta_rows, read_hybrid
from memfit.families.shared.hybrid.delta_rule import JOINED_GATES, joined_delta_net
from memfit.families.shared.weights import Rows
from memfit.records.model import Architecture


@final
class Qwen3Next(HybridMixture):
    """Qwen3.5's kinds of block, whose linear attention joins its projections, with experts."""

    name = "qwen3_next"
    lora_targets = ("q_proj", "v_proj", "in_proj_qkvz")
    state_gates = JOINED_GATES
    linear_attention = staticmethod(joined_delta_net)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen3NextConfig`."""
        every_layer_has_experts(config)
        normalised = flag(config, "norm_topk_prob", True)
        experts = read_gated_experts(
            config, count=512, per_token=10, ffn=512, shared_ffn=512, normalised=normalised
        )
        return replace(read_hybrid(config, self.name, kv_heads=2, ffn=5632), experts=experts)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return super().config(a) | {"norm_topk_prob": a.experts.normalised}

    def linear_rows(self, a: Architecture) -> Rows:
        """See `HybridDecoder.linear_rows`."""
        return joined_delta_rows(a)


families.register("qwen3_next")(Qwen3Next())
