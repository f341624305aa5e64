"""Granite 3 (Hugging Face's `granite`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import families
from memfit.families.shared.config import flag, read_decoder
from memfit.families.shared.forward import Forward, Weights, gated_attention, gated_mlp, rms_norm
from memfit.families.shared.gated import Decoder, embed_tokens
from memfit.families.shared.weights import gated_config
from memfit.meta import Tensor
from memfit.records.model import Architecture


def _embed(forward: Forward, weight: Tensor) -> Tensor:
    return meta.scale(embed_tokens(forward, weight))


@final
class Granite(Decoder):
    """Llama's block; embeddings, residuals and logits are multiplied by numbers.

    A number of 1 is multiplied by as well, so the numbers change no memory and are not recorded.
    """

    name = "granite"
    lean = True
    compiles = True
    scored = False
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)
    embed_rows = staticmethod(_embed)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `GraniteConfig`."""
        a = read_decoder(config, self.name, positions=2048)
        bias = flag(config, "attention_bias", False)
        mlp_bias = flag(config, "mlp_bias", False)
        return replace(
            a, attention_bias=bias, output_bias=bias, mlp_bias=mlp_bias, logits_scaled=True
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        biases = {"attention_bias": a.attention_bias, "mlp_bias": a.mlp_bias}
        return gated_config(a) | biases

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual = x
        x = rms_norm(forward, weights["input_layernorm.weight"], x)
        x = gated_attention(forward, weights, x, (shared[0], shared[1]))
        x = meta.add(residual, meta.scale(x))
        residual = x
        x = rms_norm(forward, weights["post_attention_layernorm.weight"], x)
        x = gated_mlp(forward, weights, x)
        return meta.add(residual, meta.scale(x))


families.register("granite")(Granite())
