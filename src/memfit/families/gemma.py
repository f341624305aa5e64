"""Gemma (2403.08295; Hugging Face's `gemma`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.blocks import scaled_embedding, unit_norm
from memfit.families.shared.config import flag, read_decoder, refuse
from memfit.families.shared.gated import Decoder, by_name
from memfit.families.shared.weights import gated_config, rotary_buffers
from memfit.records.model import Architecture, TensorSpec


@final
class Gemma(Decoder):
    """Llama's block with wide heads, scaled embeddings and norms in fp32."""

    name = "gemma"
    lean = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)
    norm = staticmethod(by_name(unit_norm))
    embed_rows = staticmethod(scaled_embedding)

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

    def buffers(self, a: Architecture) -> tuple[TensorSpec, ...]:
        """See `Family.buffers`; the embedding holds its factor."""
        return (TensorSpec(shape=()), *rotary_buffers(a))


families.register("gemma")(Gemma())
