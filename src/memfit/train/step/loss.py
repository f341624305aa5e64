"""Next-token cross entropy: a sum over target tokens, always in fp32.

Two ways to the same number: `plain` keeps the logits of all tokens until backward; `chunked`
never holds more than a chunk of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from memfit.core.errors import InvalidRequest
from memfit.parallelism import run_as_forward
from memfit.parallelism.whole import local_part
from memfit.records.recipe import Recipe, Regularisation
from memfit.train.distributed.cut_loss import bent_mean_cut

IGNORE = -100  # a label that is no target
NONE = Regularisation()
# given the logits (tokens, vocab) of an evaluation, in the order of its tokens, when their loss is
# there: what holds less than the loss held meanwhile adds nothing to its peak
See = Callable[[Tensor], None]


def loss_mean(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    recipe: Recipe,
    target_tokens: int,
    scale: Tensor | None = None,
    cap: float | None = None,
    see: See | None = None,
) -> Tensor:
    """Sum of the losses of this batch's target tokens over `target_tokens`, 0-dim fp32.

    hidden (batch, tokens, hidden); labels (batch, tokens), aligned: what each position predicts.
    scale: what the caller multiplies the loss by before its backward; None is 1.
    cap: logits are bent to stay below it by a tanh; hidden is divided by it already.
    """
    if recipe.loss == "plain":
        if recipe.regularisation.bends and torch.is_grad_enabled():
            logits = head(hidden.flatten(0, 1))
            if recipe.parallel.tp > 1:  # whose ranks have parts of the vocabulary
                shares = (labels != IGNORE).view(-1, 1).float().div_(target_tokens)
                return bent_mean_cut(logits, labels.flatten(), shares, recipe.regularisation)
            bent = _Bent.apply(  # type: ignore[no-untyped-call]
                logits, labels.flatten(), target_tokens, scale, cap, recipe.regularisation
            )
            return cast(Tensor, bent)
        return plain_sum(head, hidden, labels, cap, see) / target_tokens
    return chunked_mean(head, hidden, labels, recipe, target_tokens, scale, cap, see)


def plain_sum(
    head: nn.Module, hidden: Tensor, labels: Tensor, cap: float | None = None,
    see: See | None = None,
) -> Tensor:  # fmt: skip
    """Sum of the losses of all target tokens, 0-dim fp32; saves logits (tokens, vocab)."""
    logits = head(hidden.flatten(0, 1))
    if cap is not None:
        logits = torch.tanh(logits) * cap
    logits = logits.float()
    total = nn.functional.cross_entropy(
        logits, labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    if see is not None:
        see(logits)
    return local_part(total)  # of logits cut among ranks: the same on all


def chunked_mean(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    recipe: Recipe,
    target_tokens: int,
    scale: Tensor | None = None,
    cap: float | None = None,
    see: See | None = None,
) -> Tensor:
    """The same with at most `recipe.loss_chunk` tokens' logits alive.

    Gradients of the hidden states and of the head are computed at once, while a chunk's logits
    exist; backward only hands them out (after Liger Kernel, Hsu et al. 2410.10989, section 3.2).
    They are scaled when they are made: in fp16 they would vanish before backward could.
    """
    check_chunked(head, recipe)
    compute = getattr(torch, recipe.compute_dtype) if recipe.autocast else hidden.dtype
    flat = hidden.flatten(0, 1)

    def chunks() -> Tensor:
        if not torch.is_grad_enabled():  # inside the function below it never is
            weight = cast(Tensor, head.weight)
            return _sum_of_chunks(
                flat, weight, labels.flatten(), compute, recipe.loss_chunk, cap, see
            )
        made = _Chunked.apply(  # type: ignore[no-untyped-call]
            flat, head.weight, labels.flatten(), compute, recipe.loss_chunk, target_tokens, scale,
            cap, recipe.regularisation,
        )  # fmt: skip
        return cast(Tensor, made)

    # A sharded head holds its whole weight only while its forward runs.
    made = run_as_forward(head, chunks) if recipe.parallel.world > 1 else chunks()
    return made if torch.is_grad_enabled() else made / target_tokens


def _sum_of_chunks(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    compute: torch.dtype,
    chunk: int,
    cap: float | None,
    see: See | None,
) -> Tensor:
    """The sum of losses alone, for an evaluation: no gradient is made. See `_Chunked.forward`."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        cast_weight = weight.to(compute)
        for start in range(0, hidden.shape[0], chunk):
            here = slice(start, start + chunk)
            logits = hidden[here].to(compute) @ cast_weight.t()
            if cap is not None:
                logits.tanh_().mul_(cap)
            log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
            total += nn.functional.nll_loss(
                log_p, labels[here], ignore_index=IGNORE, reduction="sum"
            )
            del log_p
            if see is not None:
                see(logits)
            del logits
    return total


