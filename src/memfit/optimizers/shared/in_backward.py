"""When each weight can be updated within backward: where its gradient is all that an update needs.

The gradient of a weight then lives from the derivative that makes it to its own update, instead of
all gradients living until the last (Lv et al. 2306.09782, section 3.1). FSDP2 tells a shard's hook
when its gradient is reduced (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), so that it
works on many ranks as on one.
"""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.records.recipe import Recipe


def refuse_in_backward(
    *, clip_norm: float, accumulation: int, scaled: bool
) -> tuple[str, str] | None:
    """What a step needs of all gradients together, and what to use instead; None: nothing."""
    if clip_norm:
        return (
            f"`optimizer.clip_norm: {clip_norm:g}` needs the norm of all gradients before the"
            " first update",
            "use `optimizer.clip_norm: 0`",
        )
    if accumulation > 1:
        return (
            f"gradients of {accumulation} micro-batches are summed before a weight is updated",
            "use `micro_batch` equal to `task.global_batch`, or a smaller global batch",
        )
    if scaled:
        return (
            "`precision: fp16-mixed` has to see that all gradients are finite before the first"
            " update",
            "use `precision: bf16-mixed`",
        )
    return None


def check_in_backward(recipe: Recipe) -> None:
    """Raise InvalidRequest when the recipe updates within backward and cannot."""
    settings = recipe.optimizer
    if not settings.in_backward:
        return
    found = refuse_in_backward(
        clip_norm=settings.clip_norm,
        accumulation=recipe.accumulation,
        scaled=recipe.scaled,
    )
    if found is not None:
        reason, instead = found
        raise InvalidRequest(
            f"`optimizer.in_backward: true` cannot be: {reason}",
            hint=f"{instead}; or `optimizer.in_backward: false`",
        )
