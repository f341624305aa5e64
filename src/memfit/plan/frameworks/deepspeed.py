"""A step of Hugging Face's class under DeepSpeed's ZeRO (Rajbhandari et al. 1910.02054).

Source: deepspeed 0.14.4, runtime/zero/stage3.py, stage_1_and_2.py and config.py; runtime/engine.py.
The module runs in 16 bits without autocast; its optimizer keeps fp32 copies of a rank's share.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar, final

from msgspec.structs import replace

from memfit.base_formats import find_base_format, is_quantised
from memfit.core.errors import InvalidRequest
from memfit.core.units import show_bytes, show_count
from memfit.plan.frameworks import Framework, Job, Knob, Slack, TimeTraits, frameworks
from memfit.plan.frameworks.hugging_face.kernels import LIGER_KNOBS, check_kernels
from memfit.plan.frameworks.hugging_face.masks import (
    MASK_KNOBS,
    describe_masks,
    lay_out,
    masking_of,
)
from memfit.plan.frameworks.hugging_face.pairs import TILED
from memfit.plan.frameworks.hugging_face.peft import APART
from memfit.plan.frameworks.hugging_face.states import (
    KNOBS,
    by_bitsandbytes,
    check_counted,
    check_optimizer,
    hold_flat_states,
)
from memfit.plan.frameworks.hugging_face.step import (
    check_quantised,
    hf_knobs,
    hf_model,
    hf_program,
    hold_parameters,
    parameter_bytes,
    shared_values,
)
from memfit.plan.frameworks.shared.assembly import (
    GRADIENTS,
    Held,
    Simulated,
    assemble,
    attention_kernel,
    cublas,
    run_passes,
    without,
)
from memfit.plan.memory.predicted_memory import without_shape
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.model import Model
from memfit.records.recipe import Recipe
from memfit.records.request import Request

LOW, FP32 = 2, 4  # bytes of an element
AUTO = "0 is a file's `auto`, of which transformers makes hidden_size squared"
SQUARED = {"reduce_bucket_size": 1.0, "prefetch_bucket_size": 0.9}  # integrations/deepspeed.py
KEY = (GRADIENTS, "partition")


@final
class DeepSpeed(Framework):
    """Ranks that share states (stage 1), gradients too (2), or weights too (3)."""

    name = "deepspeed"
    time = TimeTraits(narrow_gradients=True)
    title = "a step of Hugging Face's class under DeepSpeed's ZeRO"
    source = (
        "deepspeed 0.14.4 (offloading: 0.19.8), transformers 5.23, peft 0.21, bitsandbytes 0.50"
    )
    values: ClassVar = shared_values() | {
        "precision": ("bf16-mixed", "fp16-mixed"),
        "optimizer": ("adamw", "adamw8bit"),
        "implementation": ("fused", "foreach"),
        "offload": ("none", "optimizer", "parameters"),
    }
    axes = ("dp_shard", "zero")
    zeros = (1, 2, 3)
    knobs: ClassVar = {
        "double_quantisation": Knob(default=False, means="bnb_4bit_use_double_quant"),
        "reduce_bucket_size": Knob(
            default=500_000_000, means=f"elements of the reduction's bucket; {AUTO}"
        ),
        "allgather_bucket_size": Knob(
            default=500_000_000, means="elements gathered at once after a step, stages 1 and 2"
        ),
        "overlap_comm": Knob(
            default=False, means="two buckets in turns, stages 1 and 2: one fills, one is reduced"
        ),
        "prefetch_bucket_size": Knob(
            default=50_000_000, means=f"elements gathered ahead, stage 3; {AUTO}, of it 0.9"
        ),
        "max_live_parameters": Knob(
            default=1_000_000_000, means="gathered elements that are not given up, stage 3"
        ),
        "sub_group_size": Knob(
            default=1_000_000_000, means="elements of a share that are updated at once, stage 3"
        ),
        "trl": Knob(
            default="", means="TRL's version, where its loss of tiles is in the class's place",
            values=("", TILED),
        ),
        **{name: hf_knobs()[name] for name in ("keeps_outputs", "release", "reentrant")},
        **MASK_KNOBS,
        **KNOBS,
        **LIGER_KNOBS,
        **APART,
    }  # fmt: skip
    slack = Slack(
        low=1.0, typical=1.03, high=1.25,
        source="bench/zero3_streams.py's replays of stage 3 (1.00 to 1.07); assumed of 1 and 2",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """See `Framework.check`."""
        check_quantised(job)
        check_kernels(job)
        check_optimizer(job)
        recipe = job.recipe
        if by_bitsandbytes(recipe) and recipe.offload == "none":
            shares = _shares(_stored(job), without_shape(recipe))
            check_counted(recipe, max(shares.flat()))
        elif recipe.optimizer.name == "adamw8bit" and recipe.options.get("adamw8bit") == "torchao":
            raise InvalidRequest(
                "`options.adamw8bit: torchao` under ZeRO is not described",
                hint="`options.adamw8bit: bitsandbytes`",
            )
        if recipe.offload == "parameters" and recipe.parallel.zero != 3:
            raise InvalidRequest(
                f"`offload: parameters` with `parallel.zero: {recipe.parallel.zero}`: stage 3 alone"
                " has weights elsewhere",
                hint="`parallel: {zero: 3}`, or `offload: optimizer`",
            )
        if not _can_cut(recipe.base_format) and recipe.parallel.zero == 3:
            raise InvalidRequest(
                f"`base_format: {recipe.base_format}` cannot be partitioned (`parallel.zero: 3`):"
                " its weights keep their scales outside the tensor",
                hint="`parallel: {zero: 2}`, or `base_format: nf4`",
            )

    def choose_zeros(self, request: Request) -> tuple[int, ...]:
        """See `Framework.choose_zeros`; stage 3 cannot cut every format."""
        return super().choose_zeros(request) if _can_cut(request.base_format) else (2, 1)

    def describe_open(self, recipe: Recipe) -> tuple[str, ...]:
        """See `Framework.describe_open`."""
        return describe_masks(recipe)

    def waiting(self, job: Job) -> tuple[int, str]:
        """Stage 3: released weights that queued products still read, and the update's blocks.

        Weights are gathered on a stream of their own (`overlap_comm`, stage 3's default), whose
        blocks torch's allocator reuses once the stream of the products has passed the point where
        they were released (`record_stream`). In a forward the host waits for gathers alone, not for
        products, so that it may be a whole forward ahead: all weights but those that stay gathered.
        In a backward each third reduction is waited for. The update joins the share's gradients and
        widens them: two blocks so large that none of the activations' serves them. Replayed by
        bench/zero3_streams.py; of adapters' steps no run shows it. Weights that come from the host
        are taken to come later than products end, which then never queue.
        """
        if job.recipe.method != "full" or job.recipe.offload == "parameters":
            return 0, ""
        return _shares(_stored(job), without_shape(job.recipe)).waiting()

    def on_host(self, job: Job) -> int:
        """See `Framework.on_host`: master weights, moments and gradients in fp32, and weights.

        Source: estimate_zero2_ and estimate_zero3_model_states_mem_needs, without their factor.
        """
        return _shares(_stored(job), without_shape(job.recipe)).elsewhere()

    def predict(self, job: Job) -> Ledger:
        """See `Framework.predict`."""
        job = lay_out(job)
        model = _stored(job)
        pure = replace(job, recipe=replace(job.recipe, precision=_pure(job.recipe)))
        program = hf_program(pure, keeps_outputs=bool(job.option("keeps_outputs")))
        simulated = run_passes(
            pure, model, program, attention_kernel(job), masking=masking_of(pure)
        )
        simulated = Simulated(
            without(simulated.first, GRADIENTS),
            None if simulated.later is None else without(simulated.later, GRADIENTS),
            simulated.counts,
            simulated.setting,
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
        self.on_host = recipe.offload != "none"
        self.far = recipe.offload == "parameters"  # weights are on the host, too
        self.trained = sum(w.numel for w in model.weights if w.trainable)
        self.share = -(-self.trained // self.ranks)
        self.every = sum(parameter_bytes(recipe, w.dtype, w.shape) for w in model.weights)

    def option(self, name: str) -> int:
        """A knob; a size of `auto` by the hidden size."""
        if size := int(self.recipe.options[name]):
            return size
        return int(SQUARED.get(name, 0) * self.model.architecture.hidden**2)

    def parameters(self) -> Held:
        """A rank's share in stage 3; of weights on the host, the class's buffers alone."""
        model = replace(self.model, weights=()) if self.far else self.model
        return hold_parameters(model, self.recipe, self.ranks if self.stage == 3 else 1)

    def states(self) -> Held:
        """Master weights and both moments of the share, in fp32; stage 3's flat buffers beside."""
        if self.on_host:
            return self._beside_host()
        count = show_count(self.share)
        held: dict[tuple[Kind, str], tuple[int, str]] = {
            (Kind.OPTIMIZER_STATE, "master"): (
                FP32 * self.share, f"fp32 copies of 1/{self.ranks}: {count} x 4 B",
            ),
            **self._moments(count),
        }  # fmt: skip
        if self.stage == 3:
            held[KEY] = (LOW * self.share, f"16-bit gradients of {count} parameters, always there")
            held[Kind.REDUCE_SCATTER, "bucket"] = self._bucket()
        return held

    def _moments(self, count: str) -> Held:
        if not by_bitsandbytes(self.recipe):
            reason = f"two fp32 moments of {count} parameters"
            return {(Kind.OPTIMIZER_STATE, "optimizer"): (2 * FP32 * self.share, reason)}
        return hold_flat_states(self.flat(), self.recipe)

    def flat(self) -> tuple[int, ...]:
        """Return elements of the optimizer's flat tensors: the share of each group.

        transformers groups what it decays, matrices, apart from the rest. Stage 3 cuts each weight,
        and ends a tensor with the first weight that makes it as large as `sub_group_size` or larger
        (stage3.py, `_create_fp16_sub_groups`).
        """
        groups: list[list[int]] = [[], []]
        for w in self.model.weights:
            if w.trainable:
                groups[len(w.shape) > 1].append(w.numel)
        if self.stage < 3:
            return tuple(-(-sum(group) // self.ranks) for group in groups if group)
        found: list[int] = []
        for group in groups:
            held = 0
            for numel in group:
                held += -(-numel // self.ranks)
                if held >= self.option("sub_group_size"):
                    found.append(held)
                    held = 0
            found += [held] if held else []
        return tuple(found)

    def _beside_host(self) -> Held:
        """What stays on the device where the host updates (ZeRO-Offload): buffers of gradients."""
        if self.stage == 3:
            return {(Kind.REDUCE_SCATTER, "bucket"): self._bucket()}
        return {(Kind.GRADIENTS, "on their way"): (self._largest(), "16 bits, the largest one")}

    def _largest(self) -> int:
        return LOW * max(w.numel for w in self.model.weights if w.trainable)

    def _bucket(self) -> tuple[int, str]:
        """Reserve the configured bucket size, however little is trained (`setup_buckets`)."""
        elements = self.option("reduce_bucket_size")
        if self.stage < 3 and self.recipe.options["overlap_comm"]:
            reason = f"two buckets of {show_count(elements)} 16-bit gradients each (overlap_comm)"
            return 2 * LOW * elements, reason
        return LOW * elements, f"bucket of {show_count(elements)} 16-bit gradients"

    def gradients(self) -> Held:
        """Averaged 16-bit gradients: whole in stage 1, of the share in stage 2.

        Those of the share go to the host bucket by bucket; stage 1 keeps the others'.
        """
        if self.stage == 3 or (self.on_host and self.stage == 2):
            return {}
        count = self.trained if self.stage == 1 else self.share
        return {KEY: (LOW * count, f"16-bit gradients of {show_count(count)} parameters")}

    def buckets(self) -> Held:
        if self.stage == 3:
            reason = "the largest gradient before its reduction"
            return {(Kind.GRADIENTS, "whole"): (self._largest(), reason)}
        return {(Kind.REDUCE_SCATTER, "bucket"): self._bucket()}

    def gathered(self) -> Held:
        """Stage 3: weights that stay gathered up to a limit, and those that are fetched ahead."""
        if not self._gathers():
            return {}
        most = LOW * max(w.numel for w in self.model.weights)  # a product's own, past any limit
        limit = LOW * self.option("max_live_parameters")
        live = min(max(limit, most), self.every)
        ahead = min(LOW * self.option("prefetch_bucket_size"), limit, self.every - live)
        reason = f"gathered weights: {show_bytes(live)} kept, {show_bytes(ahead)} fetched ahead"
        held = {(Kind.ALL_GATHER, "weights"): (live + ahead, reason)}
        if self.far and self.ranks > 1:
            share = -(-max(ahead, most) // self.ranks)
            reason = "a rank's share from the host, while it is gathered"
            held[Kind.ALL_GATHER, "from the host"] = (share, reason)
        return held

    def elsewhere(self) -> int:
        """See `DeepSpeed.on_host`."""
        states = 4 * FP32 * self.trained if self.on_host else 0
        return states + (self.every if self.far else 0)

    def waiting(self) -> tuple[int, str]:
        """See `DeepSpeed.waiting`."""
        if self.stage != 3:
            return 0, ""
        update = 0 if self.on_host else (FP32 + LOW) * self._at_once()
        live = sum(nbytes for nbytes, _ in self.gathered().values())
        unread = max(0, self.every - live) if self._gathers() else 0
        return unread + update, "gathered weights that queued products read, and the update's"

    def _gathers(self) -> bool:
        """A rank alone takes its weights where they are, unless that is on the host
        (`_no_gather_coalesced`)."""
        return self.stage == 3 and (self.ranks > 1 or self.far)

    def _at_once(self) -> int:
        """Elements of the share in one group of stage 3; its tensors are cut (`ds_tensor`)."""
        if self.stage < 3:
            return self.share
        least = -(-self._largest() // (LOW * self.ranks))  # a weight is in one group
        return min(self.share, max(least, self.option("sub_group_size")))

    def update(self) -> Held:
        """fp32 gradients of what is updated at once, joined from 16-bit ones; then the gather."""
        at_once = 0 if self.on_host else self._at_once()
        wide = (FP32 + LOW) * at_once
        gather = 0
        if self.stage < 3:
            gather = LOW * min(self.option("allgather_bucket_size"), self.trained)
        reason = f"gradients of {show_count(at_once)} parameters in fp32, beside 16-bit ones"
        if self.on_host:
            reason = "the host updates; weights are gathered again in buckets"
        return {(Kind.TEMPORARY, "optimizer"): (max(wide, gather), reason)}

    def made(self) -> Held:
        """The first states, from zeroed gradients of what is updated at once."""
        count = 0 if self.on_host else self._at_once()
        reason = f"fp32 zeros for {show_count(count)} gradients, while states are made"
        return {(Kind.TEMPORARY, "optimizer"): (FP32 * count, reason)}


@lru_cache(maxsize=256)
def _shares(model: Model, recipe: Recipe) -> _Shares:
    return _Shares(model, recipe)


def _stored(job: Job) -> Model:
    """All weights in 16 bits, adapters too: the engine casts the module."""
    options = {**job.recipe.options, "adapter_dtype": "base", "prepare_kbit": False}
    recipe = replace(job.recipe, precision=_pure(job.recipe), options=options)
    if not is_quantised(recipe.base_format):
        recipe = replace(recipe, base_format="fp16" if recipe.precision == "fp16" else "bf16")
    return hf_model(replace(job, recipe=recipe))


def _can_cut(base_format: str) -> bool:
    """Whether stage 3 can partition weights of a format."""
    return base_format == "auto" or find_base_format(base_format).cut_as_numbers


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
