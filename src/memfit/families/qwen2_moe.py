"""Qwen1.5-MoE-A2.7B and Qwen2-57B-A14B (2407.10671; Hugging Face's `qwen2_moe`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.config import flag, layer_types, read_decoder, size, whole
from memfit.families.shared.experts import (
    ExpertFamily,
    every_layer_has_experts,
    gated_expert_config,
    gated_expert_rows,
    read_gated_experts,
    sparse_and_gated,
)
from memfit.families.shared.forward import Forward, Weights
from memfit.families.shared.weights import Rows, attention_rows, gated_config, norm_rows
from memfit.meta import Tensor
from memfit.records.model import SLIDING, Architecture


@final
class Qwen2Moe(ExpertFamily):
    """Qwen2's block with many small experts, and a shared one that a gate of its own weighs.

    Memory does not depend on which experts are chosen (`_experts`). The router's auxiliary loss is
    not part of memfit's step: a config that asks for it is refused.
    """

    name = "qwen2_moe"
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen2MoeConfig`."""
        a = read_decoder(config, self.name, kv_heads=16, positions=32768, ffn=5632)
        every_layer_has_experts(config)
        experts = read_gated_experts(
            config, count=60, per_token=4, ffn=1408, shared_ffn=5632,
            normalised=flag(config, "norm_topk_prob", False),
        )  # fmt: skip
        bias = flag(config, "qkv_bias", True)
        return replace(a, attention_bias=bias, sliding_window=_window(config), experts=experts)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return (
            gated_config(a)
            | gated_expert_config(a)
            | {
                "qkv_bias": a.attention_bias,
                "use_sliding_window": bool(a.sliding_window),
                "sliding_window": a.sliding_window or 4096,
                "norm_topk_prob": a.experts.normalised,
            }
        )

    def rows(self, a: Architecture) -> Rows:
        """See `ExpertFamily.rows`."""
        return attention_rows(a) + gated_expert_rows(a) + norm_rows(a)

    def run(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `ExpertFamily.run`."""
        return sparse_and_gated(forward, weights, x)


def _window(config: Mapping[str, Any]) -> int:
    """Tokens that sliding layers look back over; 0 where every layer sees everything.

    Which layers slide: `layer_types`, or every other one of the first `max_window_layers`.
    """
    kinds = layer_types(config, size(config, "num_hidden_layers", 24))
    first = whole(config, "max_window_layers", 28)
    slides = SLIDING in kinds if kinds is not None else first > 0
    if not slides or not flag(config, "use_sliding_window", False):
        return 0
    return size(config, "sliding_window", 4096)


families.register("qwen2_moe")(Qwen2Moe())
