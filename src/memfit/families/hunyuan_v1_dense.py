"""Hunyuan's dense models: 0.5B, 1.8B, 4B and 7B (Tencent, 2025; `hunyuan_v1_dense`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.blocks import plain_attention
from memfit.families.shared.config import flag, read_decoder, refuse
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    rotate,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import (
    decoder,
    gated_config,
    gated_rows,
    norm_rows,
    projection_rows,
)
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight

NORMS = ("self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight")


@final
class HunyuanV1Dense(Decoder):
    """Llama's block with an RMSNorm over each head of query and key after they are rotated."""

    name = "hunyuan_v1_dense"
    lean = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `HunYuanDenseV1Config`."""
        refuse(config, "use_qk_norm", (None, True))
        refuse(config, "use_cla", (None, False))
        a = read_decoder(_with_fixed_rotation(config), self.name, positions=2048)
        bias = flag(config, "attention_bias", False)
        return replace(a, attention_bias=bias, output_bias=bias, qk_norm=True)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {"attention_bias": a.attention_bias, "pad_token_id": None}

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        rows = projection_rows(a) + [(name, (a.head_dim,)) for name in NORMS]
        return decoder(a, rows + gated_rows("mlp", a, a.ffn) + norm_rows(a))

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return plain_attention(forward, weights, x, turn, rotate, NORMS)


def _with_fixed_rotation(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config, where a `dynamic` rotation with an `alpha` is one of fixed frequencies, which
    the class makes of it."""
    for key in ("rope_scaling", "rope_parameters"):
        stated = config.get(key)
        if not isinstance(stated, Mapping) or not stated.get("alpha"):
            continue
        if "dynamic" in (stated.get("type"), stated.get("rope_type")):
            fixed = {k: v for k, v in stated.items() if k != "type"} | {"rope_type": "default"}
            config = {**config, key: fixed}
    return config


families.register("hunyuan_v1_dense")(HunyuanV1Dense())