def check_chunked(head: nn.Module, recipe: Recipe) -> None:
    """Raise InvalidRequest when the loss cannot be cut into chunks."""
    if recipe.loss_chunk < 1:
        raise InvalidRequest("`loss: chunked` needs `loss_chunk` of 1 or more tokens")
    if not isinstance(head, nn.Linear) or head.bias is not None:  # FSDP2 makes it a subclass
        biased = isinstance(head, nn.Linear)
        raise InvalidRequest(
            "`loss: chunked` needs an output projection without adapter or bias, and"
            f" this one {'has a bias' if biased else f'is {type(head).__name__}'}",
            hint="use `loss: plain`"
            + ("" if biased else ", or leave `lm_head` out of `lora.targets`"),
        )


class _Chunked(torch.autograd.Function):
    """hidden (tokens, hidden), weight (vocab, hidden), labels (tokens) -> 0-dim fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        compute: torch.dtype,
        chunk: int,
        target_tokens: int,
        scale: Tensor | None,
        cap: float | None,
        regularisation: Regularisation,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight: Tensor | None = None
        with torch.autocast(hidden.device.type, enabled=False):
            cast_weight = weight.to(compute)
            for start in range(0, hidden.shape[0], chunk):
                here = slice(start, start + chunk)
                piece = hidden[here].to(compute)
                loss, slope = loss_and_slope(
                    piece @ cast_weight.t(),
                    labels[here],
                    target_tokens,
                    scale,
                    cap,
                    regularisation,
                )
                total += loss
                slope = slope.to(compute)
                if d_hidden is not None:
                    d_hidden[here] = slope @ cast_weight
                if wants_weight:
                    alone = chunk >= hidden.shape[0]
                    d_weight = add_outer(d_weight, slope, piece, weight.dtype, alone=alone)
                del slope, piece
        if d_weight is not None:
            d_weight = d_weight.to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight, scale)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        d_hidden, d_weight, scale = ctx.saved_tensors
        factor = outer[0] if scale is None else outer[0] / scale
        for gradient in (d_hidden, d_weight):
            if gradient is not None:
                gradient.mul_(factor)
        return d_hidden, d_weight, *[None] * 7


class _Bent(torch.autograd.Function):
    """logits (tokens, vocab), labels (tokens) -> 0-dim fp32, of a regularised loss.

    The slope by the logits is made at once, in their dtype, and is all that it saves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        target_tokens: int,
        scale: Tensor | None,
        cap: float | None,
        regularisation: Regularisation,
    ) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            loss, slope = loss_and_slope(
                logits.clone() if cap is not None else logits, labels, target_tokens, scale, cap,
                regularisation,
            )  # fmt: skip
            slope = slope.to(logits.dtype)
        ctx.save_for_backward(slope, scale)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        slope, scale = ctx.saved_tensors
        return slope.mul_(outer[0] if scale is None else outer[0] / scale), *[None] * 5


