"""MiniMax-M2 (MiniMax, 2025; Hugging Face's `minimax_m2`).

Published checkpoints hold layers that predict further tokens (`num_mtp_modules`), which Hugging
Face's class neither builds nor trains: no count here includes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import families
from memfit.families.shared.blocks import whole_norm_attention
from memfit.families.shared.config import fraction_of, read_decoder, refuse, size, size_or
from memfit.families.shared.experts import (
    ExpertFamily,
    Routed,
    expert_rows,
    read_experts,
    router_rows,
    sparse,
)
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    module,
    rms_norm,
    rotate_part,
)
from memfit.families.shared.grouped_experts import router_biases
from memfit.families.shared.weights import (
    Rows,
    gated_config,
    norm_rows,
    rotary_buffers,
    whole_norm_rows,
)
from memfit.meta import Tensor
from memfit.meta.elementwise import sigmoid
from memfit.meta.layers import routing
from memfit.records.model import Architecture, TensorSpec


@final
class MiniMaxM2(ExpertFamily):
    """Norms over whole projections, half of each head rotated; experts by sigmoid, no groups."""

    name = "minimax_m2"
    scored = False
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `MiniMaxM2Config`.

        Its older files state the rotated elements themselves (`rotary_dim`).
        """
        refuse(config, "router_jitter_noise", (None, 0, 0.0))
        refuse(config, "shared_intermediate_size", (None, 0))
        refuse(config, "scoring_func", (None, "sigmoid"))
        head_dim = size(config, "head_dim", 128)
        share = size_or(config, "rotary_dim", head_dim) / head_dim
        a = read_decoder(
            config, self.name, kv_heads=8, head_dim=128, positions=196608, rotation=share
        )
        experts = read_experts(
            config,
            count=("num_local_experts", 256),
            per_token=("num_experts_per_tok", 8),
            ffn=("intermediate_size", a.ffn),
        )
        return replace(a, qk_norm=True, experts=experts)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "partial_rotary_factor": fraction_of(a.rotary_dim, a.head_dim),
            "num_local_experts": a.experts.count,
            "num_experts_per_tok": a.experts.per_token,
        }

    def rows(self, a: Architecture) -> Rows:
        """See `ExpertFamily.rows`."""
        return whole_norm_rows(a) + router_rows(a) + expert_rows(a) + norm_rows(a)

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`."""
        return rotary_buffers(a) + router_biases(a)

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return whole_norm_attention(forward, weights, x, turn, rms_norm, rotate_part)

    def run(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `ExpertFamily.run`: `MiniMaxM2SparseMoeBlock`."""
        return sparse(forward, weights, x, _route)


@module
def _route(forward: Forward, weights: Weights, x: Tensor) -> Routed:
    """Sigmoid scores in fp32, corrected only for the choice, divided by their sum."""
    experts, weight = forward.architecture.experts, weights["mlp.gate.weight"]
    x = meta.reshape(x, -1, forward.architecture.hidden)
    logits = meta.linear(meta.cast(x, weight.dtype), weight)
    scores = sigmoid(meta.cast(logits, "float32"))
    corrected = routing.correct(scores)
    best, chosen = routing.top_k(corrected, experts.per_token)
    shares = routing.gather_last(scores, chosen)
    shares = routing.divide_in_place(shares, routing.total(shares, -1, keep=True))
    del corrected, best  # alive until here
    return logits, shares, chosen


families.register("minimax_m2")(MiniMaxM2())
