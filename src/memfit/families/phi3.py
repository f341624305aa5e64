"""Phi-3 and Phi-4 (Abdin et al. 2404.14219; Hugging Face's `phi3`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.families import families
from memfit.families.shared.blocks import fused_gated_mlp, rotate_part_by_part
from memfit.families.shared.config import fraction_of, read_decoder, rope, window
from memfit.families.shared.forward import Forward, Rotation, Weights, attend, keep, module, project
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import decoder, gated_config, linear
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


@final
class Phi3(Decoder):
    """Llama's block with one projection for query, key and value and one for gate and up."""

    name = "phi3"
    lean = True
    windows = True
    lora_targets = ("qkv_proj",)
    dropouts = ("attention_dropout", "resid_pdrop", "embd_pdrop")

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Phi3Config`."""
        a = read_decoder(config, self.name, positions=4096, rotation=1.0)
        kind = rope(config).get("rope_type", rope(config).get("type", "default"))
        if kind != "default":
            raise InvalidRequest(f"rotary embedding `{kind}` in config.json is not one of `phi3`")
        return replace(a, sliding_window=window(config, None))

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            **dict.fromkeys(self.dropouts, 0.0),
            "partial_rotary_factor": fraction_of(a.rotary_dim, a.head_dim),
            "sliding_window": a.sliding_window or None,
            "pad_token_id": None,  # the class's own is larger than a small vocabulary
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        rows = linear("self_attn.o_proj", a.hidden, q, False)
        rows += linear("self_attn.qkv_proj", q + 2 * kv, a.hidden, False)
        rows += linear("mlp.gate_up_proj", 2 * a.ffn, a.hidden, False)
        rows += linear("mlp.down_proj", a.hidden, a.ffn, False)
        rows += [("input_layernorm.weight", (a.hidden,))]
        rows += [("post_attention_layernorm.weight", (a.hidden,))]
        return decoder(a, rows)

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return _attention(forward, weights, x, turn)

    def feed_forward(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Decoder.feed_forward`."""
        return fused_gated_mlp(forward, weights, x)


@module
def _attention(forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
    """Query, key and value are slices of one projection: their gradients are padded and added."""
    a = forward.architecture
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    shape = (*x.shape[:-1], -1, a.head_dim)
    fused = project(forward, weights, "self_attn.qkv_proj", x)
    query = meta.narrow(fused, 2, 0, q)
    key = meta.narrow(fused, 2, q, kv)
    value = meta.narrow(fused, 2, q + kv, kv)
    query = meta.transpose(meta.view(query, *shape), 1, 2)
    key = meta.transpose(meta.view(key, *shape), 1, 2)
    value = meta.transpose(meta.view(value, *shape), 1, 2)
    query, key = rotate_part_by_part(query, key, turn)
    key, value = keep(forward, key, value)
    out = attend(forward, query, key, value)
    out = meta.contiguous(meta.reshape(out, *x.shape[:-1], -1))
    out = project(forward, weights, "self_attn.o_proj", out)  # what went in is let go first
    return out  # noqa: RET504


families.register("phi3")(Phi3())
