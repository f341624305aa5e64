"""AFM-4.5B (Arcee AI, 2025; Hugging Face's `arcee`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.config import flag, read_decoder
from memfit.families.shared.forward import (
    Forward,
    Weights,
    plain_mlp,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import (
    attention_rows,
    decoder,
    gated_config,
    linear,
    norm_rows,
)
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


@final
class Arcee(Decoder):
    """Llama's block with a feed-forward that has no gate and squares a ReLU (So 2109.08668)."""

    name = "arcee"
    lean = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `ArceeConfig`."""
        a = read_decoder(config, self.name, positions=4096, act=("hidden_act", "relu2"))
        bias = flag(config, "attention_bias", False)
        mlp_bias = flag(config, "mlp_bias", False)
        return replace(a, attention_bias=bias, output_bias=bias, mlp_bias=mlp_bias)

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {"attention_bias": a.attention_bias, "mlp_bias": a.mlp_bias}

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        rows = attention_rows(a)
        rows += linear("mlp.up_proj", a.ffn, a.hidden, a.mlp_bias)
        rows += linear("mlp.down_proj", a.hidden, a.ffn, a.mlp_bias)
        return decoder(a, rows + norm_rows(a))

    def feed_forward(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Decoder.feed_forward`."""
        return plain_mlp(forward, weights, "mlp.up_proj", "mlp.down_proj", x)


families.register("arcee")(Arcee())
