"""The batched loop: rows in slots, refilled as rows end; a group's prompt is read once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from memfit.core.errors import InvalidRequest
from memfit.families import find_family
from memfit.families.capabilities.kv_cache import layer_caches
from memfit.records.ledger import Phase
from memfit.records.model import Architecture
from memfit.train.generation.calls import Caller, Together
from memfit.train.generation.products import quick_products
from memfit.train.generation.sampling import (
    Decoder,
    Read,
    draw_numbers,
    has_stop_word,
    mark,
    read_token,
    sample,
)
from memfit.train.generation.settings import Completion, Ended, Settings
from memfit.train.generation.slots import Prefill, Slots
from memfit.train.measure.observer import NOBODY, Observer
from memfit.train.model.hugging_face import base_model

Watcher = Callable[[int, int], None]  # told the index of an answer and its new token


@dataclass(slots=True)
class _Row:
    """An answer that is being made."""

    index: int  # of the answer, among all
    prompt: Sequence[int]
    numbers: np.ndarray  # one a token, drawn when it began
    limit: int  # tokens that it may have
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens that the slot knows: all but the newest."""
        return len(self.prompt) + len(self.ids) - 1


def generate_batch(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    decode: Decoder | None = None,
    dtype: torch.dtype | None = None,
    watch: Watcher | None = None,
    observer: Observer = NOBODY,
    read: Read = read_token,
    together: Together | None = None,
) -> list[Completion]:
    """Answers to prompts of token ids, by the module as it stands: adapters on, nothing merged.

    In the order of prompts, `settings.answers` to each. decode: ids to text, for stop words.
    dtype: of the slots; None takes autocast's where that is on, else the embedding's.
    watch: receives each token as it is made. observer: learns of the slots, prefill and decode.
    read: takes sampled tokens off the device. together: of ranks that share weights, see `Caller`;
    each of them calls this, with prompts or without.

    Greedy answers are those of Hugging Face's `generate`. A sampled answer depends on the seed, the
    prompt's and the answer's index and the prompt, and not on slots, rows in flight or other
    prompts, but for the rounding of logits.

    Raises InvalidRequest: settings out of range, a prompt that is empty or longer than its bound or
    the model's positions, stop words without `decode`.
    """
    settings.check()
    if settings.stop_words and decode is None:
        raise InvalidRequest("stop words are texts, and no `decode` is given that makes texts")
    caller = Caller(model, architecture_of(model), together)
    found: list[Completion] = []
    if prompts:
        observer.enter(Phase.PREFILL)
        with _quick(caller, settings):
            found = _Loop(caller, prompts, settings, decode, dtype, watch, observer, read).run()
    with torch.no_grad(), _evaluating(model):
        caller.wait()
    return found


def architecture_of(model: nn.Module) -> Architecture:
    """What memfit knows of Hugging Face's module; UnknownName where it knows no such family."""
    config = base_model(model).config
    return find_family(config.model_type).architecture(config.to_dict())


def find_limit(a: Architecture) -> int:
    """The most tokens of a row; 0 where nothing ends it."""
    return 0 if a.alibi and not find_family(a.family).ends else a.max_sequence


