"""Iterations in a run folder: a line of the log each, checkpoints, and going on from the newest.

folder/log.jsonl      one object an iteration: reward, KL, lengths, clipping, speed, a few answers
       checkpoints/   the last two; the next rollout follows from one, so that none is stored
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.core.errors import RunFailed
from memfit.train.checkpoint.files import newest_checkpoint, remove_unfinished
from memfit.train.checkpoint.whole import load_checkpoint, save_checkpoint
from memfit.train.rl.learn import Learning, Summary, iterate
from memfit.train.run.logs import Log
from memfit.train.step.build import Built
from memfit.train.step.schedule import learning_rate


def run(
    built: Built,
    learning: Learning,
    folder: Path,
    data_digest: str,
    save_every: int,
    warn: Callable[[str], None],
) -> int:
    """Iterate until `recipe.steps` are done; returns those that this call did.

    built: with the weights that training starts from. The same call goes on where an earlier one
    was stopped, and the result is the same to the bit. warn: is called with each damage.
    Raises RunFailed where the loss or a gradient is not finite; InvalidRequest of a checkpoint of
    another recipe or other data.
    """
    recipe = built.recipe
    learning.check(recipe)
    remove_unfinished(folder)
    found = newest_checkpoint(folder, warn)
    done = 0 if found is None else load_checkpoint(found, built, data_digest)
    folder.mkdir(parents=True, exist_ok=True)
    with Log(folder, done) as log:
        if log.damage:
            warn(log.damage)
        for index in range(done, recipe.steps):
            rate = learning_rate(recipe.optimizer, index, recipe.steps)
            for group in built.optimizer.param_groups:
                group["lr"] = rate
            start = time.perf_counter()
            summary = iterate(built, learning, index)
            _check_finite(summary, index + 1)
            log.write(_line(summary, index + 1, rate, time.perf_counter() - start))
            if index + 1 == recipe.steps or (index + 1) % save_every == 0:
                log.flush()
                save_checkpoint(folder, index + 1, built, data_digest)
    return recipe.steps - done


def _line(summary: Summary, step: int, rate: float, seconds: float) -> dict[str, Any]:
    """One line of the log; a figure that nobody knows is null."""
    figures = {k: v if math.isfinite(v) else None for k, v in summary.figures.items()}
    tokens = summary.update_tokens
    return {
        "step": step, "learning_rate": rate, "seconds": seconds, "tokens": tokens,
        "tokens_per_second": tokens / seconds, "watched": False, **figures,
        "rewards": list(summary.rewards_by_function), "reward_failures": summary.failures,
        "samples": list(summary.samples),
    }  # fmt: skip


def _check_finite(summary: Summary, step: int) -> None:
    for name in ("loss", "grad_norm"):
        value = summary.figures.get(name, 0.0)
        if not math.isfinite(value):
            raise RunFailed(
                f"the {name.replace('_', ' ')} of step {step} is {value}",
                hint="lower `optimizer.learning_rate`, or use `precision: fp32`",
            )
