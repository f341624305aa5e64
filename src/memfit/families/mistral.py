"""Mistral 7B and Large (Jiang et al. 2310.06825; Hugging Face's `mistral`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.config import read_decoder, window
from memfit.families.shared.gated import GatedFamily
from memfit.families.shared.weights import gated_config
from memfit.records.model import Architecture


@final
class Mistral(GatedFamily):
    """Llama's block without any bias; the first release looks back over a sliding window."""

    name = "mistral"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `MistralConfig`."""
        a = read_decoder(config, self.name, kv_heads=8, positions=4096 * 32)
        return replace(a, sliding_window=window(config, 4096))

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {"sliding_window": a.sliding_window or None}


families.register("mistral")(Mistral())
