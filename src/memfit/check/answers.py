"""What `memfit check` answers: the prediction's verdict, or what is certain beside keys that are
not described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from memfit import families
from memfit.check import Checked, ConfigReading, gather_files
from memfit.check.keys import LEVELS, Least, Undescribed, leaves
from memfit.check.out_of_memory import Diagnosed
from memfit.core.errors import DoesNotFit, InvalidRequest, MemoryUnknown, NotCertified
from memfit.core.units import show_bytes
from memfit.records import Record
from memfit.records.ledger import Kind, Phase
from memfit.records.request import Request
from memfit.records.results import Memory, Plan, Verdict

# keys of a request -> what a step holds at least, whatever the key that put them there does
HELD: dict[str, Least] = {
    "loss": "states", "loss_chunk": "states", "attention": "states", "compile": "states",
    "recompute": "states", "options.liger": "states", "options.reentrant": "states",
    "options.loss_chunks": "states", "task.packing": "states", "lora.targets": "weights",
    "options.modules_to_save": "states", "lora.dropout": "step",
}  # fmt: skip
WHAT = {
    "states": "in weights, gradients and the optimizer's states", "weights": "in weights",
    "blocks": "in the blocks' weights",
}  # fmt: skip
OF_STATES = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE)
EVALUATED = 10  # bytes a logit: 16 bits, fp32 and the loss's own of an evaluation
SHOWN = 2  # keys of a headline


class Answer(Record, frozen=True, kw_only=True):
    """The verdict on the files, with its sentence."""

    verdict: Verdict | Literal["not_known"]
    least: int | None  # bytes that are needed in any case; None: nothing is certain
    headline: str  # "" where the prediction's own says all

    @property
    def exit_code(self) -> int:
        """0 where it fits, also where it is at risk; 3: it does not; 4: it is not known."""
        codes = {"does_not_fit": DoesNotFit.exit_code, "not_known": NotCertified.exit_code}
        return codes.get(self.verdict, 0)


def judge(checked: Checked, plan: Plan, found: Diagnosed | None = None) -> Answer:
    """What is certain: beside keys that are not described, a step that fits is not known to.

    found: a message of a run that was out of memory, which is right where the prediction says that
    it fits.
    """
    answer = _judge_keys(checked, plan)
    if found is None or answer.verdict == "does_not_fit":
        return answer
    memory, cause = plan.memory, next(iter(found.causes), None)
    headline = "the log shows that it ran out of memory, and "
    headline += (
        "the prediction does not say so"
        if memory.needed is None
        else (
            f"{show_bytes(memory.needed)} of {show_bytes(memory.usable or 0)} usable are predicted"
        )
    )
    headline += (
        f"; most likely: {cause.what} ({show_bytes(cause.nbytes)})"
        if cause
        else ("; none of the log's numbers is beyond the prediction's")
    )
    if checked.undescribed:
        headline += f"; {answer.headline}"
    return Answer(verdict="not_known", least=answer.least, headline=headline)


def _judge_keys(checked: Checked, plan: Plan) -> Answer:
    memory = plan.memory
    if not checked.undescribed:
        return Answer(verdict=memory.verdict, least=memory.needed, headline="")
    level = max((one.least for one in checked.undescribed), key=LEVELS.index)
    least = find_least(plan, level)
    over = memory.usable is not None and least is not None and least > memory.usable
    if level == "step":
        over = memory.verdict == "does_not_fit"
    return Answer(
        verdict="does_not_fit" if over else "not_known",
        least=least,
        headline=_write(checked.undescribed, level, least, memory),
    )


def find_least(plan: Plan, level: Least) -> int | None:
    """Bytes that a step needs at least, by what is certain of it; None where nothing is."""
    if level == "step":
        return plan.memory.total_low or plan.memory.peak_allocated
    if level == "nothing" or plan.memory.peak_allocated is None:
        return None
    kinds = OF_STATES if level == "states" else OF_STATES[:1]
    sums = []
    for phase in plan.ledger.phases:
        held = [e for e in plan.ledger.at(phase) if e.kind in kinds]
        if level == "blocks":
            held = [e for e in held if e.owner == "blocks"]
        sums.append(sum(e.nbytes for e in held))
    return max(sums) if level == "states" else min(sums)


def _write(
    undescribed: Sequence[Undescribed], level: Least, least: int | None, memory: Memory
) -> str:
    keys = list(dict.fromkeys(one.key for one in undescribed))
    named = ", ".join(f"`{key}`" for key in keys[:SHOWN])
    more = len(keys) - SHOWN
    named += f" and {more} more are" if more > 0 else " are" if len(keys) > 1 else " is"
    usable = "" if memory.usable is None else f" of {show_bytes(memory.usable)} usable"
    if least is None:
        return f"{named} not described, and may lower what is predicted, too"
    what = f" {WHAT[level]}" if level in WHAT else ""
    return f"at least {show_bytes(least)}{usable}{what}: {named} not described"


def answer_files(
    files: Sequence[Path],
    data: dict[str, Any],
    predict: Callable[[Request], Plan],
    config: str = "",
) -> tuple[Checked, Plan]:
    """The files as a request, and its prediction.

    Where one key's value beside the others makes a step that is not described,
    the answer is of the files without that key, which is noted. Raises InvalidRequest.
    """
    reading = ConfigReading(deepcopy(data), config=config)
    checked = gather_files(files, reading)
    try:
        plan = predict(checked.request)
    except InvalidRequest as error:
        if not (isinstance(error, MemoryUnknown) or " described" in error.message):
            raise
        found = _leave_out(files, data, reading, checked, predict, error)
        if found is None:
            raise
        checked, plan = found
    if plan.memory.peak_allocated is None:
        return checked, plan
    return _note_evaluation(checked, plan), plan


def _leave_out(
    files: Sequence[Path],
    data: dict[str, Any],
    whole: ConfigReading,
    checked: Checked,
    predict: Callable[[Request], Plan],
    error: InvalidRequest,
) -> tuple[Checked, Plan] | None:
    """The prediction of the files without the one key that nothing is described beside: of several
    such keys the one that leaves the most certain; None where there is none."""
    before = dict(leaves(whole.data))
    found: list[tuple[int, Checked, Plan]] = []
    for file, (_, source) in whole.sources.items():
        for key, value in leaves(source, deep=1):
            if value is None:
                continue
            reading = ConfigReading(deepcopy(data), {file: {key: None}}, whole.config)
            try:
                without = gather_files(files, reading)
                plan = predict(without.request)
            except InvalidRequest:
                continue
            after = dict(leaves(reading.data))
            changed = {
                one for one in before.keys() | after.keys() if before.get(one) != after.get(one)
            }
            levels = [LEVELS.index(HELD.get(one, "nothing")) for one in changed]
            worst = max(levels, default=0)
            note = Undescribed(
                file=file.name, key=key, value=value, least=LEVELS[worst], why=error.message
            )
            noted = replace(
                without, undescribed=(*checked.undescribed, note), left_out={str(file): key}
            )
            found.append((worst, noted, plan))
    best = min(found, key=lambda one: one[0], default=None)
    return None if best is None else best[1:]


def _note_evaluation(checked: Checked, plan: Plan) -> Checked:
    """The files with their evaluation noted, where it may need more than the step, and the device
    may not have it.

    A forward without gradients holds the weights, the optimizer's states, one block's tensors and
    its logits, of which the loss makes fp32 ones. The bound counts a block's tensors as four
    feed-forwards in fp32.
    """
    evaluated, memory, recipe = checked.evaluated, plan.memory, plan.recipe
    if evaluated is None or memory.usable is None:
        return checked
    a = families.read_model(recipe.model).architecture
    tokens = evaluated.rows * recipe.sequence_length
    kinds = OF_STATES if recipe.parallel.world > 1 else (Kind.PARAMETERS, Kind.OPTIMIZER_STATE)
    phase = (
        Phase.OPTIMIZER_STEP if Phase.OPTIMIZER_STEP in plan.ledger.phases else memory.peak_phase
    )
    held = sum(e.nbytes for e in plan.ledger.at(Phase(phase)) if e.kind in kinds)
    most = held + tokens * (EVALUATED * a.vocab + 16 * max(a.ffn, 4 * a.hidden))
    peak = memory.peak_allocated or 0
    beside = (memory.needed or peak) - peak  # of the allocator and the context
    if most <= peak or most + beside <= memory.usable:
        return checked
    why = (
        f"an evaluation of {evaluated.rows} rows at once may need up to {show_bytes(most + beside)}"
    )
    note = Undescribed(
        file=evaluated.file, key=evaluated.key, value=evaluated.rows, least="step", why=why
    )
    return replace(checked, undescribed=(*checked.undescribed, note))
