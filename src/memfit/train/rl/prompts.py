"""The data of a run that samples answers: prompts, and what reward functions read beside them.

A record has a `prompt`, a text or a list of messages, and any further columns. A text is read as it
stands, after the tokenizer's start of text; messages by its chat template, with the header of the
answer that is to come.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.records.habits.mixture import Part
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import Rollout
from memfit.records.shapes import RowBounds, bounds_of
from memfit.train.data.conversations import read_extras, read_messages
from memfit.train.data.mixture import Turns
from memfit.train.data.readers import Sources
from memfit.train.data.shards.encode import refuse_empty
from memfit.train.data.shards.split import read_rows
from memfit.train.data.tokenizer import Tokenizer
from memfit.train.data.tokens import choose_held_out
from memfit.train.rl.rollout import COLUMN_OF_PROMPTS, Prompt, keep_short, order_rows

FORMAT = 2  # part of the digest: another way to tokenise is other data
OURS = ("prompts", "completions", "completion_ids", "max_completion_length")  # names of arguments


class Portion(NamedTuple):
    """The prompts of one data set, which stand one after the other among all."""

    name: str
    share: float  # of the prompts that are answered
    size: int


class Prompts(NamedTuple):
    """All prompts of the data in their order."""

    prompts: tuple[Prompt, ...]
    digest: str  # names the files' content and the tokenizer
    notes: tuple[str, ...]  # what was passed over, for the user to read
    parts: tuple[Portion, ...] = ()  # the data sets that it joins; () of a single one


class PromptRows:
    """The prompts that a run's rollouts draw from."""

    def __init__(
        self, prompts: Prompts, recipe: Recipe, name: str, held_out: Prompts | None = None
    ) -> None:
        """name: how the data is called in messages; held_out: prompts that are evaluated alone.

        Raises InvalidRequest where none is left.
        """
        short, long = keep_short(prompts.prompts, recipe.rollout)
        self.prompts, self.notes = tuple(short), prompts.notes
        self.portions = keep_portions(prompts.prompts, prompts.parts, recipe.rollout)
        self.notes += tuple(describe_portion(portion) for portion in self.portions)
        self.held_out = self._read_held_out(held_out, recipe)
        self._recipe = recipe
        if long:
            most = recipe.rollout.max_prompt_length
            self.notes += (f"{long} prompts of `{name}` longer than {most} tokens are left out",)
        groups = recipe.global_batch // recipe.rollout.num_generations
        if len(short) < groups:
            raise InvalidRequest(
                f"`{name}` has {len(short)} prompts of at most {recipe.rollout.max_prompt_length}"
                f" tokens, and a rollout takes {groups}: `task.global_batch:"
                f" {recipe.global_batch}` over `rollout.num_generations:"
                f" {recipe.rollout.num_generations}`",
                hint="use a smaller `task.global_batch` or a longer `rollout.max_prompt_length`",
            )

    def _read_held_out(self, prompts: Prompts | None, recipe: Recipe) -> tuple[Prompt, ...]:
        if prompts is None:
            return ()
        short, long = keep_short(prompts.prompts, recipe.rollout)
        most = recipe.rollout.max_prompt_length
        if not short:
            raise InvalidRequest(
                f"no held-out prompt has at most {most} tokens, of {long}",
                hint="use a longer `rollout.max_prompt_length`, or other held-out prompts",
            )
        if long:
            self.notes += (f"{long} held-out prompts longer than {most} tokens are left out",)
        return tuple(short)

    def bounds(self) -> RowBounds:
        """What no row exceeds, whatever is sampled."""
        return bounds_of(self._recipe)


def read_prompts(sources: Sources, tokenizer: Tokenizer) -> Prompts:
    """The prompts of the data.

    Raises InvalidRequest, naming file and line: no `prompt`, a wrong type, messages without a chat
    template, a column by a name that stands for something else in reward functions.
    """
    facts = [FORMAT, "prompts", tokenizer.fingerprint]
    facts += [part for s in sources.files for part in (s.kind, s.sha256)]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    found = (_read(record, place, tokenizer) for place, record in read_rows(sources))
    return Prompts(tuple(found), digest, sources.notes)


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


def describe_portion(portion: Portion) -> str:
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


def join_prompts(parts: Sequence[tuple[Part, Prompts]]) -> Prompts:
    """The prompts of several data sets, one after the other, and their shares."""
    facts = [[prompts.digest, part.share] for part, prompts in parts]
    return Prompts(
        tuple(prompt for _, prompts in parts for prompt in prompts.prompts),
        hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32],
        tuple(note for _, prompts in parts for note in prompts.notes),
        tuple(Portion(part.path, part.share, len(prompts.prompts)) for part, prompts in parts),
    )


def hold_out(prompts: Prompts, share: float, seed: int) -> tuple[Prompts, Prompts]:
    """The prompts to train on and a share that is held out, drawn as those of documents are.

    Raises InvalidRequest where one of the two would be empty.
    """
    chosen = choose_held_out(len(prompts.prompts), share, seed)
    found = []
    for own, name in ((~chosen, "training"), (chosen, "held-out")):
        digest = f"{prompts.digest}-{name}-{share:g}-{seed}"
        some = tuple(p for p, here in zip(prompts.prompts, own, strict=True) if here)
        found.append(Prompts(some, digest, prompts.notes))
    return found[0], found[1]


def count_steps(prompts: Prompts, rollout: Rollout, global_batch: int, epochs: float) -> float:
    """Iterations in which each prompt is answered as often as epochs say; of several data sets, the
    one that takes the longest."""
    if prompts.parts:
        portions = keep_portions(prompts.prompts, prompts.parts, rollout)
        whole = max(portion.size / portion.share for portion in portions)
        return whole * epochs * rollout.num_generations / global_batch
    short, _ = keep_short(prompts.prompts, rollout)
    return len(short) * epochs * rollout.num_generations / global_batch


def bound_prompts(width: int, completion: int, generations: int) -> Rollout:
    """The bounds of rollouts whose rows have this width."""
    return replace(
        Rollout(), max_prompt_length=width - completion, max_completion_length=completion,
        num_generations=generations,
    )  # fmt: skip


def _read(record: Mapping[str, Any], place: str, tokenizer: Tokenizer) -> Prompt:
    prompt = record.get(COLUMN_OF_PROMPTS)
    if prompt is None:
        raise InvalidRequest(
            f"{place} has no `prompt`: it holds {', '.join(record) or 'nothing'}",
            hint="write one JSON object a line with `prompt`, a text or a list of messages, and the"
            " columns that reward functions read",
        )
    for name in OURS:
        if name in record:
            raise InvalidRequest(
                f"{place} has a column `{name}`, which is an argument of every reward function",
                hint="give the column another name",
            )
    if isinstance(prompt, str):
        ids = [*tokenizer.start, *tokenizer.encode(prompt)]
        if not ids:
            refuse_empty(place)
        return Prompt(ids, record)
    messages = read_messages(prompt, place, COLUMN_OF_PROMPTS)
    if messages[-1]["role"] == "assistant":
        raise InvalidRequest(
            f"{place}: the last message of `prompt` is an assistant's, and answers are sampled",
            hint="leave it out, or keep it in a column of its own",
        )
    try:
        text = tokenizer.ask(messages, read_extras(record, place))
    except InvalidRequest as error:
        raise InvalidRequest(f"{place}: {error.message}", hint=error.hint) from None
    return Prompt(tokenizer.encode(text), {**record, COLUMN_OF_PROMPTS: messages})
