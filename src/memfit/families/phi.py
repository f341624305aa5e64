"""Phi-1, Phi-1.5 and Phi-2 (Hugging Face's `phi`; Li et al. 2309.05463)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import families
from memfit.families.shared.config import fraction_of, read_decoder, refuse, size
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    apply_layer_norm,
    attend,
    cut_head,
    heads,
    keep,
    module,
    plain_mlp,
    project,
    rotate,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import Rows, decoder, gated_config, layer_norm, linear
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


@final
class Phi(Decoder):
    """One LayerNorm for attention and feed-forward, side by side; biases everywhere."""

    name = "phi"
    lean = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout", "resid_pdrop", "embd_pdrop")
    norm = staticmethod(apply_layer_norm)
    last_norm = "final_layernorm"

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `PhiConfig`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        refuse(config, "head_dim", (None, hidden // heads))
        refuse(config, "qk_layernorm", (False, None))
        a = read_decoder(
            config, self.name, positions=2048, act=("hidden_act", "gelu_new"), rotation=0.5
        )
        return replace(
            a, attention_bias=True, output_bias=True, mlp_bias=True, parallel_residual=True,
            shared_norm=True, head_bias=True,
        )  # fmt: skip

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            **dict.fromkeys(self.dropouts, 0.0),
            "partial_rotary_factor": fraction_of(a.rotary_dim, a.head_dim),
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        rows: Rows = linear("self_attn.q_proj", q, a.hidden, True)
        rows += linear("self_attn.k_proj", kv, a.hidden, True)
        rows += linear("self_attn.v_proj", kv, a.hidden, True)
        rows += linear("self_attn.dense", a.hidden, q, True)
        rows += linear("mlp.fc1", a.ffn, a.hidden, True)
        rows += linear("mlp.fc2", a.hidden, a.ffn, True)
        rows += layer_norm("input_layernorm", a.hidden)
        return decoder(a, rows, end=layer_norm("final_layernorm", a.hidden))

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual = x
        x = apply_layer_norm(forward, weights, "input_layernorm", x)
        attended = _attention(forward, weights, x, (shared[0], shared[1]))
        fed = plain_mlp(forward, weights, "mlp.fc1", "mlp.fc2", x)
        return meta.add(meta.add(attended, fed), residual)


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    """The rotated parts stay named until the projection has run."""
    shape = (*x.shape[:-1], -1, forward.architecture.head_dim)
    query = heads(forward, weights, "self_attn.q_proj", x, shape)
    key = heads(forward, weights, "self_attn.k_proj", x, shape)
    value = heads(forward, weights, "self_attn.v_proj", x, shape)
    size = forward.architecture.rotary_dim
    query_part, query_rest = cut_head(query, size)
    key_part, key_rest = cut_head(key, size)
    query_part, key_part = rotate(query_part, key_part, turn)
    query = meta.concatenate((query_part, query_rest), 3)
    key = meta.concatenate((key_part, key_rest), 3)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "self_attn.dense", out)  # what went in is let go first
    return out  # noqa: RET504


families.register("phi")(Phi())
