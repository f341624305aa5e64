"""What TRL's GRPOTrainer holds beside its update: rollouts by transformers' `generate`, scores.

Of a rollout all answers are in flight at once: `steps_per_generation` micro-batches of a rank. Its
cache grows by concatenation. Log-probabilities under the policy that sampled and under the
reference are made a micro-batch at a time. Every answer is taken to reach its limit.

Source: trl 1.16 (trainer/grpo_trainer.py), transformers 5.24 (generation/utils.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.core.units import show_bytes
from memfit.families.capabilities.kv_cache import layer_caches
from memfit.meta import Tensor
from memfit.meta.losses.selected import sum_all
from memfit.plan.frameworks import Job, Knob
from memfit.plan.frameworks.hugging_face.engines import (
    ENGINE_KNOBS,
    OWN,
    check_engine,
    engine_of,
    hold_engine,
    scores_sampled,
)
from memfit.plan.frameworks.shared.assembly import Held, rounded
from memfit.plan.simulate.blocks import Parts
from memfit.plan.simulate.sampled.grown import (
    Generation,
    cached_sizes,
    record_generation,
    record_scoring,
)
from memfit.plan.simulate.segments import Level, Passes, cut, expand
from memfit.plan.simulate.setting import Batch, Repeat, Setting
from memfit.plan.simulate.updates import hold
from memfit.records.ledger import Kind, Phase
from memfit.records.model import DTYPE_BYTES, Model
from memfit.records.recipe import ADAPTED, Recipe

INT64, FP32 = DTYPE_BYTES["int64"], DTYPE_BYTES["float32"]
ROLLOUT = "rollout"
OF_ROWS = 5  # ids, mask and positions while answers are sampled, and the inputs of the call
RESTING = 4  # ids and masks of prompts and of answers, until the next rollout
JOINED = 2  # ids and mask of whole rows, while they are scored
SAMPLED_KNOBS = {
    "steps_per_generation": Knob(
        default=0, means="of objectives that sample: micro-batches of a rank that one rollout"
        " serves (0: those of an optimizer's step)",
    ),
    **ENGINE_KNOBS,
}  # fmt: skip


def policy_loss(outputs: list[Tensor], completion: int, *, refers: bool) -> Tensor:
    """`GRPOTrainer._compute_loss`: its variables live to its end; outputs: (rows, tokens) each."""
    log_probs, entropies = (_last(one, completion) for one in outputs)
    log_ratio = meta.scale(log_probs)
    ratio = meta.tanh(log_ratio)  # an exponential: it saves its result
    clipped = meta.power(ratio)  # a clamp: it saves what it has read
    first, second = meta.scale(ratio), meta.scale(clipped)
    smaller = meta.mul(first, second)
    loss = meta.scale(smaller)
    if refers:
        apart = meta.tanh(meta.scale(log_probs))
        divergence = meta.mul(meta.subtract(apart, log_probs), ratio)
        loss = meta.add(loss, meta.scale(divergence))
    total = meta.scale(sum_all(meta.scale(loss)))
    del entropies, smaller
    return total


def _last(x: Tensor, count: int) -> Tensor:
    """`torch.cat` of the last columns of one pass."""
    return meta.concatenate([meta.narrow(x, 1, x.shape[1] - count, count)], 1)


def completion_of(recipe: Recipe) -> int:
    """Tokens of a row that are scored; 0 where nothing is sampled."""
    return recipe.rollout.max_completion_length if recipe.samples else 0


def steps_of(recipe: Recipe) -> int:
    """Micro-batches of a rank that one rollout serves."""
    return int(recipe.options["steps_per_generation"]) or recipe.accumulation


def second_policy(recipe: Recipe) -> str:
    """The dtype of the reference's own model, "" where there is none."""
    whole = recipe.samples and recipe.policy.beta > 0 and recipe.method not in ADAPTED
    return recipe.trainable_dtype if whole else ""


def describe_generation(recipe: Recipe) -> Generation:
    """The call of `generate`; prompts are alike where a rank's answers are of one prompt."""
    rollout = recipe.rollout
    rows = recipe.micro_batch * steps_of(recipe)
    named = (
        ("penalty", rollout.repetition_penalty != 1.0), ("temperature", rollout.temperature != 1.0),
        ("top_k", rollout.top_k > 0), ("top_p", rollout.top_p < 1.0), ("min_p", rollout.min_p > 0),
    )  # fmt: skip
    return Generation(
        rows=rows, prompt=rollout.max_prompt_length, completion=rollout.max_completion_length,
        padded=recipe.options.get("padded") is not False and rows > rollout.num_generations,
        widens=_widens(recipe), warpers=tuple(name for name, used in named if used),
    )  # fmt: skip