class _Loop:
    """The state of one call of `generate_batch`. The first `len(self.rows)` slots are in use."""

    def __init__(
        self, caller: Caller, prompts: Sequence[Sequence[int]], settings: Settings,
        decode: Decoder | None, dtype: torch.dtype | None, watch: Watcher | None,
        observer: Observer, read: Read,
    ) -> None:  # fmt: skip
        a = caller.architecture
        self.settings, self.prompts, self.decode, self.watch = settings, prompts, decode, watch
        self.observer, self.read = observer, read
        self.positions = find_limit(a)
        self._check_limits()
        most = self._check_prompts()
        total = most + settings.max_new_tokens
        if self.positions:
            total = min(total, self.positions)
        answers = len(prompts) * settings.answers
        self.width = min(settings.rows, answers)
        self.caller = caller
        self.slots = Slots(
            layer_caches(a), self.width, total, min(most, total) if settings.answers > 1 else 0,
            dtype or self.caller.key_dtype(), self.caller.device,
        )  # fmt: skip
        observer.register_cache(*self.slots.tensors)
        self.spare_prompt: int | None = None  # the prompt in the spare row, whose last answers wait
        self.after: Tensor | None = None  # (1, vocab), the logits after it; made once
        self.waiting = deque(range(answers))
        self.rows: list[_Row] = []
        self.done: list[Completion | None] = [None] * answers
        self.seen: Tensor | None = None  # (slots, vocab), where a penalty asks for it

    def run(self) -> list[Completion]:
        """All answers."""
        with torch.no_grad(), _evaluating(self.caller.model):
            while self.waiting or self.rows:
                self.observer.enter(Phase.PREFILL)
                while self.waiting and len(self.rows) < self.width:
                    self._admit()
                self.observer.enter(Phase.DECODE)
                while self.rows and not self._admits():
                    self._step()
        return [c for c in self.done if c is not None]

    def _admits(self) -> bool:
        """Whether an answer waits, and a slot is free for it."""
        return bool(self.waiting) and len(self.rows) < self.width

    def _check_limits(self) -> None:
        limits, answers = self.settings.limits, len(self.prompts) * self.settings.answers
        if limits and len(limits) != answers:
            raise InvalidRequest(f"`limits` are of {len(limits)} answers, and {answers} are asked")
        most = self.settings.max_new_tokens
        for i, limit in enumerate(limits):
            if not 1 <= limit <= most:
                raise InvalidRequest(
                    f"answer {i} is limited to {limit} tokens, which is not from 1 to"
                    f" max_new_tokens, {most}"
                )

    def _check_prompts(self) -> int:
        """The bound of prompts, in tokens."""
        lengths = [len(p) for p in self.prompts]
        most = self.settings.max_prompt or max(lengths)
        for i, length in enumerate(lengths):
            if not length:
                raise InvalidRequest(f"prompt {i} is empty", hint="begin with a start token")
            if length > most:
                raise InvalidRequest(
                    f"prompt {i} has {length} tokens, and `max_prompt` is {most}",
                    hint="raise max_prompt or leave longer prompts out",
                )
            if self.positions and length >= self.positions:
                raise InvalidRequest(
                    f"prompt {i} has {length} tokens and the model {self.positions} positions",
                    hint="shorten the prompt",
                )
        return most

    def _admit(self) -> None:
        """Begin the next waiting answers: to the spare prompt, else to prompts not yet read."""
        free = self.width - len(self.rows)
        if self.spare_prompt is not None:
            self._begin_spared(free)
            return
        each = self.settings.answers
        chosen: list[list[int]] = []  # the answers of each prompt that begin now
        longest = self.settings.max_prompt
        while free and self.waiting:
            longest = max(longest, len(self.prompts[self.waiting[0] // each]))
            if chosen and longest * (len(chosen) + 1) > self.settings.prefill_tokens:
                break
            prompt = self.waiting[0] // each
            group = [i for i in list(self.waiting)[:each] if i // each == prompt][:free]
            for _ in group:
                self.waiting.popleft()
            chosen.append(group)
            free -= len(group)
        self._prefill(chosen)

    def _prefill(self, chosen: list[list[int]]) -> None:
        """Read prompts, and make the first token of each of their answers."""
        each = self.settings.answers
        prompts = [self.prompts[group[0] // each] for group in chosen]
        sources = [row for row, group in enumerate(chosen) for _ in group]
        targets = list(range(len(self.rows), len(self.rows) + len(sources)))
        left = bool(self.waiting) and self.waiting[0] // each == chosen[-1][0] // each
        lengths = [len(p) for p in prompts]
        gated = bool(self.caller.gates)
        now = Prefill(lengths, sources, targets, left, self.slots.device, gated=gated)
        logits = self.caller.prefill(self.slots, prompts, now)
        if each > 1 and self.after is None:
            self.after = torch.empty_like(logits[-1:])
        if left and self.after is not None:
            self.spare_prompt = chosen[-1][0] // each
            self.after.copy_(logits[-1:])
        for group in chosen:
            self.rows += [self._row(index) for index in group]
        self._take(logits[now.sources], targets)

    def _begin_spared(self, free: int) -> None:
        """Copy the spare row to the slots of its prompt's answers that waited."""
        assert self.spare_prompt is not None
        assert self.after is not None
        prompt, each = self.spare_prompt, self.settings.answers
        targets: list[int] = []
        while free > len(targets) and self.waiting and self.waiting[0] // each == prompt:
            row = self._row(self.waiting.popleft())
            targets.append(len(self.rows))
            self.slots.begin_spared(len(self.rows), len(row.prompt))
            self.rows.append(row)
        if not (self.waiting and self.waiting[0] // each == prompt):
            self.spare_prompt = None
        self._take(self.after.expand(len(targets), -1), targets)

    def _row(self, index: int) -> _Row:
        prompt = self.prompts[index // self.settings.answers]
        answer = index % self.settings.answers
        numbers = np.empty(0)
        limits = self.settings.limits
        limit = limits[index] if limits else self.settings.max_new_tokens
        if self.settings.temperature > 0:
            numbers = draw_numbers(
                self.settings.seed,
                self.settings.first + index // self.settings.answers,
                answer,
                limit,
            )
        return _Row(index, prompt, numbers, limit)

    def _step(self) -> None:
        """One token more of every row in flight."""
        rows = self.rows
        tokens = [row.ids[-1] for row in rows]
        positions = [row.length for row in rows]
        columns = self._columns(max(positions) + 1)
        if self.settings.fixed_shapes:  # idle slots are computed too, and nobody reads them
            idle = self.width - len(rows)
            tokens += [0] * idle
            positions += [0] * idle
            columns = self.slots.tokens
        logits = self.caller.decode(self.slots, tokens, positions, columns)
        self._take(logits[: len(rows)], list(range(len(rows))), self._alike())

    def _columns(self, tokens: int) -> int:
        """Tokens that a step attends to where the longest row has `tokens`; 0: as many."""
        step = self.settings.reach
        return 0 if step == 1 else min(-(-tokens // step) * step, self.slots.tokens)

    def _alike(self) -> int:
        """Tokens that rows may go on by until a step has other shapes, or ends a row."""
        tokens = max(row.length for row in self.rows) + 1  # of the longest, its newest included
        most = [(self._columns(tokens + 1) or tokens + 1) - tokens]
        for row in self.rows:
            most.append(row.limit - len(row.ids) - 1)
            if self.positions:
                most.append(self.positions - row.length - 2)
        return max(min(most), 1)

    def _take(self, logits: Tensor, places: list[int], most: int = 1) -> None:
        """Sample a token for the rows at these places, and let go of those that end with it.

        most: tokens that these rows may go on by in steps of the same shapes; see `Read`.
        """
        settings = self.settings
        rows = [self.rows[place] for place in places]
        numbers = None
        if settings.temperature > 0:
            drawn = [float(row.numbers[len(row.ids)]) for row in rows]
            numbers = torch.tensor(drawn, dtype=torch.float64)
        tokens, chosen = sample(logits, numbers, settings, self._seen(logits, places))
        for row, (ids, log_probs) in zip(rows, self.read(tokens, chosen, most), strict=True):
            row.ids += ids
            row.log_probs += log_probs
            if self.watch is not None:
                for token in ids:
                    self.watch(row.index, token)
        for place in reversed(places):
            ended = self._ended(self.rows[place])
            if ended is not None:
                self._release(place, ended)

    def _seen(self, logits: Tensor, places: list[int]) -> Tensor | None:
        """(rows, vocab): the tokens of each row; None without a penalty."""
        if self.settings.repetition_penalty == 1.0:
            return None
        if self.seen is None:
            self.seen = logits.new_zeros(self.width, logits.shape[1], dtype=torch.bool)
        for place in places:
            row = self.rows[place]
            if row.ids:
                self.seen[place, row.ids[-1]] = True
            else:
                mark(self.seen, place, row.prompt)
        return self.seen[places[0] : places[-1] + 1]

    def _ended(self, row: _Row) -> Ended | None:
        """Why a row ends with its newest token."""
        if row.ids[-1] in self.settings.stop_tokens:
            return "stop_token"
        if self.settings.stop_words and self._stopped(row.ids):
            return "stop_word"
        if len(row.ids) == row.limit:
            return "length"
        if self.positions and len(row.prompt) + len(row.ids) == self.positions:
            return "positions"
        return None

    def _stopped(self, ids: list[int]) -> bool:
        """Whether the text so far has a stop word."""
        assert self.decode is not None
        return has_stop_word(ids, self.settings.stop_words, self.decode)

    def _release(self, place: int, ended: Ended) -> None:
        """Give the answer out; the last row in flight moves into its slot."""
        row = self.rows[place]
        self.done[row.index] = Completion(tuple(row.ids), tuple(row.log_probs), ended)
        last = len(self.rows) - 1
        if place != last:
            self.slots.move(last, place, self.rows[last].length)
            self.rows[place] = self.rows[last]
            if self.seen is not None:
                self.seen[place] = self.seen[last]
        self.rows.pop()


@contextmanager
def _quick(caller: Caller, settings: Settings) -> Iterator[None]:
    """Gathered weights keep torch's products: what they are now says nothing of each call."""
    with torch.no_grad():
        if caller.together:
            yield
        else:
            with quick_products(caller.model, settings.max_new_tokens):
                yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout meanwhile; compiled blocks run as written: shapes here would compile anew."""
    was = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was)


__all__ = ["Completion", "Settings", "architecture_of", "generate_batch"]
