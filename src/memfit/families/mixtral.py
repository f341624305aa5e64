"""Mixtral 8x7B and 8x22B (Jiang et al. 2401.04088; Hugging Face's `mixtral`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import families
from memfit.families.shared.config import read_decoder, refuse, window
from memfit.families.shared.experts import (
    ExpertFamily,
    Routed,
    expert_rows,
    read_experts,
    router_rows,
    sparse,
)
from memfit.families.shared.forward import Forward, Weights, module
from memfit.families.shared.weights import Rows, attention_rows, gated_config, norm_rows
from memfit.meta import Tensor
from memfit.meta.elementwise import softmax
from memfit.meta.layers import routing
from memfit.records.model import Architecture


@final
class Mixtral(ExpertFamily):
    """Mistral's block with a feed-forward chosen for each token among several.

    Memory does not depend on which experts are chosen (`_experts`). The router's auxiliary loss
    is not part of memfit's step: it is off unless `output_router_logits` asks for it, and then
    the config is refused.
    """

    name = "mixtral"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `MixtralConfig`."""
        a = read_decoder(config, self.name, kv_heads=8, positions=4096 * 32)
        refuse(config, "router_jitter_noise", (0, 0.0, None))
        experts = read_experts(
            config,
            count=("num_local_experts", 8),
            per_token=("num_experts_per_tok", 2),
            ffn=("intermediate_size", a.ffn),
        )
        return replace(a, sliding_window=window(config, None), experts=experts)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "num_local_experts": a.experts.count,
            "num_experts_per_tok": a.experts.per_token,
            "sliding_window": a.sliding_window or None,
            "router_jitter_noise": 0.0,
        }

    def rows(self, a: Architecture) -> Rows:
        """See `ExpertFamily.rows`."""
        return attention_rows(a) + router_rows(a) + expert_rows(a) + norm_rows(a)

    def run(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `ExpertFamily.run`: `MixtralSparseMoeBlock`."""
        return sparse(forward, weights, x, _route)


@module
def _route(forward: Forward, weights: Weights, x: Tensor) -> Routed:
    """`MixtralTopKRouter`: as Qwen's, but the shares stay in fp32."""
    x = meta.reshape(x, -1, forward.architecture.hidden)
    logits = meta.linear(x, weights["mlp.gate.weight"])
    odds = softmax(meta.cast(logits, "float32"))
    shares, chosen = routing.top_k(odds, forward.architecture.experts.per_token)
    shares = routing.divide_in_place(shares, routing.total(shares, -1, keep=True))
    return logits, shares, chosen


families.register("mixtral")(Mixtral())
