"""ERNIE 4.5, dense: the 0.3B (Baidu, 2025; Hugging Face's `ernie4_5`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.blocks import plain_attention, rotate_written_out, wide_rotation
from memfit.families.shared.config import flag, read_decoder
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import gated_config
from memfit.meta import Tensor
from memfit.records.model import Architecture


@final
class Ernie45(Decoder):
    """Llama's block; pairs of neighbours are rotated, in fp32."""

    name = "ernie4_5"
    lean = True
    scored = False
    lora_targets = ("q_proj", "v_proj")
    rotation = staticmethod(wide_rotation)
    dropouts = ()

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Ernie4_5Config`."""
        head_dim = None if config.get("head_dim", 128) is None else 128
        a = read_decoder(
            config, self.name, kv_heads=2, head_dim=head_dim, positions=131072, tied=True
        )
        bias = flag(config, "use_bias", False)
        return replace(a, attention_bias=bias, output_bias=bias, mlp_bias=bias)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        common = gated_config(a)
        del common["attention_dropout"]  # which the class does not have
        return common | {"use_bias": a.mlp_bias}

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        return plain_attention(forward, weights, x, turn, rotate_written_out)


families.register("ernie4_5")(Ernie45())
