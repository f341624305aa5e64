"""SmolLM3 (Hugging Face's `smollm3`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import show
from memfit.families import families
from memfit.families.shared.config import cycle, flag, read_decoder, refuse, size
from memfit.families.shared.forward import Forward, Rotation, Weights, gated_attention
from memfit.families.shared.gated import Decoder
from memfit.families.shared.weights import gated_config
from memfit.meta import Tensor
from memfit.records.model import Architecture

UNROTATED = "unrotated"


@final
class SmolLm3(Decoder):
    """Llama's block; every fourth one does not rotate (NoPE, Kazemnejad et al. 2305.19466)."""

    name = "smollm3"
    lean = True
    compiles = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `SmolLM3Config`."""
        refuse(config, "use_sliding_window", (False,))
        a = read_decoder(config, self.name, kv_heads=4, positions=32768, tied=True)
        bias = flag(config, "attention_bias", False)
        return replace(
            a, attention_bias=bias, output_bias=bias, mlp_bias=flag(config, "mlp_bias", False),
            layer_kinds=cycle(_kinds(config, a.layers)),
        )  # fmt: skip

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "attention_bias": a.attention_bias,
            "mlp_bias": a.mlp_bias,
            "no_rope_layers": [int(a.kind(i) != UNROTATED) for i in range(a.layers)],
            "pad_token_id": None,  # the class's own is larger than a small vocabulary
        }

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        unrotated = forward.kind == UNROTATED
        return gated_attention(forward, weights, x, None if unrotated else turn)


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """`no_rope_layers` holds a 1 for each layer that rotates, whatever its name says."""
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = size(config, "no_rope_layer_interval", 4)
        flags = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if (
        not isinstance(flags, list)
        or len(flags) < layers
        or any(one not in (0, 1) for one in flags)
    ):
        raise InvalidRequest(
            f"`no_rope_layers: {show(flags)}` in config.json is not a 0 or 1 for each of {layers}"
            " layers"
        )
    return ["" if rotates else UNROTATED for rotates in flags[:layers]]


families.register("smollm3")(SmolLm3())
