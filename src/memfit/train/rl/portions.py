"""Prompts of several data sets, each with its share of what the rollouts of a run answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from memfit.core.errors import InvalidRequest
from memfit.records.reinforcement import Rollout
from memfit.train.data.mixture import Turns
from memfit.train.rl.rollout import Prompt, keep_short, order_rows


class Portion(NamedTuple):
    """The prompts of one data set, which stand one after the other among all."""

    name: str
    share: float  # of the prompts that are answered
    size: int


def keep_portions(
    prompts: Sequence[Prompt], parts: Sequence[Portion], rollout: Rollout
) -> tuple[Portion, ...]:
    """The same of the prompts that are short enough. Raises InvalidRequest where one has none."""
    found, first = [], 0
    for part in parts:
        short, _ = keep_short(prompts[first : first + part.size], rollout)
        first += part.size
        if not short:
            raise InvalidRequest(
                f"`{part.name}` has no prompt of at most {rollout.max_prompt_length} tokens, of"
                f" {part.size}",
                hint="use a longer `rollout.max_prompt_length`, or leave it out of `task.data`",
            )
        found.append(part._replace(size=len(short)))
    return tuple(found)


def describe(portion: Portion) -> str:
    """What the user should know of a data set."""
    return f"{portion.share:.1%} of the prompts are of `{portion.name}`, which has {portion.size:,}"


def choose_of_portions(
    portions: Sequence[Portion], groups: int, seed: int, iteration: int, attempt: int
) -> list[int]:
    """Rows of the data for a rollout: each data set's own epochs in orders drawn from the seed.

    Which data set a prompt is of is a matter of blocks with exact shares, as for rows of text. See
    `choose_prompts`.
    """
    units = np.arange(iteration * groups, (iteration + 1) * groups)
    sources, numbers = Turns([p.share for p in portions], seed).find(units)
    begins = [0, *accumulate(p.size for p in portions)]
    if attempt:  # any rows, of the same data sets
        numbers = np.array([(sources[:at] == s).sum() for at, s in enumerate(sources)])
    rows = []
    for source, number in zip(sources.tolist(), numbers.tolist(), strict=True):
        count = portions[source].size
        epoch, place = divmod(number, count)
        facts = (iteration, attempt, source, epoch) if attempt else (epoch, source)
        rows.append(begins[source] + order_rows(count, seed, *facts)[place])
    return rows
