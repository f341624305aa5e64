"""Seed-OSS (ByteDance, 2025; Hugging Face's `seed_oss`)."""

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
class SeedOss(GatedFamily):
    """Llama's block with a bias on query, key and value, and heads of a size of their own."""

    name = "seed_oss"
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout", "residual_dropout")

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `SeedOssConfig`."""
        a = read_decoder(config, self.name, kv_heads=8, head_dim=128, positions=524288)
        return replace(
            a,
            attention_bias=flag(config, "attention_bias", True),
            output_bias=flag(config, "attention_out_bias", False),
            mlp_bias=flag(config, "mlp_bias", False),
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "attention_bias": a.attention_bias,
            "attention_out_bias": a.output_bias,
            "mlp_bias": a.mlp_bias,
        }


families.register("seed_oss")(SeedOss())
