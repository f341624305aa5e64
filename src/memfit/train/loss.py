"""Next-token cross entropy: a sum over target tokens, always in fp32."""

from __future__ import annotations

from torch import Tensor, nn

IGNORE = -100  # a label that is no target


def plain_sum(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    """Sum of the losses of all target tokens, 0-dim fp32.

    hidden (batch, tokens, hidden), labels (batch, tokens) aligned: what each position predicts.
    """
    logits = head(hidden.flatten(0, 1)).float()
    return nn.functional.cross_entropy(
        logits, labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
