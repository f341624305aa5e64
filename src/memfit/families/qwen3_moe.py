"""Qwen3's mixtures: 30B-A3B, 235B-A22B, Coder 480B (2505.09388; Hugging Face's `qwen3_moe`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.config import flag, read_decoder, size
from memfit.families.shared.experts import (
    ExpertFamily,
    every_layer_has_experts,
    expert_rows,
    read_experts,
    route,
    router_rows,
    sparse,
)
from memfit.families.shared.forward import Forward, Weights
from memfit.families.shared.weights import Rows, attention_rows, gated_config, norm_rows
from memfit.meta import Tensor
from memfit.records.model import Architecture


@final
class Qwen3Moe(ExpertFamily):
    """Qwen3's block with a feed-forward chosen for each token among many small ones.

    Memory does not depend on which experts are chosen (`_experts`). The router's auxiliary loss is
    not part of memfit's step: a config that asks for it is refused.
    """

    name = "qwen3_moe"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen3MoeConfig`."""
        a = read_decoder(config, self.name, kv_heads=4, positions=32768, ffn=6144)
        every_layer_has_experts(config)
        bias = flag(config, "attention_bias", False)
        # what Hugging Face's class writes, and what published files say
        key = "num_local_experts" if "num_local_experts" in config else "num_experts"
        experts = read_experts(
            config,
            count=(key, 128),
            per_token=("num_experts_per_tok", 8),
            ffn=("moe_intermediate_size", 768),
            normalised=flag(config, "norm_topk_prob", False),
        )
        return replace(
            a, attention_bias=bias, output_bias=bias, qk_norm=True, sliding_window=_window(config),
            experts=experts,
        )  # fmt: skip

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "attention_bias": a.attention_bias,
            "use_sliding_window": bool(a.sliding_window),
            "sliding_window": a.sliding_window or None,
            "num_experts": a.experts.count,
            "num_experts_per_tok": a.experts.per_token,
            "moe_intermediate_size": a.experts.ffn,
            "norm_topk_prob": a.experts.normalised,
        }

    def rows(self, a: Architecture) -> Rows:
        """See `ExpertFamily.rows`."""
        return attention_rows(a) + expert_rows(a) + router_rows(a) + norm_rows(a)

    def run(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `ExpertFamily.run`: `Qwen3MoeSparseMoeBlock`."""
        return sparse(forward, weights, x, route)


def _window(config: Mapping[str, Any]) -> int:
    """Tokens that every layer looks back over; 0 for all."""
    used = flag(config, "use_sliding_window", False)
    if not used or config.get("sliding_window", 4096) is None:
        return 0
    return size(config, "sliding_window", 4096)


families.register("qwen3_moe")(Qwen3Moe())