def loss_and_slope(
    logits: Tensor,
    labels: Tensor,
    target_tokens: int,
    scale: Tensor | None,
    cap: float | None = None,
    regularisation: Regularisation = NONE,
) -> tuple[Tensor, Tensor]:
    """(mean's share, its scaled fp32 slope by the logits); the logits are freed.

    scale: 0-dim, or (tokens, 1).

    d loss / d logits = softmax(logits) - one_hot(label), 0 where there is no target; capped ones
    are cap * tanh(logits), whose own slope is cap * (1 - tanh²). Label smoothing takes its share of
    a target's loss from the mean over all words (Szegedy et al. 1512.00567, section 7), and z-loss
    adds log²(sum of exp(logits)) (PaLM, 2204.02311, section 5).
    """
    bent = None if cap is None else logits.tanh_()
    if cap is not None:
        logits = logits * cap
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    smoothing, z_loss = regularisation.label_smoothing, regularisation.z_loss
    log_z = logits[:, :1] - log_p[:, :1] if z_loss else None  # of what the softmax divides by
    del logits
    is_target = (labels != IGNORE).unsqueeze(1)
    column = labels.clamp(min=0).unsqueeze(1)
    weight = is_target.float() / target_tokens
    picked = log_p.gather(1, column)
    if smoothing:
        picked.lerp_(log_p.mean(1, keepdim=True), smoothing)
    if log_z is not None:
        picked.addcmul_(log_z, log_z, value=-z_loss)
    loss = -(picked * weight).sum()
    del picked
    slope = log_p.exp_()
    if log_z is not None:
        slope.mul_(log_z.mul_(2 * z_loss).add_(1.0))
    slope.scatter_add_(1, column, torch.full_like(weight, smoothing - 1.0))
    if smoothing:
        slope.sub_(smoothing / slope.shape[1])
    slope.mul_(weight if scale is None else weight * scale)
    if bent is not None and cap is not None:
        slope.mul_(bent.float().square_().neg_().add_(1.0)).mul_(cap)
    return loss, slope


def gradients_by_chunks(
    flat: Tensor, weight: Tensor, targets: Tensor, share: Tensor, compute: torch.dtype, chunk: int,
    cap: float | None, *, wants: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of hidden and of weight, where each is wanted; makes the logits a second time.

    flat (tokens, hidden), weight (vocab, hidden), targets (tokens,). share (tokens, 1): the slope
    of the result by each token's loss.
    """
    wants_hidden, wants_weight = wants
    d_hidden = torch.empty_like(flat) if wants_hidden else None
    d_weight: Tensor | None = None
    cast_weight = weight.to(compute)
    for start in range(0, flat.shape[0], chunk):
        here = slice(start, start + chunk)
        piece = flat[here].to(compute)
        _, slope = loss_and_slope(piece @ cast_weight.t(), targets[here], 1, share[here], cap)
        slope = slope.to(compute)
        if d_hidden is not None:
            d_hidden[here] = slope @ cast_weight
        if wants_weight:
            alone = chunk >= flat.shape[0]
            d_weight = add_outer(d_weight, slope, piece, weight.dtype, alone=alone)
        del slope, piece
    if d_weight is not None:
        d_weight = d_weight.to(weight.dtype)
    return d_hidden, d_weight


def add_outer(
    total: Tensor | None, slope: Tensor, piece: Tensor, dtype: torch.dtype, *, alone: bool
) -> Tensor:
    """total + slope.T @ piece, (vocab, hidden).

    In fp32 whatever the inputs are, unless there is one chunk: a sum rounded to bf16 after each
    chunk would lose what a single product keeps.
    """
    if alone:
        return slope.t() @ piece
    if total is None:
        return (slope.t() @ piece).to(torch.promote_types(dtype, torch.float32))
    if slope.dtype == total.dtype:
        return total.addmm_(slope.t(), piece)
    return total.add_(slope.t() @ piece)
