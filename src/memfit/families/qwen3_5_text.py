"""Qwen3.5, the text model of dense ones (Qwen, 2026; Hugging Face's `qwen3_5_text`).

The vision tower is another class's, and layers that predict further tokens (`mtp`) are no part of
the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from memfit.families import families
from memfit.families.shared.hybrid.decoder import HybridDecoder, grid_rotation, read_hybrid
from memfit.families.shared.weights import Rows, gated_rows
from memfit.records.model import Architecture


@final
class Qwen35Text(HybridDecoder):
    """Linear attention in three of four blocks, and attention with an output gate in the fourth."""

    name = "qwen3_5_text"
    text_of = "qwen3_5"
    rotation = staticmethod(grid_rotation)

    def architecture(self, config: Mapping[str, Any]) -> Architecture:
        """See `Family.architecture`; defaults are those of `Qwen3_5TextConfig`."""
        return read_hybrid(config, self.name, kv_heads=4)

    def feed_forward_rows(self, a: Architecture) -> Rows:
        """See `HybridDecoder.feed_forward_rows`."""
        return gated_rows("mlp", a, a.ffn)


families.register("qwen3_5_text")(Qwen35Text())
