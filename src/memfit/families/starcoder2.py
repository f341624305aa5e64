"""StarCoder 2 (Lozhkov et al. 2402.19173; Hugging Face's `starcoder2`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.families import families
from memfit.families.shared.config import flag, read_decoder, window
from memfit.families.shared.forward import (
    Forward,
    Weights,
    apply_layer_norm,
    plain_mlp,
)
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import (
    decoder,
    gated_config,
    layer_norm,
    linear,
    projection_rows,
)
from memfit.meta import Tensor
from memfit.records.model import Architecture, Weight


@final
class Starcoder2(Decoder):
    """Llama's attention with biases, LayerNorm, and a feed-forward without a gate."""

    name = "starcoder2"
    lean = True
    windows = True
    lora_targets = ("q_proj", "v_proj")
    norm = staticmethod(apply_layer_norm)
    dropouts = ("attention_dropout", "residual_dropout", "embedding_dropout")

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Starcoder2Config`."""
        a = read_decoder(
            config, self.name, kv_heads=2, positions=4096, tied=True,
            act=("hidden_act", "gelu_pytorch_tanh"),
        )  # fmt: skip
        bias = flag(config, "use_bias", True)
        return replace(
            a, attention_bias=bias, output_bias=bias, mlp_bias=bias,
            sliding_window=window(config, None),
        )  # fmt: skip

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            **dict.fromkeys(self.dropouts, 0.0),
            "use_bias": a.mlp_bias,
            "sliding_window": a.sliding_window or None,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        rows = projection_rows(a)
        rows += linear("mlp.c_fc", a.ffn, a.hidden, a.mlp_bias)
        rows += linear("mlp.c_proj", a.hidden, a.ffn, a.mlp_bias)
        rows += layer_norm("input_layernorm", a.hidden)
        rows += layer_norm("post_attention_layernorm", a.hidden)
        return decoder(a, rows, end=layer_norm("norm", a.hidden))

    def feed_forward(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Decoder.feed_forward`."""
        return plain_mlp(forward, weights, "mlp.c_fc", "mlp.c_proj", x)


families.register("starcoder2")(Starcoder2())
