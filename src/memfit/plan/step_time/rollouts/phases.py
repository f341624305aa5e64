"""An iteration of reinforcement learning laid end to end: what each phase does, and how long.

Nobody knows before a run how long answers get, so that every prompt and every answer counts with
its bound: the upper end. Reward functions are the user's own code, whose seconds nobody predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from memfit.base_formats import find_base_format
from memfit.families.capabilities.kv_cache import cache_bytes
from memfit.plan.step_time import work
from memfit.plan.step_time.arrays import beside, change
from memfit.plan.step_time.block import score_head, spend, time_block
from memfit.plan.step_time.communication.exchanges import gather_seconds
from memfit.plan.step_time.rates import Setting
from memfit.plan.step_time.rollouts.decoding import EACH_ANSWER, Decoding, step_seconds, time_step
from memfit.plan.step_time.step import Parts, predict_step
from memfit.records.hardware import Device
from memfit.records.model import Architecture
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import PREFILL_TOKENS, scores_old

UNDER = {
    "score": "under the policy that sampled",
    "reference": "under the reference",
    "values": "by the value",
    "reward": "with the reward model's adapter",
}


class Phase(NamedTuple):
    """One part of an iteration; tokens: that it reads, samples or learns from."""

    name: str
    seconds: float
    tokens: int
    stream: str
    because: str


class Iteration(NamedTuple):
    """All of one, without the rewards' seconds."""

    phases: tuple[Phase, ...]  # in the order of an iteration
    update: Parts  # of one of `num_iterations` updates

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(phase.seconds for phase in self.phases)


class Counts(NamedTuple):
    """How many of what an iteration has on one rank, every length at its bound."""

    answers: int
    prompts: int  # each read once, for all of its answers
    rows: int  # in flight
    waves: int  # of answers, one after the other in the same slots
    prompt: int  # tokens
    completion: int
    rounds: int  # of sampling


