"""Prompts that are read and steps that decode, without data: each call of the model and what is
sampled from it, as train/generation/loop.py has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfit import meta
from memfit.core.system.collector import without_collecting
from memfit.families import find_family
from memfit.families.capabilities.turned import LEAST_TOKENS
from memfit.families.shared.forward import Forward, bend_logits, project
from memfit.meta import Tensor
from memfit.meta.attending.slots import Decode, Prefill
from memfit.plan.simulate.blocks import Simulation
from memfit.plan.simulate.sampled.drawing import Drawing, draw_tokens
from memfit.plan.simulate.setting import Batch, Recording, Setting
from memfit.records import Record
from memfit.records.model import Architecture
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import PREFILL_TOKENS

OWNER = "rollout"  # of what is alive beside the model's own


class Admission(Record, frozen=True, kw_only=True):
    """Prompts that are read at once, and answers that begin with them."""

    prompts: int
    answers: int
    later: bool  # whether what earlier prompts left is there: a prompt's logits, rows' tokens


class Slots(Record, frozen=True, kw_only=True):
    """What sizes the calls of a rollout."""

    rows: int  # answers in flight
    group: int  # answers to each prompt
    prompt: int  # tokens of the longest prompt
    tokens: int  # of a slot: a prompt and its answer
    reach: int  # a decoding step attends to a multiple of this many tokens
    answers: int  # of the waves that stand for all
    drawing: Drawing = Drawing()
    turns: bool = False  # whether a CPU holds weights by columns meanwhile

    @classmethod
    def of(cls, recipe: Recipe, limit: int) -> Slots:
        """limit: positions of the model; 0 where nothing ends a row."""
        rollout, answers = recipe.rollout, recipe.own_rows
        tokens = min(rollout.width, limit or rollout.width)
        return cls(
            rows=rollout.in_flight(answers), group=rollout.num_generations,
            prompt=min(rollout.max_prompt_length, tokens), tokens=tokens,
            reach=rollout.reach, answers=rollout.count_shown(answers), drawing=Drawing.of(rollout),
            turns=rollout.max_completion_length >= LEAST_TOKENS
            and recipe.parallel.world == 1 and not recipe.autocast,
        )  # fmt: skip

    @property
    def spare(self) -> int:
        """Tokens of the row that keeps a prompt."""
        return self.prompt if self.group > 1 else 0

    @property
    def columns(self) -> int:
        """Those that the last step reads: a row's last token is never read; 0 without a step."""
        if self.tokens == self.prompt + 1:
            return 0
        return min(-(-(self.tokens - 1) // self.reach) * self.reach, self.tokens)

    @property
    def shapes(self) -> tuple[int, ...]:
        """What steps read, from the first one after the longest prompt on."""
        first = -(-(self.prompt + 1) // self.reach) * self.reach
        return (*range(min(first, self.columns), self.columns, self.reach), self.columns)

    def admissions(self) -> Iterator[Admission]:
        """Prompts are read while a slot is free, and all rows of a wave end together."""
        waiting, rest, later = self.answers, 0, False  # rest: answers that wait for a read prompt
        while waiting:
            free = self.rows
            while free and waiting:
                if rest:
                    begun = min(rest, free)
                    rest -= begun
                    prompts = 0
                else:
                    most = max(1, PREFILL_TOKENS // self.prompt)
                    prompts = min(-(-free // self.group), most, waiting // self.group)
                    begun = min(prompts * self.group, free)
                    rest = prompts * self.group - begun
                yield Admission(prompts=prompts, answers=begun, later=later)
                later = self.group > 1 or self.drawing.penalised
                free -= begun
                waiting -= begun


def record_rollout(setting: Setting, slots: Slots, dtype: str, *, steps: bool = False) -> Recording:
    """A pass for each different admission, and one of the longest decoding step, if any.

    setting: of a forward without a gradient; dtype: of keys and values. steps: with a pass of each
    shape of the steps, the shortest first.
    """
    with without_collecting():
        calls = _Calls(setting, slots, dtype)
        return calls.record(slots.shapes if steps else (slots.columns,))


class _Calls:
    """Calls of the model on one meter."""

    def __init__(self, setting: Setting, slots: Slots, dtype: str) -> None:
        batch = Batch(rows=slots.rows, tokens=1, documents=None)
        self.simulation = Simulation(setting, batch, unrolled=False)
        self.setting, self.slots, self.dtype = setting, slots, dtype
        self.meter, self.units = self.simulation.meter, self.simulation.units

    def record(self, columns: Sequence[int]) -> Recording:
        passes = []
        for admission in find_admissions(self.slots):
            self.simulation.marks = []
            self._prefill(admission)
            passes.append(self.simulation.marks)
        for reach in columns if self.slots.columns else ():
            self.simulation.marks = []
            self._decode(reach)
            passes.append(self.simulation.marks)
        return Recording(self.meter, passes, len(self.meter.events), [], 0)

    def _forward(self, ids: Tensor, places: Tensor | None, now: Prefill | Decode) -> Forward:
        setting = self.setting
        return Forward(
            architecture=setting.architecture, meter=self.meter, kernel=setting.attention.kernel,
            input_ids=ids, position_ids=places, documents=None, narrow=setting.precision.narrow,
            qat=setting.precision.qat, lean=setting.lean,
            quantised=setting.precision.quantised, slots=now,
            by_columns=self.slots.turns and not setting.cuda,
        )  # fmt: skip

    def _begin(self, forward: Forward) -> Forward:
        """Each call is the forward of FSDP2's root; what it does not reshard stays gathered until
        all answers are there."""
        return forward if self.units is None else self.units.begin(forward)

    def _end(self, logits: Tensor) -> None:
        if self.units is not None:
            self.units.end(logits)

    def _prefill(self, admission: Admission) -> None:
        meter, slots, simulation = self.meter, self.slots, self.simulation
        simulation.mark("embedding", "embedding")
        after = self._keep_logits() if admission.later else None
        seen = self._keep_seen() if admission.later else None
        now = Prefill(
            meter, admission.prompts, slots.prompt, admission.answers, slots.tokens, self.dtype,
            gated=bool(find_family(self.setting.architecture.family).state_gates),
        )  # fmt: skip
        ids = meta.empty(meter, (admission.prompts, slots.prompt), "int64")
        with meter.with_autocast(self.setting.precision.autocast):
            forward = self._begin(self._forward(ids, None, now))
            hidden = simulation.find_hidden(forward, [])
            simulation.mark("loss", OWNER)
            logits = self._only_last(forward, hidden)
            self._end(logits)
            del hidden, forward, ids
        if not admission.later:
            after = self._keep_logits()
        begun = meta.empty(meter, (admission.answers, logits.shape[-1]), logits.dtype)
        if not admission.later:
            seen = self._keep_seen()
        draw_tokens(begun, slots.drawing)
        del begun, logits, now, after, seen
        simulation.mark("end", "")

    def _keep_logits(self) -> Tensor | None:
        """(1, vocab), after the prompt of the spare row, where several answers begin with it."""
        setting = self.setting
        if self.slots.group == 1:
            return None
        dtype = setting.precision.compute if setting.precision.autocast else self.dtype
        return meta.empty(self.meter, (1, setting.architecture.vocab), dtype)

    def _keep_seen(self) -> Tensor | None:
        """(rows, vocab): the tokens of each row, where a penalty asks for them."""
        if not self.slots.drawing.penalised:
            return None
        return meta.empty(self.meter, (self.slots.rows, self.setting.architecture.vocab), "bool")

    def _only_last(self, forward: Forward, hidden: Tensor) -> Tensor:
        """The head's logits of each prompt's last token."""
        meter, rows = self.meter, hidden.shape[0]
        counted, last = (meta.empty(meter, (rows,), "int64") for _ in range(2))
        chosen = meta.empty(meter, (rows, 1, hidden.shape[-1]), hidden.dtype)
        del counted, last
        return self._head(forward, chosen)

    def _head(self, forward: Forward, hidden: Tensor) -> Tensor:
        outside, a = self.simulation.outside, self.setting.architecture
        return bend_logits(a, project(forward, outside, "lm_head", hidden))

    def _decode(self, columns: int) -> None:
        meter, slots, simulation = self.meter, self.slots, self.simulation
        rows = slots.rows
        simulation.mark("embedding", "embedding")
        after, seen = self._keep_logits(), self._keep_seen()
        now = Decode(meter, rows, columns, slots.tokens, self.dtype, uneven=slots.reach > 1)
        ids = meta.empty(meter, (rows, 1), "int64")
        with meter.with_autocast(self.setting.precision.autocast):
            forward = self._begin(self._forward(ids, meta.unsqueeze(now.positions, 1), now))
            hidden = simulation.find_hidden(forward, [])
            simulation.mark("loss", OWNER)
            logits = self._head(forward, hidden)
            self._end(logits)
            del hidden, forward, ids
        draw_tokens(meta.reshape(logits, rows, logits.shape[-1]), slots.drawing)
        del logits, now, after, seen
        simulation.mark("end", "")


def find_admissions(slots: Slots) -> tuple[Admission, ...]:
    """Those of which none holds more by all counts than another one."""
    return tuple(dict.fromkeys(a for a in slots.admissions() if a.prompts))


def find_limit(a: Architecture) -> int:
    """The most tokens of a row; 0 where nothing ends it."""
    return 0 if a.alibi and not find_family(a.family).ends else a.max_sequence
