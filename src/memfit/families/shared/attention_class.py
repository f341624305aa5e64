"""How the attention of one of Hugging Face's classes differs from most others'."""

from __future__ import annotations

from memfit.records import Record


class AttentionClass(Record, frozen=True, kw_only=True):
    """Facts of a class's own attention code, read from transformers 5.24."""

    always_masked: bool = False  # asks for a mask though every row is full
    one_key: bool = False  # one key of all heads is multiplied with all queries
    narrow_softmax: bool = False  # the eager softmax is in the dtype of the scores
    wide_scores: bool = False  # the eager scores are of queries and keys cast to fp32
    only_eager: bool = False  # runs its own code, whatever kernel is named