def count(recipe: Recipe, architecture: Architecture) -> Counts:
    """Those of a recipe whose answers are sampled."""
    rollout, answers = recipe.rollout, recipe.own_rows
    rows = rollout.in_flight(answers)
    completion = rollout.max_completion_length
    if architecture.max_sequence and not architecture.alibi:  # positions end a row
        completion = min(completion, architecture.max_sequence - rollout.max_prompt_length)
    return Counts(
        answers=answers, prompts=answers // rollout.num_generations, rows=rows,
        waves=-(-answers // rows), prompt=rollout.max_prompt_length, completion=max(1, completion),
        rounds=1 + rollout.dynamic_sampling,
    )  # fmt: skip


def time_iteration(
    setting: Setting, recipe: Recipe, architecture: Architecture, projections: float,
    device: Device,
) -> Iteration:  # fmt: skip
    """Seconds of one iteration of memfit's own loop; setting: of the recipe's update.

    projections: matrices of a block.
    """
    counts = count(recipe, architecture)
    one = change(setting.layout, micro_batch=1.0 * counts.rows, sequence=1.0)
    fused = find_base_format(recipe.base_format).fused_rows(device.compute_capability)
    decoding = Decoding(
        setting._replace(layout=one), recipe, architecture, projections, device, fused
    )
    phases = [
        _switch(setting, recipe, architecture, counts),
        _prefill(setting, recipe, counts, device),
        _decode(decoding, counts),
    ]
    if recipe.scored_by_adapter:
        score = _score(setting, recipe, counts, device, "reward")
        rounds = counts.rounds
        phases.append(
            score._replace(
                seconds=rounds * score.seconds, tokens=rounds * score.tokens,
                because=_times(rounds) + score.because,
            )
        )  # fmt: skip
    if scores_old(recipe.objective, recipe.policy):
        phases.append(_score(setting, recipe, counts, device, "score"))
    if recipe.policy.beta:
        phases.append(_score(setting, recipe, counts, device, "reference"))
    update = predict_step(setting)
    if recipe.values:
        phases.append(_score(setting, recipe, counts, device, "values"))
        update = with_values(update)
    times = recipe.policy.num_iterations
    phases.append(
        Phase(
            "update", times * float(update.total), times * counts.answers * recipe.sequence_length,
            "compute", f"{times} of {recipe.accumulation} micro-batches of {recipe.micro_batch}"
            f" rows of {recipe.sequence_length} tokens"
            + (", for the policy and for the value" if recipe.values else ""),
        )
    )  # fmt: skip
    of_all = [phase._replace(tokens=phase.tokens * recipe.parallel.dp) for phase in phases]
    return Iteration(tuple(of_all), update)


def with_values(parts: Parts) -> Parts:
    """A step whose blocks run for the policy, and once more for the value without the vocabulary's
    head."""
    return parts._replace(
        forward=2 * parts.forward, backward=2 * parts.backward, repeated=2 * parts.repeated,
        tensor=2 * parts.tensor, waiting=2 * parts.waiting,
    )  # fmt: skip


def _switch(setting: Setting, recipe: Recipe, architecture: Architecture, counts: Counts) -> Phase:
    """From learning to sampling: no weight moves; the slots of the cache are written once."""
    nbytes = cache_bytes(
        architecture, rows=counts.rows, tokens=counts.prompt + counts.completion,
        dtype=recipe.compute_dtype, spare=counts.prompt,
    )  # fmt: skip
    seconds = nbytes / (setting.machine.memory * setting.rates.elementwise.memory)
    because = "the same modules sample and learn, no weight moves; the slots are written once"
    return Phase("switch", counts.rounds * seconds, 0, "compute", because)


def _prefill(setting: Setting, recipe: Recipe, counts: Counts, device: Device) -> Phase:
    """Prompts through the model, several a call, with the logits of each one's last token."""
    group = recipe.rollout.num_generations
    free = max(1, counts.rows // group)  # prompts whose answers find slots together
    each = min(counts.prompts, free, max(1, PREFILL_TOKENS // counts.prompt))
    layout = change(setting.layout, micro_batch=1.0 * each, sequence=1.0 * counts.prompt)
    calls = -(-counts.prompts // each)
    own = setting._replace(layout=layout)
    each_call = _forward(own, device)
    seconds = counts.rounds * (calls * each_call + _gather(own, recipe, calls, each_call))
    because = (
        f"{_times(counts.rounds)}{counts.prompts} prompts of {counts.prompt} tokens, each read"
        f" once for its {group} answers, {each} a call"
    )
    tokens = counts.rounds * counts.prompts * counts.prompt
    return Phase("prefill", seconds, tokens, "compute", because)


def _decode(decoding: Decoding, counts: Counts) -> Phase:
    """Token after token of all rows in flight; the first one comes with the prompt's logits."""
    recipe, seconds = decoding.recipe, EACH_ANSWER * counts.answers
    last = counts.answers - (counts.waves - 1) * counts.rows
    whole = counts.prompt + counts.completion
    for rows, waves in ((counts.rows, counts.waves - 1), (last, 1)):
        layout = change(decoding.setting.layout, micro_batch=1.0 * rows)
        wave = decoding._replace(setting=decoding.setting._replace(layout=layout))
        for columns, steps in reaches(counts, recipe.rollout.reach):
            each = step_seconds(time_step(wave, columns), wave.device)
            seconds += waves * steps * each
            if recipe.parallel.reshard_after_forward:  # else they are whole since the prompts
                seconds += _gather(wave.setting, recipe, waves * steps, each)
    because = (
        f"{_times(counts.rounds)}{counts.answers} answers of {counts.completion} tokens,"
        f" {counts.rows} in flight{_on_each(recipe)}: a step reads all weights and"
        f" {counts.prompt} to {whole} tokens of keys and values"
    )
    tokens = counts.rounds * counts.answers * counts.completion
    return Phase("decode", counts.rounds * seconds, tokens, "compute", because)


def reaches(counts: Counts, step: int) -> Iterator[tuple[int, int]]:
    """(tokens that attention reaches, a multiple of `step`; decoding steps that reach as many)."""
    first, last = counts.prompt + 1, counts.prompt + counts.completion - 1
    for columns in range(-(-first // step) * step, -(-last // step) * step + 1, step):
        steps = min(columns, last) - max(columns - step + 1, first) + 1
        yield min(columns, counts.prompt + counts.completion), steps


def _score(setting: Setting, recipe: Recipe, counts: Counts, device: Device, name: str) -> Phase:
    """A forward without a gradient of all rows, in the update's micro-batches."""
    alone = name == "reference"
    each = _forward(setting, device, adapters=not alone)
    if name not in ("values", "reward"):
        each += float(score_head(setting))
    because = f"a forward of all rows without a gradient, {UNDER[name]}"
    tokens = counts.answers * recipe.sequence_length
    seconds = recipe.accumulation * each + _gather(setting, recipe, recipe.accumulation, each)
    return Phase(name, seconds, tokens, "compute", because)


def _gather(setting: Setting, recipe: Recipe, calls: int, each: float) -> float:
    """Exposed seconds of gathering shards for forwards without a gradient.

    What a block's own gathering takes beyond the block before it, and the framework's share. each:
    seconds of one forward.
    """
    layout, layers = setting.layout, float(setting.shape.layers)
    if recipe.parallel.shards == 1:
        return 0.0
    elements = work.gathered_elements(setting.shape, layout)
    gather = float(gather_seconds(setting, layout.sent.gathered * elements)[0])
    share = min(float(setting.rates.exposed.exposed_data), 1.0)
    times = calls if recipe.parallel.reshard_after_forward else min(calls, 1)
    return times * layers * (max(gather - each / layers, 0.0) + share * gather)


def _forward(setting: Setting, device: Device, *, adapters: bool = True) -> float:
    """Seconds of all blocks, forward alone."""
    spent = spend(setting)
    block = time_block(setting, spent)
    busy = float(spent.forward) - (0.0 if adapters else float(spent.adapters))
    waited = float(block.launched if device.is_cpu else block.waited)
    each = float(beside(busy, float(block.launched) - waited)) + waited
    return float(setting.shape.layers) * each


def _on_each(recipe: Recipe) -> str:
    ranks = recipe.parallel.dp
    return f" on each of {ranks} ranks" if ranks > 1 else ""


def _times(rounds: int) -> str:
    return f"{rounds} rounds of " if rounds > 1 else ""
