"""The loss of values of sampled answers, as train/rl/values.py: sizes alone."""

from __future__ import annotations

from memfit.meta.losses.policy import loss_with_sums
from memfit.meta.tensor import Tensor

FIGURES = 3  # of `train.rl.values.ValueLoss.sums`


def value_loss(values: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, tokens) -> the loss, 0-dim, and sums of what the log shows, (FIGURES,).

    What is computed in between is of a few numbers a token: it is never the highest and is not
    described.
    """
    return loss_with_sums(values, FIGURES)
