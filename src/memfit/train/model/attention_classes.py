"""Families whose class picks its attention from a table of classes: memfit's stand there too.

Falcon does not ask Hugging Face's `AttentionInterface`. The class here keeps its weights and its
rotation, and hands query, key and value to `attend`. StableLM's does ask. These backbones give a
block nothing but what they know, so a hook hands on where documents end.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from memfit.core.errors import InvalidRequest
from memfit.core.libraries import quiet_import
from memfit.train.model.attention import Documents, attend

with quiet_import():
    import transformers
    from transformers.models.falcon import modeling_falcon as falcon
    from transformers.models.gptj import modeling_gptj as gptj
    from transformers.models.stablelm.modeling_stablelm import StableLmAttention


class _Falcon(falcon.FalconAttention):  # type: ignore[misc]
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


TABLES = {"falcon": (falcon.FALCON_ATTENTION_CLASSES, _Falcon)}


def register_class(family: str, name: str, kernel: SDPBackend) -> None:
    """Put a kernel under its name into a family's table, where the family has one.

    Raises InvalidRequest for GPT-J's class before transformers 5.24: it keeps a table of positions
    in each block, which `families/gptj.py` does not describe.
    """
    if family == "gptj" and hasattr(gptj, "GPTJ_ATTENTION_CLASSES"):
        raise InvalidRequest(
            f"transformers {transformers.__version__} has an older class of `gptj` than the one"
            " that memfit describes, which is that of 5.24",
            hint="pip install --upgrade 'transformers>=5.24'",
        )
    if family in TABLES:
        table, base = TABLES[family]
        table[name] = type(base.__name__, (base,), {"kernel": kernel})


def hand_on_documents(backbone: nn.Module) -> None:
    """Before each forward, tell such attention classes the documents that it is given."""
    told = (_Falcon, StableLmAttention)
    ours = [m for m in backbone.modules() if isinstance(m, told)]
    if ours:
        backbone.register_forward_pre_hook(partial(_hand_on, ours), with_kwargs=True)


def _hand_on(classes: list[Any], module: nn.Module, given: Any, named: dict[str, Any]) -> None:
    del module, given
    for attention in classes:  # kept until the next forward: a recomputation needs them too
        attention.documents = named.get("documents")
