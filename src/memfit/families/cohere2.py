"""Command R7B and Command A (Cohere 2025, 2504.00698; Hugging Face's `cohere2`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit import meta
from memfit.families import families
from memfit.families.shared.blocks import (
    plain_attention,
    rotate_neighbours_wide,
    rotate_none,
    unbiased_layer_norm,
)
from memfit.families.shared.config import (
    cycle,
    flag,
    layer_types_config,
    pattern_of_windows,
    read_decoder,
    refuse,
    size,
)
from memfit.families.shared.forward import (
    Forward,
    Weights,
    gated_mlp,
)
from memfit.families.shared.gated import Decoder, by_name
from memfit.families.shared.weights import (
    decoder,
    gated_config,
    gated_rows,
    projection_rows,
)
from memfit.meta import Tensor
from memfit.records.model import SLIDING, Architecture, Weight


@final
class Cohere2(Decoder):
    """Attention and feed-forward side by side behind one norm; only blocks with a window rotate."""

    name = "cohere2"
    lean = True
    windows = True
    scored = False
    lora_targets = ("q_proj", "v_proj")
    norm = staticmethod(by_name(unbiased_layer_norm))
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Cohere2Config`."""
        hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        refuse(config, "head_dim", (None, hidden // heads))
        refuse(config, "use_qk_norm", (None, False))
        a = read_decoder(config, self.name, positions=8192, tied=True)
        bias = flag(config, "attention_bias", False)
        pattern = pattern_of_windows(config, a.layers, 4)
        return replace(
            a,
            attention_bias=bias,
            output_bias=bias,
            parallel_residual=True,
            shared_norm=True,
            sliding_window=size(config, "sliding_window", 4096) if SLIDING in pattern else 0,
            layer_kinds=cycle(pattern),
            logits_scaled=True,
        )

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        return gated_config(a) | {
            "attention_bias": a.attention_bias,
            "sliding_window": a.sliding_window or None,
            "layer_types": layer_types_config(a),
            "pad_token_id": None,
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        rows = projection_rows(a) + gated_rows("mlp", a, a.ffn)
        return decoder(a, [*rows, ("input_layernorm.weight", (a.hidden,))])

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Family.block`."""
        residual, turn = x, (shared[0], shared[1])
        slides = forward.architecture.window(forward.kind)
        rotate = rotate_neighbours_wide if slides else rotate_none
        x = unbiased_layer_norm(forward, weights["input_layernorm.weight"], x)
        attended = plain_attention(forward, weights, x, turn, rotate)
        fed = gated_mlp(forward, weights, x)
        return meta.add(meta.add(residual, attended), fed)


families.register("cohere2")(Cohere2())
