"""StableLM (Hugging Face's `stablelm`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import families
from memfit.families.shared.config import flag, fraction_of, read_decoder, refuse, size
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    apply_layer_norm,
    attend,
    cut_head,
    gated_mlp,
    keep,
    module,
    project,
    rotate,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import (
    decoder,
    gated_config,
    gated_rows,
    layer_norm,
    projection_rows,
)
from memfit.meta import Tensor
from memfit.meta.layers import lean
from memfit.records.model import Architecture, Weight


@final
class StableLm(Decoder):
    """Llama's block with LayerNorm, rotation of part of a head and, in the 12B, a norm a head."""

    name = "stablelm"
    lean = True
    hands_on_documents = False
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout", "hidden_dropout")
    norm = staticmethod(apply_layer_norm)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `StableLmConfig`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        refuse(config, "head_dim", (None, hidden // heads))
        a = read_decoder(config, self.name, kv_heads=32, positions=4096, rotation=0.25)
        return replace(
            a,
            attention_bias=flag(config, "use_qkv_bias", False),
            qk_norm=flag(config, "qk_layernorm", False),
            parallel_residual=flag(config, "use_parallel_residual", False),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            **dict.fromkeys(self.dropouts, 0.0),
            "use_qkv_bias": a.attention_bias,
            "qk_layernorm": a.qk_norm,
            "use_parallel_residual": a.parallel_residual,
            "partial_rotary_factor": fraction_of(a.rotary_dim, a.head_dim),
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        rows = projection_rows(a)
        for name, count in (("q", a.heads), ("k", a.kv_heads)) if a.qk_norm else ():
            norms = f"self_attn.{name}_layernorm.norms"
            rows += [(f"{norms}.{i}.weight", (a.head_dim,)) for i in range(count)]
        rows += gated_rows("mlp", a, a.ffn)
        rows += layer_norm("input_layernorm", a.hidden)
        if not a.parallel_residual:
            rows += layer_norm("post_attention_layernorm", a.hidden)
        return decoder(a, rows, end=layer_norm("norm", a.hidden))

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual = x
        x = apply_layer_norm(forward, weights, "input_layernorm", x)
        attended = _attention(forward, weights, x, (shared[0], shared[1]))
        if forward.architecture.parallel_residual:
            fed = gated_mlp(forward, weights, x)
            return meta.add(meta.add(residual, attended), fed)
        residual = meta.add(residual, attended)
        fed = gated_mlp(
            forward,
            weights,
            apply_layer_norm(forward, weights, "post_attention_layernorm", residual),
        )
        return meta.add(residual, fed)


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    """The rotated parts stay named until the projection has run."""
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = project(forward, weights, "self_attn.q_proj", x)
    key = project(forward, weights, "self_attn.k_proj", x)
    value = project(forward, weights, "self_attn.v_proj", x)
    query = meta.transpose(meta.view(query, *shape), 1, 2)
    key = meta.transpose(meta.view(key, *shape), 1, 2)
    value = meta.transpose(meta.view(value, *shape), 1, 2)
    if forward.architecture.qk_norm:
        query = _norm_heads(forward, weights, "self_attn.q_layernorm", query)
        key = _norm_heads(forward, weights, "self_attn.k_layernorm", key)
    size = forward.architecture.rotary_dim
    query_part, query_rest = cut_head(query, size)
    key_part, key_rest = cut_head(key, size)
    query_part, key_part = rotate(query_part, key_part, turn)
    query = meta.concatenate((query_part, query_rest), 3)
    key = meta.concatenate((key_part, key_rest), 3)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.reshape(out, *x.shape[:-1], -1)
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


@module
def _norm_heads(forward: Forward, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Apply to each head its own LayerNorm without bias, and concatenate the heads."""
    parts = meta.split(x, (1,) * x.shape[1], 1)
    normed = [
        _norm(forward, weights[f"{name}.norms.{i}.weight"], part) for i, part in enumerate(parts)
    ]
    return meta.concatenate(normed, 1)


@module
def _norm(forward: Forward, weight: Tensor, x: Tensor) -> Tensor:
    if "norm" in forward.lean:
        return lean.layer_norm(x, weight, None, feeds=False)
    return meta.layer_norm(x, weight, None)


families.register("stablelm")(StableLm())
