"""Gemma (2403.08295; Hugging Face's `gemma`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import Family, families
from memfit.families.shared.blocks import scaled_embed, unit_norm
from memfit.families.shared.config import flag, read_decoder, refuse
from memfit.families.shared.forward import Embedded, Forward, Weights, gated_attention, gated_mlp
from memfit.families.shared.weights import gated_config, gated_weights, rotary_buffers
from memfit.meta import Tensor
from memfit.records.model import Architecture, TensorSpec, Weight


@final
class Gemma(Family):
    """Llama's block with wide heads, scaled embeddings and norms in fp32."""

    name = "gemma"
    lean = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `GemmaConfig`.

        `gelu` means its tanh form, as in the files of the first release.
        """
        refuse(config, "use_bidirectional_attention", (None, False))
        a = read_decoder(
            config, self.name, kv_heads=16, head_dim=256, positions=8192, tied=True,
            act=("hidden_act", "gelu_pytorch_tanh"),
        )  # fmt: skip
        bias = flag(config, "attention_bias", False)
        act = "gelu_pytorch_tanh" if a.activation == "gelu" else a.activation
        return replace(a, attention_bias=bias, output_bias=bias, activation=act)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {"attention_bias": a.attention_bias}

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        return gated_weights(a)

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`; the embedding holds its factor."""
        return (TensorSpec(shape=()), *rotary_buffers(a))

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Family.embed`."""
        return scaled_embed(forward, weights["embed_tokens.weight"])

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual = x
        x = unit_norm(forward, weights["input_layernorm.weight"], x)
        x = gated_attention(forward, weights, x, (shared[0], shared[1]))
        x = meta.add(residual, x)
        residual = x
        x = unit_norm(forward, weights["post_attention_layernorm.weight"], x)
        x = gated_mlp(forward, weights, x)
        return meta.add(residual, x)

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Family.finish`."""
        return unit_norm(forward, weights["norm.weight"], x, feeds=False)


families.register("gemma")(Gemma())
