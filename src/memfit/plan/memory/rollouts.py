"""What an iteration of reinforcement learning holds around an update and in phases before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memfit.core.units import show_bytes
from memfit.families.capabilities.kv_cache import LayerCache, layer_caches
from memfit.plan.simulate.blocks import Parts
from memfit.plan.simulate.sampled.rollout import OWNER, Slots, find_admissions, find_limit
from memfit.plan.simulate.sampled.turning import Turning
from memfit.plan.simulate.segments import Level, Passes, expand
from memfit.plan.simulate.setting import Repeat
from memfit.plan.simulate.updates import hold
from memfit.records.hardware import Device
from memfit.records.ledger import Kind, Phase
from memfit.records.model import DTYPE_BYTES, Architecture, Model
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import scores_old

FP32, INT64 = DTYPE_BYTES["float32"], DTYPE_BYTES["int64"]
OF_AIMS = 3  # fp32 of a token that a value's micro-batch receives
BATCH = (Kind.INPUT, "batch")
SCORES = {
    Phase.REWARD: "reward", Phase.SCORE: "policy", Phase.REFERENCE: "reference",
    Phase.VALUES: "value",
}  # fmt: skip
OF_CALLS = (Kind.KV_CACHE, Kind.ACTIVATIONS, Kind.LOGITS, Kind.TEMPORARY)  # explained by them
CALLS = (Phase.PREFILL, Phase.DECODE)
SCORED = (Phase.SCORE, Phase.REFERENCE, Phase.VALUES)


class Calls(NamedTuple):
    """The segments of a rollout's calls of the model."""

    prefills: Sequence[Passes]  # of each different number of prompts
    decodes: Sequence[Passes]  # of the longest step; empty where answers have one token


def inputs_of_answers(recipe: Recipe, device: Device) -> Parts:
    """Of a micro-batch: ids, labels, which tokens count, advantages, and what was scored before.

    A rollout rests on the host: on a CPU its rows are there throughout (`rest_of_answers`).
    """
    if device.is_cpu:
        return {}
    rows = recipe.micro_batch
    return hold(BATCH, _batch(recipe, rows, scored=_needed(recipe)), device)


def inputs_of_values(recipe: Recipe, device: Device) -> Parts:
    """Of a micro-batch whose values are learned: ids, labels, values before, returns, and where."""
    if device.is_cpu:
        return {}
    tokens = recipe.micro_batch * recipe.sequence_length
    return hold(BATCH, [tokens * INT64] * 2 + [tokens * FP32] * OF_AIMS, device)


def _needed(recipe: Recipe) -> int:
    """Log-probabilities that an update receives: PPO's penalty is in its rewards already."""
    if recipe.values:
        return int(recipe.policy.num_iterations > 1)
    return len(scored_phases(recipe))


def _batch(recipe: Recipe, rows: int, *, scored: int, advantages: bool = True) -> list[int]:
    tokens = rows * recipe.sequence_length
    each = [tokens * INT64, tokens * INT64, tokens * FP32, *[tokens * FP32] * scored]
    return [*each, (tokens if recipe.values else rows) * FP32] if advantages else each


def rest_of_update(recipe: Recipe, device: Device) -> Parts:
    """What of a rollout is in the device's memory while it is learned from."""
    return _rest(recipe, device, _needed(recipe), advantages=True)


def rest_of_answers(recipe: Recipe, device: Device, scored: int) -> Parts:
    """The same from its end to the update; scored: how often numbers of tokens are there."""
    return _rest(recipe, device, scored, advantages=False)


def rest_of_rewards(recipe: Recipe, device: Device) -> Parts:
    """The scores of a rollout's answers while an adapter makes them; on the host."""
    return hold(BATCH, [recipe.own_rows * FP32], device) if device.is_cpu else {}


def inputs_of_rewards(recipe: Recipe, device: Device) -> Parts:
    """Ids and labels of a micro-batch that is scored, of which none is there before its turn."""
    return hold(BATCH, [recipe.tokens * INT64] * 2, device)


def _rest(recipe: Recipe, device: Device, scored: int, *, advantages: bool) -> Parts:
    """Rewards, by each function too, and which answers count are no tensors of a batch."""
    if not device.is_cpu:
        return {}
    own, rows = recipe.own_rows, recipe.global_batch  # a rank knows the rewards of all answers
    sizes = _batch(recipe, own, scored=scored, advantages=advantages)
    if recipe.values and advantages:
        sizes += [own * recipe.sequence_length * FP32] * OF_AIMS
    batch = hold(BATCH, sizes, device)
    return {**batch, (Kind.TEMPORARY, OWNER): rows * (_judged(recipe) + 1)}