def _samples_mixed(recipe: Recipe) -> bool:
    """Whether answers are sampled under autocast.

    accelerate puts it around the forward of what it prepares: of adapters that is peft's model,
    whose `generate` calls the forward of the model inside.
    """
    return recipe.autocast and recipe.method not in ADAPTED


def _widens(recipe: Recipe) -> bool:
    """Whether logits come back in fp32: of what accelerate puts autocast around, 16 bits too."""
    low = bool(recipe.options.get("fp32_outputs")) and recipe.method not in ADAPTED
    return low or _samples_mixed(recipe)


def scored_phases(recipe: Recipe) -> tuple[Phase, ...]:
    """The passes without a gradient: of the policy where a rollout outlives a step of it."""
    every = steps_of(recipe) * recipe.policy.num_iterations
    old = recipe.accumulation % every != 0 or recipe.objective == "rloo"
    old = old or scores_sampled(recipe)
    return (*([Phase.SCORE] if old else []), *([Phase.REFERENCE] if recipe.policy.beta else []))


def hold_rollout(recipe: Recipe) -> Held:
    """What every update has on the device of the rollout that it learns from."""
    rows, answers = recipe.micro_batch * steps_of(recipe), recipe.rollout.max_completion_length
    scored = len(scored_phases(recipe))
    tokens = rows * recipe.sequence_length
    sizes = [tokens * INT64] * (RESTING // 2) + [rows * answers * FP32] * scored
    reason = f"ids, masks and scores of {rows} answers, until the next rollout"
    return {(Kind.INPUT, ROLLOUT): (rounded(sizes), reason)}


class Rollout(NamedTuple):
    """What happens before an update, and beside what."""

    job: Job
    model: Model  # as the trainer stores it
    setting: Setting
    counts: list[Repeat]

    def walk(self, level: Level) -> None:
        """Prompts are read, the first and the last step decode, and rows are scored."""
        recipe, before = self.job.recipe, dict(level.live)
        if steps_of(recipe) * recipe.policy.num_iterations % recipe.accumulation:  # amid a step
            trained = [w.nbytes for w in self.model.weights if w.trainable]
            level.add(hold((Kind.GRADIENTS, "blocks"), trained, self.job.device))
        held = dict(level.live)
        if engine_of(recipe) == OWN:
            self._generate(level)
        else:
            self._wait_for_engine(level)
        level.reset(dict(held))
        level.add({(Kind.INPUT, ROLLOUT): JOINED * self._row_bytes})
        for phase in scored_phases(recipe):
            one = _score(self.setting, recipe, phase)
            self._run(level, phase, one)
        level.reset(before)

    @property
    def _row_bytes(self) -> int:
        recipe = self.job.recipe
        return recipe.micro_batch * steps_of(recipe) * recipe.sequence_length * INT64

    def _generate(self, level: Level) -> None:
        generation, dtype = describe_generation(self.job.recipe), self.key_dtype
        setting = self.setting
        if not _samples_mixed(self.job.recipe):
            wide = replace(setting.precision, autocast=False, caches=False)
            setting = replace(setting, precision=wide)
        passes = _generate(setting, generation, dtype)
        level.add({(Kind.INPUT, ROLLOUT): OF_ROWS * self._row_bytes})
        self._run(level, Phase.PREFILL, passes[0])
        befores = dict.fromkeys([generation.prompt, generation.last] if generation.last else [])
        for before, one in zip(befores, passes[1:], strict=True):
            held = dict(level.live)
            level.add(self.cache(before))
            self._run(level, Phase.DECODE, one)
            level.reset(held)

    def _wait_for_engine(self, level: Level) -> None:
        """vLLM samples: beside what the trainer holds, and its own weights where they were gone."""
        sampling, resting = hold_engine(self.job)
        more = {part: nbytes for part, (nbytes, _) in sampling.items() if part not in resting}
        level.add(more)
        level.note(Phase.DECODE)

    @property
    def key_dtype(self) -> str:
        """Of keys and values: autocast's, where that is on, else the embedding's."""
        if _samples_mixed(self.job.recipe):
            return self.job.recipe.compute_dtype
        return next(w.dtype for w in self.model.weights if w.part == "embedding")

    def cache(self, before: int) -> Parts:
        """What the layers hold of tokens that were seen before a step."""
        generation = describe_generation(self.job.recipe)
        layers = self.model.architecture.layers
        sizes = cached_sizes(self.setting, layers, generation, before)
        each = DTYPE_BYTES[self.key_dtype]
        return hold((Kind.KV_CACHE, "cache"), [n * each for n in sizes], self.job.device)

    def _run(self, level: Level, phase: Phase, passes: Passes) -> None:
        held = dict(level.live)
        level.note(phase)
        for segments in (passes.forward, passes.loss):
            for stretch, times in expand(segments, self.counts):
                level.walk(phase, stretch, times)
        level.reset(held)

    def explain(self) -> dict[tuple[Kind, str], str]:
        """Why the cache is as large as it is."""
        if engine_of(self.job.recipe) != OWN:
            return {part: why for part, (_, why) in hold_engine(self.job)[0].items()}
        generation, a = describe_generation(self.job.recipe), self.model.architecture
        each = sum(x.heads * (x.key + x.value) for x in layer_caches(a))
        each *= DTYPE_BYTES[self.key_dtype]
        tokens = generation.prompt + generation.completion - 1
        windows = ", fewer in layers with a window" if any(
            x.window for x in layer_caches(a)
        ) else ""  # fmt: skip
        return {(Kind.KV_CACHE, "cache"): (
            f"{generation.rows} answers of {tokens} tokens x {show_bytes(each)} in {a.layers}"
            f" layers ({self.key_dtype}){windows}; the layer that grows holds its old tensor, too"
        )}  # fmt: skip


@lru_cache(maxsize=64)
def _generate(setting: Setting, generation: Generation, dtype: str) -> list[Passes]:
    return cut(record_generation(_without_history(setting), generation, dtype))


def _score(setting: Setting, recipe: Recipe, phase: Phase) -> Passes:
    batch = Batch(rows=recipe.micro_batch, tokens=recipe.sequence_length, documents=None)
    of = "policy" if phase is Phase.SCORE else "reference"
    return _score_rows(setting, batch, recipe.rollout.max_completion_length, of)


@lru_cache(maxsize=64)
def _score_rows(setting: Setting, batch: Batch, answered: int, of: str) -> Passes:
    return cut(record_scoring(_without_history(setting), batch, answered, of=of))[0]


def _without_history(setting: Setting) -> Setting:
    """The same weights under `no_grad`: nothing is recomputed."""
    runs = tuple(
        replace(run, cycle=tuple(replace(b, recomputed=False, reentrant=False) for b in run.cycle))
        for run in setting.runs
    )
    loss = replace(setting.loss, references=1, compares=None)
    return replace(setting, runs=runs, loss=loss, micro_batches="one")


def check_rollouts(job: Job) -> None:
    """Raise InvalidRequest for rollouts that TRL refuses, or whose bytes are not described."""
    recipe, a = job.recipe, job.model.architecture
    if not recipe.samples:
        return
    under = f"`objective: {recipe.objective}` under `framework: {recipe.framework}`"
    shards = recipe.parallel.dp_shard
    for wrong, what, hint in (
        (recipe.framework != "trl", "samples answers", "use `framework: trl` or `memfit`"),
        (shards > 1, f"with `parallel.dp_shard: {shards}`", "`parallel: {dp_replicate: N}`"),
        (recipe.options.get("version") == "0.29", "with `options.version: 0.29`",
         "leave `options.version` out: it is 1.16"),
        (recipe.loss != "plain", f"with `loss: {recipe.loss}`", "`loss: plain`"),
        (a.alibi, f"of a model with ALiBi (`{job.model.name}`)", "another model"),
    ):  # fmt: skip
        if wrong:
            raise InvalidRequest(f"{under} {what} is not described", hint=hint)
    check_engine(job)
    steps, group = int(recipe.options["steps_per_generation"]), recipe.rollout.num_generations
    if steps < 0:
        raise InvalidRequest(
            f"`options.steps_per_generation: {steps}` is below 0", hint="leave it out"
        )
    answers = recipe.micro_batch * steps_of(recipe) * recipe.parallel.dp
    if answers % group:
        raise InvalidRequest(
            f"a rollout of {answers} answers (`micro_batch: {recipe.micro_batch}` x"
            f" {steps_of(recipe)} x {recipe.parallel.dp} ranks) is not of whole groups of"
            f" `rollout.num_generations: {group}`, and TRL refuses it",
            hint=f"`task.global_batch: {-(-recipe.global_batch // group) * group}`",
        )
