"""What may change when a run goes on beyond the end that it was started with.

Its number of steps and the schedule of its learning rate are read anew at each step: weights,
optimizer states and the order of the data stay as they are. All else would make another run.
"""

from __future__ import annotations

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.records.recipe import Recipe

SCHEDULE = (
    "learning_rate", "schedule", "warmup_steps", "warmup_ratio", "floor", "power", "decay_ratio",
)  # fmt: skip
CHANGEABLE = frozenset(
    ("task.steps", "task.epochs", "task.tokens", *(f"optimizer.{name}" for name in SCHEDULE))
)
FLAG = "--continue"


def name_lineage(recipe: Recipe) -> str:
    """16 hexadecimal digits: recipes whose steps and schedule differ alone have the same ones."""
    optimizer = replace(
        recipe.optimizer, learning_rate=0.0, schedule="constant", warmup_steps=0, warmup_ratio=0.0,
        floor=0.0, power=0.0, decay_ratio=0.0,
    )  # fmt: skip
    return replace(recipe, steps=0, optimizer=optimizer).course


def check_continues(old: Recipe, new: Recipe, done: int) -> None:
    """Raise InvalidRequest where a run of the old recipe with `done` steps cannot go on as the new
    one says."""
    if name_lineage(old) != name_lineage(new):
        raise InvalidRequest(
            f"the run is of recipe {old.digest}, and what is planned now, recipe {new.digest},"
            " differs in more than its steps and its schedule",
            hint="state what the plan decides anew as the run's plan.json has it, or use another"
            " folder",
        )
    if new.steps <= done:
        raise InvalidRequest(
            f"`task.steps: {new.steps}` is asked for, and the run has done {done} steps",
            hint=f"`task.steps` counts all steps: state more than {done}",
        )
