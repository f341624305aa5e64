"""What a key that looks at next tokens of held-out rows asks of a run: rows, and whole logits."""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.records.recipe import Recipe


def check_next_tokens(
    recipe: Recipe, key: str, *, held_out: bool, reads: str, objection: str, hint: str
) -> None:
    """Raise InvalidRequest, before the first step, where a key has nothing to look at.

    key: as the user wrote it. reads: what the key does with held-out rows. objection and hint: why
    an objective that predicts no next token of them is refused, and what to do instead.
    """
    if not held_out:
        raise InvalidRequest(
            f"{key} {reads}, and `task.evaluation` names no held-out data",
            hint="set `task.evaluation`, a file or folder",
        )
    if recipe.prefers or recipe.rates or recipe.samples or recipe.scores:
        raise InvalidRequest(f"{key} {objection}", hint=hint)
    for axis in ("tp", "cp", "pp"):
        if (size := getattr(recipe.parallel, axis)) > 1:
            raise InvalidRequest(
                f"{key}: with `parallel.{axis}: {size}` no rank has the logits of whole rows",
                hint=f"use `parallel.{axis}: 1`, or leave it out and look at saved checkpoints",
            )
