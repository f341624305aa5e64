"""What a run says that goes on under more steps or another schedule."""

from __future__ import annotations

from memfit.records.recipe import Recipe
from memfit.train.step.schedule import learning_rate


def describe_continuation(old: Recipe, new: Recipe, done: int) -> str:
    """One sentence: what stays, and the learning rate where it goes on and where it ends."""
    first, last = (learning_rate(new.optimizer, step, new.steps) for step in (done, new.steps - 1))
    text = (
        f"the run of {old.steps} steps goes on after step {done} to step {new.steps} with its"
        f" weights, its optimizer states and the next rows of its data: `{new.optimizer.schedule}`"
        f" over {new.steps} steps, learning rate {first:.3g} at step {done + 1} and {last:.3g} at"
        f" step {new.steps}"
    )
    if not done:
        return text
    before = learning_rate(old.optimizer, done - 1, old.steps)
    return f"{text} (it was {before:.3g} at step {done})"
