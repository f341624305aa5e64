"""OLMoE-1B-7B (Muennighoff et al. 2409.02060; Hugging Face's `olmoe`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.blocks import whole_norm_attention
from memfit.families.shared.config import flag, read_decoder, refuse, size
from memfit.families.shared.experts import (
    ExpertFamily,
    expert_rows,
    read_experts,
    route,
    router_rows,
    sparse,
)
from memfit.families.shared.forward import Forward, Rotation, Weights, rms_norm, rotate
from memfit.families.shared.weights import Rows, gated_config, norm_rows, whole_norm_rows
from memfit.meta import Tensor
from memfit.records.model import Architecture


@final
class Olmoe(ExpertFamily):
    """Norms over whole queries and keys; each block has many small experts and no shared one."""

    name = "olmoe"
    scored = False
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `OlmoeConfig`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        refuse(config, "head_dim", (None, hidden // heads))
        refuse(config, "clip_qkv", (None,))
        a = read_decoder(config, self.name, positions=4096)
        bias = flag(config, "attention_bias", False)
        experts = read_experts(
            config,
            count=("num_experts", 64),
            per_token=("num_experts_per_tok", 8),
            ffn=("intermediate_size", a.ffn),
            normalised=flag(config, "norm_topk_prob", False),
        )
        return replace(a, attention_bias=bias, output_bias=bias, qk_norm=True, experts=experts)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "attention_bias": a.attention_bias,
            "num_experts": a.experts.count,
            "num_experts_per_tok": a.experts.per_token,
            "norm_topk_prob": a.experts.normalised,
        }

    def rows(self, a: Architecture) -> Rows:
        """See `ExpertFamily.rows`."""
        return whole_norm_rows(a) + router_rows(a) + expert_rows(a) + norm_rows(a)

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return whole_norm_attention(forward, weights, x, turn, rms_norm, rotate)

    def run(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `ExpertFamily.run`: `OlmoeSparseMoeBlock`."""
        return sparse(forward, weights, x, route)


families.register("olmoe")(Olmoe())
