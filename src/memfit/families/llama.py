"""Llama 1 to 3.3, TinyLlama, SmolLM2 (Touvron et al. 2302.13971; Hugging Face's `llama`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.config import flag, read_decoder
from memfit.families.shared.gated import GatedFamily
from memfit.families.shared.weights import gated_config
from memfit.records.model import Architecture


@final
class Llama(GatedFamily):
    """RMSNorm, rotary positions, grouped attention, gated feed-forward."""

    name = "llama"
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `LlamaConfig`."""
        a = read_decoder(config, self.name, positions=2048)
        bias = flag(config, "attention_bias", False)
        mlp_bias = flag(config, "mlp_bias", False)
        return replace(a, attention_bias=bias, output_bias=bias, mlp_bias=mlp_bias)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        biases = {"attention_bias": a.attention_bias, "mlp_bias": a.mlp_bias}
        return gated_config(a) | biases


families.register("llama")(Llama())
