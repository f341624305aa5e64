"""An iteration in figures and spans: seconds with their range, tokens a second of each phase."""

from __future__ import annotations

from collections.abc import Sequence

from memfit.core.units import show_seconds
from memfit.plan.step_time.rollouts.decode_range import find_decode_range
from memfit.plan.step_time.rollouts.phases import Iteration
from memfit.plan.step_time.time_range import find_range
from memfit.records.recipe import Recipe
from memfit.records.reinforcement.phase_time import PhaseTime
from memfit.records.results import Time
from memfit.records.timeline import Span, Timeline

REWARD = "reward"


def lay_out_iteration(iteration: Iteration, update: Timeline) -> Timeline:
    """Phases end to end; update: the spans of one, each of which counts for all updates."""
    spans: list[Span] = []
    start = 0.0
    for phase in iteration.phases:
        if phase.name != "update":
            if phase.seconds > 0:
                spans.append(
                    Span(op=phase.name, stream=phase.stream, start=start, duration=phase.seconds,
                         flop=0.0, because=phase.because)
                )  # fmt: skip
            start += phase.seconds
            continue
        times = phase.seconds / float(iteration.update.total)
        for span in update.spans:
            spans.append(
                Span(op=span.op, stream=span.stream, start=start, duration=times * span.duration,
                     flop=times * span.flop, because=span.because)
            )  # fmt: skip
            start += times * span.duration
    return Timeline(spans=tuple(spans))


def describe_phases(
    iteration: Iteration, recipe: Recipe, stack: str, device: str
) -> tuple[PhaseTime, ...]:
    """Figures of each phase; the rewards' seconds, which follow decoding, are unknown."""
    found = []
    for phase in iteration.phases:
        if phase.name == "decode":
            low, high, _ = find_decode_range(phase.seconds)
        else:
            low, high, _ = find_range(phase.seconds, stack, device)
        because = phase.because
        if phase.name == REWARD and recipe.reward.functions:
            because += "; what reward functions take beside it is theirs"
        rate = phase.tokens / phase.seconds if phase.tokens and phase.seconds else None
        found.append(
            PhaseTime(
                phase=phase.name, seconds=phase.seconds, seconds_low=low, seconds_high=high,
                tokens=phase.tokens, tokens_per_second=rate, because=because,
            )
        )  # fmt: skip
        if phase.name == "decode" and not recipe.scored_by_adapter:
            found.append(_reward(recipe))
    return tuple(found)


def _reward(recipe: Recipe) -> PhaseTime:
    limit = f"{recipe.reward.timeout:g} s a call"
    return PhaseTime(
        phase=REWARD, seconds=None, seconds_low=None, seconds_high=None, tokens=0,
        tokens_per_second=None,
        because=f"what reward functions take is theirs, {limit} at most; in no sum",
    )  # fmt: skip


def describe_iteration(
    phases: Sequence[PhaseTime], recipe: Recipe, flops: float, because: str, basis: str
) -> Time:
    """The figures of the JSON's `time` object; flops: of one update's mathematics.

    The range adds up those of the phases. MFU is none's: decoding is bound by the memory.
    """
    known = [p for p in phases if p.seconds is not None]
    seconds = sum(p.seconds or 0.0 for p in known)
    rate = recipe.global_batch * recipe.sequence_length / seconds
    _, _, why = find_decode_range(seconds)
    return Time(
        step_seconds=seconds, tokens_per_second=rate,
        tokens_per_second_per_device=rate / recipe.parallel.world,
        mfu=None, hfu=None, model_flops_per_step=flops * recipe.parallel.dp,
        total_seconds=seconds * recipe.steps if recipe.steps else None,
        because=because, basis=basis,
        step_seconds_low=sum(p.seconds_low or 0.0 for p in known),
        step_seconds_high=sum(p.seconds_high or 0.0 for p in known),
        range_because=f"of decoding {why}; other phases as steps are",
        phases=tuple(phases),
    )  # fmt: skip


def assume_bounds(recipe: Recipe, half: int, seconds: float) -> str:
    """What an iteration's seconds take for granted; seconds: of one whose answers have half the
    tokens."""
    rollout = recipe.rollout
    rounds = rollout.dynamic_sampling
    more = f", all {1 + rounds} rounds of dynamic sampling" if rounds else ""
    return (
        f"seconds and cost count every prompt and answer at its bound"
        f" ({rollout.max_prompt_length:,} and {rollout.max_completion_length:,} tokens{more}), the"
        " upper end, since lengths are unknown before a run: with"
        f" {half:,} tokens an answer an iteration takes {show_seconds(seconds)}; reward functions'"
        " own seconds are not counted"
    )
