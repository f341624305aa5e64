"""vLLM beside TRL's trainer: its share of the device, by what its options are documented to mean.

Nothing here was measured. vLLM takes `gpu_memory_utilization` x the device's memory for its own
weights, cache and activations. TRL puts it to sleep at level 2 when `vllm_enable_sleep_mode` is
set: between rollouts neither weights nor cache are there. What graphs and libraries it holds then,
nobody states. The engine wakes with its weights alone, receives the trained ones, and takes its
cache when it samples.

Source: trl 1.16 (generation/vllm_generation.py), vLLM's documentation (configuration/engine_args,
features/sleep_mode).
"""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.core.units import show_bytes
from memfit.families.capabilities.kv_cache import cache_bytes
from memfit.plan.frameworks import Job, Knob
from memfit.plan.frameworks.shared.assembly import Held
from memfit.records.ledger import Kind
from memfit.records.recipe import Recipe

OWN, COLOCATE, SERVER = "transformers", "vllm-colocate", "vllm-server"
ENGINE = "engine"
NARROW = 2  # bytes of a number of the engine's weights and cache
DOUBT = (
    "vLLM's share is arithmetic of its documented options, and was not measured: graphs that it"
    " captures and what stays while it sleeps are not counted"
)
ENGINE_KNOBS = {
    "engine": Knob(
        default=OWN, means="what samples answers: transformers' `generate`, or vLLM on the same"
        " devices or elsewhere", values=(OWN, COLOCATE, SERVER),
    ),
    "vllm_gpu_memory_utilization": Knob(
        default=0.3, means="share of the device's memory that vLLM takes, its weights included"
    ),
    "vllm_enable_sleep_mode": Knob(
        default=False, means="between rollouts vLLM gives its weights and its cache back (level 2)"
    ),
    "vllm_tensor_parallel_size": Knob(default=1, means="devices that share vLLM's weights"),
    "vllm_max_model_length": Knob(
        default=0, means="tokens of vLLM's longest row; 0: as many as the model has positions"
    ),
    "vllm_importance_sampling_correction": Knob(
        default=True, means="tokens that vLLM sampled are scored by the trained model, too"
    ),
}  # fmt: skip


def engine_of(recipe: Recipe) -> str:
    """What samples answers."""
    return str(recipe.options["engine"])


def scores_sampled(recipe: Recipe) -> bool:
    """Whether TRL scores every rollout by the policy, as vLLM's own numbers differ."""
    corrects = bool(recipe.options["vllm_importance_sampling_correction"])
    return engine_of(recipe) != OWN and corrects


def hold_engine(job: Job) -> tuple[Held, Held]:
    """What vLLM holds while it samples, and at all other times."""
    recipe, memory = job.recipe, job.device.memory_driver or job.device.planned_memory
    if engine_of(recipe) != COLOCATE or memory is None:
        return {}, {}
    share = float(job.option("vllm_gpu_memory_utilization"))
    whole, weights = round(share * memory), _weights(job)
    held = {
        (Kind.PARAMETERS, ENGINE): (
            weights, f"vLLM's own weights of 16 bits: {show_bytes(weights)}",
        ),
        (Kind.KV_CACHE, ENGINE): (
            max(0, whole - weights),
            f"the rest of vLLM's share, {share:g} x {show_bytes(memory)} (documented)",
        ),
    }  # fmt: skip
    return held, {} if job.option("vllm_enable_sleep_mode") else held


def _weights(job: Job) -> int:
    ranks = int(job.option("vllm_tensor_parallel_size"))
    return sum(w.numel for w in job.model.weights) * NARROW // max(1, ranks)


def doubt_engine(recipe: Recipe) -> str:
    """Why what fits beside vLLM is not proven; "" where nothing but the trainer holds memory."""
    return DOUBT if engine_of(recipe) == COLOCATE else ""


def check_engine(job: Job) -> None:
    """Raise InvalidRequest for an engine that TRL or vLLM refuses to start."""
    recipe = job.recipe
    share, ranks = (
        job.option("vllm_gpu_memory_utilization"),
        job.option("vllm_tensor_parallel_size"),
    )
    if not 0 < float(share) <= 1:
        raise InvalidRequest(
            f"`options.vllm_gpu_memory_utilization: {share}` is no share of the device's memory",
            hint="use a number above 0 and at most 1, such as 0.3",
        )
    if int(ranks) < 1 or recipe.parallel.world % int(ranks):
        raise InvalidRequest(
            f"`options.vllm_tensor_parallel_size: {ranks}` does not divide the"
            f" {recipe.parallel.world} ranks, and TRL refuses it",
            hint="use a divisor of the number of ranks",
        )
    memory = job.device.memory_driver or job.device.planned_memory
    if engine_of(recipe) != COLOCATE or memory is None:
        return
    if recipe.base_format == "int8":
        raise InvalidRequest(
            "`base_format: int8` with `options.engine: vllm-colocate`: TRL refuses bitsandbytes' 8"
            " bits there",
            hint="use `base_format: nf4`, or `options.engine: transformers`",
        )
    _check_room(job, float(share) * memory, int(ranks))


def _check_room(job: Job, whole: float, ranks: int) -> None:
    """vLLM starts where its share has room for its weights and the keys of its longest row."""
    a, stated = job.model.architecture, int(job.option("vllm_max_model_length"))
    tokens = stated or a.max_sequence or job.recipe.rollout.width
    if stated and stated < job.recipe.rollout.width:
        raise InvalidRequest(
            f"`options.vllm_max_model_length: {stated}` is less than a prompt of"
            f" {job.recipe.rollout.max_prompt_length} and an answer of"
            f" {job.recipe.rollout.max_completion_length} tokens",
            hint=f"use {job.recipe.rollout.width}",
        )
    weights = _weights(job) if job.recipe.base_format != "nf4" else _weights(job) // 4
    row = cache_bytes(a, rows=1, tokens=tokens, dtype="bfloat16") // ranks
    if weights + row <= whole:
        return
    share = job.option("vllm_gpu_memory_utilization")
    raise InvalidRequest(
        f"vLLM does not start: its share ({share} of the device, {show_bytes(round(whole))}) has no"
        f" room for {show_bytes(weights)} of weights and {show_bytes(row)} of keys and values of"
        f" one row of {tokens:,} tokens",
        hint="raise `vllm_gpu_memory_utilization`, or set `vllm_max_model_length` to a prompt's and"
        f" an answer's tokens, {job.recipe.rollout.width}",
    )
