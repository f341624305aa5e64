"""Qwen3, dense (2505.09388; Hugging Face's `qwen3`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.config import flag, read_decoder, window_config, windows
from memfit.families.shared.gated import GatedFamily
from memfit.families.shared.weights import gated_config
from memfit.records.model import Architecture


@final
class Qwen3(GatedFamily):
    """Llama's block with an RMSNorm over each head of query and key."""

    name = "qwen3"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen3Config`."""
        a = read_decoder(config, self.name, kv_heads=32, head_dim=128, positions=32768)
        window, kinds = windows(config, a.layers)
        bias = flag(config, "attention_bias", False)
        return replace(
            a, attention_bias=bias, output_bias=bias, qk_norm=True, sliding_window=window,
            layer_kinds=kinds,
        )  # fmt: skip

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | window_config(a) | {"attention_bias": a.attention_bias}


families.register("qwen3")(Qwen3())
