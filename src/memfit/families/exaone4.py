"""EXAONE 4.0 (LG AI Research, 2507.11407; Hugging Face's `exaone4`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.families import families
from memfit.families.shared.blocks import head_norm_attention
from memfit.families.shared.config import (
    cycle,
    layer_types_config,
    pattern_of_windows,
    read_decoder,
    window,
)
from memfit.families.shared.forward import (
    Forward,
    Rotation,
    Weights,
    rms_norm,
)
from memfit.families.shared.gated import PostNormFamily
from memfit.families.shared.weights import attention_rows, gated_config, post_norm_weights
from memfit.meta import Tensor
from memfit.records.model import SLIDING, Architecture, Weight

WHOLE = "unrotated"  # blocks that see all tokens, of a model whose others have a window


@final
class Exaone4(PostNormFamily):
    """Norms behind attention and feed-forward and over heads; blocks without a window in a model
    that has one do not rotate."""

    name = "exaone4"
    windows = True
    lora_targets = ("q_proj", "v_proj")
    dropouts = ("attention_dropout",)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Exaone4Config`."""
        a = read_decoder(config, self.name, kv_heads=32, positions=2048)
        tokens = window(config, 4096)
        if not tokens and config.get("layer_types") is None:
            raise InvalidRequest(
                "`sliding_window` is null in config.json, and there is no `layer_types` to say"
                " what the blocks are",
                hint="memfit refuses what it would have to guess",
            )
        pattern = pattern_of_windows(config, a.layers, 4)
        if SLIDING in pattern and not tokens:
            raise InvalidRequest("config.json has sliding blocks and no `sliding_window`")
        kinds = [kind or (WHOLE if tokens else "") for kind in pattern]
        return replace(
            a, qk_norm=True, sliding_window=tokens if SLIDING in pattern else 0,
            layer_kinds=cycle(kinds),
        )  # fmt: skip

    def config(self, a: Architecture) -> dict[str, Any]:
        """See `Family.config`."""
        default = 4096 if WHOLE in a.layer_kinds else None
        return gated_config(a) | {
            "sliding_window": a.sliding_window or default,
            "layer_types": layer_types_config(a),
        }

    def weights(self, a: Architecture) -> tuple[Weight, ...]:
        """See `Family.weights`."""
        return post_norm_weights(a, attention_rows(a))

    def attention(self, forward: Forward, weights: Weights, x: Tensor, turn: Rotation) -> Tensor:
        """See `Decoder.attention`."""
        rotated = None if forward.kind == WHOLE else turn
        return head_norm_attention(forward, weights, x, rotated, rms_norm)


families.register("exaone4")(Exaone4())
