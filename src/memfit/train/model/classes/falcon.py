"""Falcon's attention under memfit's kernels: what stands in its class's table of attentions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from memfit.core.libraries import quiet_import
from memfit.train.model.attention import Documents, attend

with quiet_import():
    from transformers.models.falcon import modeling_falcon as falcon

TABLE = falcon.FALCON_ATTENTION_CLASSES


class FalconAttention(falcon.FalconAttention):  # type: ignore[misc]
    """Falcon's attention under one kernel; no key and no value is repeated for its heads."""

    kernel: SDPBackend
    documents: Documents | None = None

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: Any = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """(batch, tokens, hidden) -> the same; what Hugging Face's block calls."""
        del alibi, attention_mask, position_ids, use_cache, output_attentions, more
        query, key, value = self._split(self.query_key_value(hidden_states))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        query, key = falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        over_slots = getattr(layer_past, "attending", None)  # while generation decodes
        if over_slots is not None:
            out, _ = over_slots(self, query, key, value, None)
        else:
            out, _ = attend(self.kernel, self, query, key, value, None, documents=self.documents)
        return self.dense(out.flatten(2)), None

    def _split(self, fused: Tensor) -> tuple[Tensor, ...]:
        """(batch, tokens, all heads) -> query, key, value as (batch, tokens, heads, head_dim).

        Each group of the fused heads holds its queries, one key and one value.
        """
        kv_heads = (fused.shape[2] // self.head_dim - self.num_heads) // 2
        each = self.num_heads // kv_heads
        whole = fused.view(*fused.shape[:2], -1, each + 2, self.head_dim)
        return tuple(part.flatten(2, 3) for part in torch.split(whole, [each, 1, 1], dim=3))