def _judged(recipe: Recipe) -> int:
    """Bytes of an answer's rewards, of each function and of all together."""
    return FP32 + FP32 * max(len(recipe.reward.funcs), 1)


def rest_of_rounds(recipe: Recipe, device: Device) -> Parts:
    """The rewards of earlier rounds of sampling, where there are several."""
    rounds = recipe.rollout.dynamic_sampling
    if not rounds or not device.is_cpu:
        return {}
    return {(Kind.TEMPORARY, OWNER): rounds * recipe.global_batch * _judged(recipe)}


def key_dtype(model: Model, recipe: Recipe) -> str:
    """Of keys and values: autocast's, where that is on, else the embedding's."""
    if recipe.autocast:
        return recipe.compute_dtype
    return next(w.dtype for w in model.weights if w.part == "embedding")


def scored_phases(recipe: Recipe) -> tuple[Phase, ...]:
    """The forwards without a gradient before the update."""
    runs = scores_old(recipe.objective, recipe.policy), recipe.policy.beta > 0, recipe.values
    return tuple(phase for phase, here in zip(SCORED, runs, strict=True) if here)


def cache_of(a: Architecture, slots: Slots, dtype: str, device: Device) -> Parts:
    """The slots of all layers, as train/generation/slots.py allocates them."""
    return hold((Kind.KV_CACHE, "cache"), cache_sizes(a, slots, dtype), device)


def cache_sizes(a: Architecture, slots: Slots, dtype: str) -> list[int]:
    """Bytes of each tensor of the slots, in the order in which they are allocated."""
    sizes = []
    for layer in layer_caches(a):
        for rows, tokens in ((slots.rows, slots.tokens), (1, slots.spare)):
            sizes += [rows * each for each in layer.sizes(tokens, dtype)] if tokens else []
    return sizes


def explain_calls(model: Model, recipe: Recipe) -> dict[Phase, tuple[str, str]]:
    """Of each phase that samples: why what its calls make is as large as it is; and the slots."""
    a, dtype = model.architecture, key_dtype(model, recipe)
    slots = Slots.of(recipe, find_limit(a))
    cache = _explain_cache(layer_caches(a), slots, dtype)
    prompts = max((one.prompts for one in find_admissions(slots)), default=0)
    step = f"a step of {slots.rows} rows over {slots.columns} tokens, x {a.vocab} vocabulary"
    return {
        Phase.PREFILL: (f"a call over {prompts} x {slots.prompt} tokens of prompts", cache),
        Phase.DECODE: (step, cache),
    }


def _explain_cache(layers: Sequence[LayerCache], slots: Slots, dtype: str) -> str:
    """What the slots hold, in words."""
    plain, stateful = [x for x in layers if not x.states], [x for x in layers if x.states]
    spare = f" and one of {slots.spare}" if slots.spare else ""
    parts = [f"{slots.rows} rows of {slots.tokens} tokens{spare}"]
    if plain:
        each = sum(x.heads * (x.key + x.value) * DTYPE_BYTES[dtype] for x in plain)
        windows = ", fewer in layers with a window" if any(x.window for x in plain) else ""
        parts.append(f" x {show_bytes(each)} in {len(plain)} layers ({dtype}){windows}")
    if stateful:
        each = sum(sum(x.sizes(0, dtype)) for x in stateful)
        parts.append(
            f"{', and ' if plain else ', '}{show_bytes(each)} of states each in {len(stateful)}"
            " layers, however long"
        )
    return "".join(parts)


def walk_calls(
    level: Level, cache: Parts, calls: Calls, counts: list[Repeat], turning: Turning
) -> None:
    """Prompts are read, and the longest step decodes."""
    held = dict(level.live)
    level.note(Phase.PREFILL, turning.begins)
    level.note(Phase.DECODE, turning.ends)
    level.add(turning.spare)
    level.add(cache)
    for phase, passes in zip(CALLS, calls, strict=True):
        level.note(phase)
        for one in passes:
            before = dict(level.live)
            walk_forward(level, phase, one, counts)
            # weights that ranks share and that no forward gives up stay whole for the next call
            gathered = {p: n for p, n in level.live.items() if p[0] is Kind.ALL_GATHER}
            level.reset({**before, **gathered})
    level.reset(held)


def walk_forward(level: Level, phase: Phase, passes: Passes, counts: list[Repeat]) -> None:
    """A forward without a gradient and what follows it."""
    for segments in (passes.forward, passes.loss):
        for stretch, times in expand(segments, counts):
            level.walk(phase, stretch, times)
