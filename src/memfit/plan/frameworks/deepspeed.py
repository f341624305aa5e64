"""A step of Hugging Face's class under DeepSpeed's ZeRO (Rajbhandari et al. 1910.02054).

Source: deepspeed 0.14.4, runtime/zero/stage3.py, stage_1_and_2.py and config.py; runtime/engine.py.
The module runs in 16 bits without autocast; its optimizer keeps fp32 copies of a rank's share.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar, final

from msgspec.structs import replace

from memfit.errors import InvalidRequest
from memfit.ledger import Entry, Kind, Ledger, Phase
from memfit.model import Model
from memfit.plan.frameworks import Framework, Job, Knob, Slack, frameworks
from memfit.plan.frameworks._assembly import (
    GRADIENTS,
    Held,
    Simulated,
    assemble,
    attention_kernel,
    cublas,
    run_passes,
    without,
)
from memfit.plan.frameworks._hf import (
    check_coded,
    hf_model,
    hf_program,
    hold_parameters,
    parameter_bytes,
    shared_values,
)
from memfit.plan.frameworks._peft import APART
from memfit.plan.memory import without_shape
from memfit.recipe import Recipe
from memfit.units import show_bytes, show_count

LOW, FP32 = 2, 4  # bytes of an element
KEY = (GRADIENTS, "partition")


@final
class DeepSpeed(Framework):
    """Ranks that share states (stage 1), gradients too (2), or weights too (3)."""

    name = "deepspeed"
    title = "a step of Hugging Face's class under DeepSpeed's ZeRO"
    source = "deepspeed 0.14.4, transformers 5.23, peft 0.21, bitsandbytes 0.50"
    values: ClassVar = shared_values() | {
        "precision": ("bf16-mixed", "fp16-mixed"),
        "optimizer": ("adamw",),
        "implementation": ("fused", "foreach"),
    }
    axes = ("dp_shard", "zero")
    zeros = (1, 2, 3)
    knobs: ClassVar = {
        "double_quantisation": Knob(default=False, means="bnb_4bit_use_double_quant"),
        "reduce_bucket_size": Knob(default=500_000_000, means="elements of the reduction's bucket"),
        "allgather_bucket_size": Knob(
            default=500_000_000, means="elements gathered at once after a step, stages 1 and 2"
        ),
        "prefetch_bucket_size": Knob(default=50_000_000, means="elements gathered ahead, stage 3"),
        "max_live_parameters": Knob(
            default=1_000_000_000, means="gathered elements that are not given up, stage 3"
        ),
        "sub_group_size": Knob(
            default=1_000_000_000, means="elements of a share that are updated at once, stage 3"
        ),
        **APART,
    }  # fmt: skip
    slack = Slack(
        low=1.0, typical=1.06, high=1.25,
        source="assumed: buckets and gathered weights of many sizes; no run of our own",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """See `Framework.check`."""
        check_coded(job)
        recipe = job.recipe
        if recipe.base_format == "int8" and recipe.parallel.zero == 3:
            raise InvalidRequest(
                "`base_format: int8` cannot be partitioned (`parallel.zero: 3`): its weights keep"
                " their scales outside the tensor",
                hint="`parallel: {zero: 2}`, or `base_format: nf4`",
            )

    def predict(self, job: Job) -> Ledger:
        """See `Framework.predict`."""
        model = _stored(job)
        told = replace(job, recipe=replace(job.recipe, precision=_pure(job.recipe)))
        program = hf_program(told, keeps_outputs=False)
        simulated = run_passes(told, model, program, attention_kernel(job))
        simulated = Simulated(
            without(simulated.first, GRADIENTS),
            None if simulated.later is None else without(simulated.later, GRADIENTS),
            simulated.counts,
        )
        shares = _shares(model, without_shape(job.recipe))
        held = {**shares.parameters(), **shares.states(), **cublas(job.device)}
        passing = {**shares.gathered(), **shares.buckets()}
        during: Mapping[Phase, Held] = {
            Phase.FORWARD: shares.gathered(), Phase.LOSS: shares.gathered(),
            Phase.BACKWARD: {**passing, **shares.gradients()},
            Phase.ACCUMULATE: {**passing, **shares.gradients()},
        }  # fmt: skip
        update = {**shares.gradients(), **shares.update()}
        ledger = assemble(
            job, simulated, load=shares.parameters(), held=held, update=update, during=during
        )
        return _with(ledger, Phase.FIRST_STEP, {**held, **shares.made()})


class _Shares:
    """What one of the ranks holds."""

    def __init__(self, model: Model, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.ranks, self.stage = recipe.parallel.dp_shard, recipe.parallel.zero
        self.trained = sum(w.numel for w in model.weights if w.trainable)
        self.share = -(-self.trained // self.ranks)
        self.every = sum(parameter_bytes(recipe, w.dtype, w.shape) for w in model.weights)

    def option(self, name: str) -> int:
        return int(self.recipe.options[name])

    def parameters(self) -> Held:
        return hold_parameters(self.model, self.recipe, self.ranks if self.stage == 3 else 1)

    def states(self) -> Held:
        """Master weights and both moments of the share, in fp32; stage 3's flat buffers beside."""
        count = show_count(self.share)
        held: dict[tuple[Kind, str], tuple[int, str]] = {
            (Kind.OPTIMIZER_STATE, "master"): (
                FP32 * self.share, f"fp32 copies of 1/{self.ranks}: {count} x 4 B",
            ),
            (Kind.OPTIMIZER_STATE, "optimizer"): (
                2 * FP32 * self.share, f"two fp32 moments of {count} parameters",
            ),
        }  # fmt: skip
        if self.stage == 3:
            held[KEY] = (LOW * self.share, f"16-bit gradients of {count} parameters, always there")
            held[Kind.REDUCE_SCATTER, "bucket"] = self._bucket()
        return held

    def _bucket(self) -> tuple[int, str]:
        elements = min(self.option("reduce_bucket_size"), self.trained)
        return LOW * elements, f"bucket of {show_count(elements)} 16-bit gradients"

    def gradients(self) -> Held:
        """Averaged 16-bit gradients: whole in stage 1, of the share in stage 2."""
        if self.stage == 3:
            return {}
        count = self.trained if self.stage == 1 else self.share
        return {KEY: (LOW * count, f"16-bit gradients of {show_count(count)} parameters")}

    def buckets(self) -> Held:
        if self.stage == 3:
            one = LOW * max(w.numel for w in self.model.weights if w.trainable)
            return {(Kind.GRADIENTS, "whole"): (one, "the largest gradient before its reduction")}
        return {(Kind.REDUCE_SCATTER, "bucket"): self._bucket()}

    def gathered(self) -> Held:
        """Stage 3: weights that stay gathered up to a limit, and those that are fetched ahead."""
        if self.stage != 3:
            return {}
        live = min(LOW * self.option("max_live_parameters"), self.every)
        ahead = min(LOW * self.option("prefetch_bucket_size"), self.every - live)
        said = f"gathered weights: {show_bytes(live)} kept, {show_bytes(ahead)} fetched ahead"
        return {(Kind.ALL_GATHER, "weights"): (live + ahead, said)}

    def update(self) -> Held:
        """fp32 gradients of what is updated at once, joined from 16-bit ones; then the gather."""
        at_once = min(self.share, self.option("sub_group_size")) if self.stage == 3 else self.share
        wide = (FP32 + LOW) * at_once
        gather = 0
        if self.stage < 3:
            gather = LOW * min(self.option("allgather_bucket_size"), self.trained)
        said = f"gradients of {show_count(at_once)} parameters in fp32, beside 16-bit ones"
        return {(Kind.TEMPORARY, "optimizer"): (max(wide, gather), said)}

    def made(self) -> Held:
        """The first states: stage 3 zeroes a gradient for whole parameters, not for shares."""
        count = self.share
        if self.stage == 3:
            count = min(self.trained, self.option("sub_group_size") * self.ranks)
        said = f"fp32 zeros for {show_count(count)} gradients, while states are made"
        return {(Kind.TEMPORARY, "optimizer"): (FP32 * count, said)}


@lru_cache(maxsize=256)
def _shares(model: Model, recipe: Recipe) -> _Shares:
    return _Shares(model, recipe)


def _stored(job: Job) -> Model:
    """All weights in 16 bits, adapters too: the engine casts the module."""
    options = {**job.recipe.options, "adapter_dtype": "base", "prepare_kbit": False}
    recipe = replace(job.recipe, precision=_pure(job.recipe), options=options)
    if recipe.base_format not in ("nf4", "fp4", "int8"):
        recipe = replace(recipe, base_format="fp16" if recipe.precision == "fp16" else "bf16")
    return hf_model(replace(job, recipe=recipe))


def _pure(recipe: Recipe) -> str:
    return "fp16" if recipe.precision == "fp16-mixed" else "bf16"


def _with(ledger: Ledger, phase: Phase, held: Held) -> Ledger:
    rows = tuple(
        Entry(kind=kind, phase=phase, owner=owner, nbytes=nbytes, because=because)
        for (kind, owner), (nbytes, because) in held.items()
        if nbytes
    )
    return Ledger(entries=ledger.entries + rows)


frameworks.register("deepspeed")(DeepSpeed())
