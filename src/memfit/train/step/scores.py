"""A score of each row: what a head of one number makes of the last token's hidden state.

As the classes of sequence classification in transformers compute it, of one label and without a
bias; of all other tokens no score is made.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from memfit.train.step.loss import IGNORE


def row_scores(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """(rows,) fp32. hidden (rows, tokens, hidden); labels (rows, tokens), -100 but at the token
    that is scored."""
    picked = cast(Tensor, _AtEnds.apply(hidden, labels))  # type: ignore[no-untyped-call]
    scores = head(picked)
    del picked
    return cast(Tensor, scores.float().squeeze(1))


class _AtEnds(torch.autograd.Function):
    """hidden (rows, tokens, hidden), labels (rows, tokens) -> (rows, hidden)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, labels: Tensor) -> Tensor:
        ends = (labels != IGNORE).view(torch.uint8).argmax(1)
        ctx.save_for_backward(ends)
        ctx.whole = hidden.shape
        return hidden.gather(1, _across(ends, hidden.shape[2])).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (ends,) = ctx.saved_tensors
        slope = outer[0].new_zeros(ctx.whole)
        return slope.scatter_(1, _across(ends, ctx.whole[2]), outer[0].unsqueeze(1)), None


def _across(ends: Tensor, width: int) -> Tensor:
    """(rows,) -> (rows, 1, hidden), without bytes of its own."""
    return ends.view(-1, 1, 1).expand(-1, 1, width)
