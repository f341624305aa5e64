"""A regularised cross entropy of logits whose vocabulary ranks share: each has a part of a row.

The numbers are those of `loss.loss_and_slope`; what a row's parts are added up by is sent among
the ranks, a few numbers a token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memfit.records.recipe import Regularisation

c10d: Any = dist  # whose names its types leave out


def bent_mean_cut(
    logits: Any, labels: Tensor, shares: Tensor, regularisation: Regularisation
) -> Tensor:
    """logits (tokens, vocab), each rank's part of the rows -> 0-dim, the same on all ranks.

    labels (tokens,); shares (tokens, 1) fp32: of each token's loss in the mean, 0 of no target.
    """
    group = logits.device_mesh.get_group("tp")
    made: Tensor = _Bent.apply(  # type: ignore[no-untyped-call]
        logits.to_local(), labels, shares, regularisation, logits.shape[1], group
    )
    return made


class _Bent(torch.autograd.Function):
    """logits (tokens, vocab / tp), labels (tokens) -> 0-dim fp32.

    The slope by the logits is made at once, in their dtype, and is all that it saves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        shares: Tensor,
        regularisation: Regularisation,
        vocab: int,
        group: dist.ProcessGroup,
    ) -> Tensor:
        loss, slope = _loss_and_slope(logits, labels, shares, regularisation, vocab, group)
        ctx.save_for_backward(slope.to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return slope.mul_(outer[0]), *[None] * 5


def _loss_and_slope(
    logits: Tensor,
    labels: Tensor,
    shares: Tensor,
    regularisation: Regularisation,
    vocab: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """(mean's share, its fp32 slope by this rank's logits); see `loss.loss_and_slope`."""
    smoothing, z_loss = regularisation.label_smoothing, regularisation.z_loss
    largest = logits.amax(1, keepdim=True).float()
    c10d.all_reduce(largest, c10d.ReduceOp.MAX, group=group)
    log_p = logits.float().sub(largest)
    log_z = log_p.exp().sum(1, keepdim=True)
    c10d.all_reduce(log_z, group=group)
    log_p.sub_(log_z.log_())
    log_z.add_(largest)
    del largest
    each = logits.shape[1]
    own = labels - dist.get_rank(group) * each
    elsewhere = ((own < 0) | (own >= each)).unsqueeze(1)
    column = own.clamp_(0, each - 1).unsqueeze(1)
    del own
    picked = log_p.gather(1, column).masked_fill_(elsewhere, 0.0)
    if smoothing:
        picked.mul_(1 - smoothing).add_(log_p.sum(1, keepdim=True), alpha=smoothing / vocab)
    c10d.all_reduce(picked, group=group)
    if z_loss:
        picked.addcmul_(log_z, log_z, value=-z_loss)
    loss = picked.mul_(shares).sum().neg_()
    slope = log_p.exp_()
    slope.mul_(log_z.mul_(2 * z_loss).add_(1.0))
    minus = torch.full_like(shares, smoothing - 1.0).masked_fill_(elsewhere, 0.0)
    slope.scatter_add_(1, column, minus)
    if smoothing:
        slope.sub_(smoothing / vocab)
    return loss, slope.mul_(shares)
