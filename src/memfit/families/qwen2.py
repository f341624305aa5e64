"""Qwen2 and Qwen2.5 (2407.10671; Hugging Face's `qwen2`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.config import read_decoder, window_config, windows
from memfit.families.shared.gated import GatedFamily
from memfit.families.shared.weights import gated_config
from memfit.records.model import Architecture


@final
class Qwen2(GatedFamily):
    """Llama's block with a bias on query, key and value."""

    name = "qwen2"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen2Config`."""
        a = read_decoder(config, self.name, kv_heads=32, positions=32768)
        window, kinds = windows(config, a.layers)
        return replace(a, attention_bias=True, sliding_window=window, layer_kinds=kinds)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | window_config(a)


families.register("qwen2")(Qwen2())
