"""GLM-4.5 and GLM-4.5-Air (2508.06471; Hugging Face's `glm4_moe`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import families
from memfit.families.shared.config import flag, fraction_of, read_decoder, refuse
from memfit.families.shared.experts import ExpertFamily, expert_rows, router_rows, sparse_and_shared
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    attend,
    keep,
    module,
    project,
    rms_norm,
    rotate_part,
)
from memfit.families.shared.grouped_experts import read_groups, route_by_sigmoid, router_biases
from memfit.families.shared.weights import (
    Rows,
    attention_rows,
    gated_config,
    gated_rows,
    norm_rows,
    rotary_buffers,
)
from memfit.meta import Tensor
from memfit.records.model import Architecture, TensorSpec

_DEFAULTS = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


@final
class Glm4Moe(ExpertFamily):
    """Half of each head is rotated; first layers without experts, then many and a shared one.

    Memory does not depend on which experts are chosen (`_experts`). The layers that predict
    further tokens (`num_nextn_predict_layers`) are not part of Hugging Face's module.
    """

    name = "glm4_moe"
    scored = False
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Glm4MoeConfig`."""
        a = read_decoder(config, self.name, kv_heads=8, positions=131072, ffn=10944, rotation=0.5)
        refuse(config, "norm_topk_prob", (True,))
        return replace(
            a,
            attention_bias=flag(config, "attention_bias", False),
            qk_norm=flag(config, "use_qk_norm", False),
            experts=read_groups(config, _DEFAULTS),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "attention_bias": a.attention_bias,
            "use_qk_norm": a.qk_norm,
            "partial_rotary_factor": fraction_of(a.rotary_dim, a.head_dim),
            "n_routed_experts": a.experts.count,
            "num_experts_per_tok": a.experts.per_token,
            "moe_intermediate_size": a.experts.ffn,
            "n_shared_experts": a.experts.shared_ffn // a.experts.ffn,
            "first_k_dense_replace": a.experts.dense_layers,
            "n_group": a.experts.groups,
            "topk_group": a.experts.groups_per_token,
        }

    def rows(self, a: Architecture) -> Rows:
        """See `ExpertFamily.rows`."""
        feed_forward = expert_rows(a) + router_rows(a)
        feed_forward += gated_rows("mlp.shared_experts", a, a.experts.shared_ffn)
        return attention_rows(a) + feed_forward + norm_rows(a)

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`."""
        return rotary_buffers(a) + router_biases(a)

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return _attention(forward, weights, x, turn)

    def run(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `ExpertFamily.run`."""
        return sparse_and_shared(forward, weights, x, route_by_sigmoid)


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    """`Glm4MoeAttention`: as Llama's, but heads are normed after all three projections."""
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = meta.view(project(forward, weights, "self_attn.q_proj", x), *shape)
    key = meta.view(project(forward, weights, "self_attn.k_proj", x), *shape)
    value = meta.view(project(forward, weights, "self_attn.v_proj", x), *shape)
    if forward.architecture.qk_norm:
        query = rms_norm(forward, weights["self_attn.q_norm.weight"], query)
        key = rms_norm(forward, weights["self_attn.k_norm.weight"], key)
    query = meta.transpose(query, 1, 2)
    key = meta.transpose(key, 1, 2)
    value = meta.transpose(value, 1, 2)
    query, key = rotate_part(query, key, turn)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


families.register("glm4_moe")(Glm4Moe())
