"""What Hugging Face's trainers share: the class's forward, its loss, peft's adapters, bnb's bases.

Source: transformers 5.23 (loss/loss_utils.py, integrations/bitsandbytes.py, trainer.py), peft 0.21
(tuners/lora/layer.py, utils/other.py: prepare_model_for_kbit_training), accelerate 1.15.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

from msgspec.structs import replace

from memfit import meta
from memfit.adapters import find_adapter
from memfit.base_formats import Product, find_base_format, is_quantised
from memfit.core.errors import InvalidRequest
from memfit.core.units import show_bytes
from memfit.families import find_family
from memfit.families.shared.forward import Embedded, Forward, Weights, bend_logits, project
from memfit.meta import Tensor
from memfit.meta.distributed.sharding import whole
from memfit.meta.layers.dequantised import QUANTISED_DTYPE, Dequantised
from memfit.meta.losses.cross_entropy import cross_entropy_sum
from memfit.meta.losses.fused import cut_loss, liger_loss, shift_labels
from memfit.meta.losses.tiled import log_probs_of_tokens, tiled_loss
from memfit.plan.frameworks import Framework, Job, Knob, Slack, TimeTraits
from memfit.plan.frameworks.hugging_face.engines import hold_engine
from memfit.plan.frameworks.hugging_face.kernels import LIGER_KNOBS, check_kernels, kernels_of
from memfit.plan.frameworks.hugging_face.masks import (
    MASK_KNOBS,
    check_masks,
    describe_masks,
    lay_out,
    masking_of,
)
from memfit.plan.frameworks.hugging_face.pairs import (
    COMPARES,
    LLAMA_FACTORY,
    TILED,
    Refer,
    check_compared,
    compare,
    hold_reference,
    second_dtype,
    whose,
)
from memfit.plan.frameworks.hugging_face.peft import (
    APART,
    COPIES,
    copied,
    copies_wide,
    refuse_apart,
)
from memfit.plan.frameworks.hugging_face.quantised import code_bytes, quantised_bytes
from memfit.plan.frameworks.hugging_face.sampled import (
    Rollout,
    check_rollouts,
    completion_of,
    hold_rollout,
    policy_loss,
    second_policy,
)
from memfit.plan.frameworks.hugging_face.states import (
    KNOBS,
    NAMES,
    check_optimizer,
    hold_states,
    hold_update,
)
from memfit.plan.frameworks.shared.assembly import (
    Held,
    Simulated,
    assemble,
    attention_kernel,
    cublas,
    ddp_buckets,
    owners,
    rounded,
    run_passes,
)
from memfit.plan.frameworks.shared.fsdp1 import shard_frozen
from memfit.plan.frameworks.shared.units import (
    asks_units,
    asks_version_2,
    check_units,
    predict_units,
    widened,
)
from memfit.plan.memory.host_memory import shards_on_host
from memfit.plan.memory.predicted_memory import without_shape
from memfit.records import Record
from memfit.records.ledger import Kind, Ledger
from memfit.records.model import DTYPE_BYTES, Model, Weight
from memfit.records.recipe import Recipe

ALL_LINEAR = "all-linear"  # peft's word for every projection but the head


class HfProgram(Record, frozen=True, kw_only=True):
    """The forward of Hugging Face's class with its own loss (ForCausalLMLoss)."""

    family: str
    computed: str  # dtype that quantised weights become dense in
    product: Product  # with quantised weights
    adapter_casts: bool
    keeps_inputs: bool  # whether products with quantised weights keep what they have read
    older: bool  # transformers 4.38: keys for all heads, and a loss over shifted fp32 logits
    keeps_outputs: bool  # whether the loop holds the class's outputs, with the logits, in backward
    tiled: bool = False  # whether TRL's own kernel makes the loss, from tiles of the logits
    liger: tuple[str, ...] = ()  # operations that are Liger-Kernel's
    loss_kind: str = "plain"  # chunked: Liger's; fused: cut cross-entropy
    compares: str = ""  # whose loss of pairs
    completion: int = 0  # tokens of a row that were sampled, and are learned from
    refers: bool = False  # whether the loss of sampled answers has a divergence from a reference
    widens: bool = False  # whether outputs are returned in fp32, as accelerate does of autocast's

    def _configure(self, forward: Forward) -> Forward:
        how = Dequantised(
            stored=self.computed, computed=self.computed, product=self.product,
            keeps_input=self.keeps_inputs,
        )  # fmt: skip
        return replace(
            forward, quantised=how, adapter_casts=self.adapter_casts, repeats_keys=self.older,
            liger=self.liger,
        )  # fmt: skip

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `plan.program.Program.embed`."""
        return find_family(self.family).embed(self._configure(forward), weights)

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `plan.program.Program.block`."""
        return find_family(self.family).block(self._configure(forward), weights, x, shared)

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `plan.program.Program.finish`."""
        return find_family(self.family).finish(self._configure(forward), weights, x)

    def loss(self, forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
        """Logits of all positions, upcast; labels, not logits, are shifted."""
        if self.loss_kind != "plain":
            return self._without_logits(weights, hidden, labels)
        if self.tiled:
            return tiled_loss(hidden, whole(weights["lm_head.weight"]), weights.get("lm_head.bias"))
        if self.older:
            return self._older_loss(forward, weights, hidden, labels)
        logits = self.logits(forward, weights, hidden)
        wide = meta.cast(logits, "float32")
        shifted = shift_labels(labels)
        flat = meta.view(wide, labels.numel, wide.shape[-1])
        if self.keeps_outputs:
            forward.loop["outputs"] = [logits.detached()]
        return meta.scale(cross_entropy_sum(flat, shifted))

    def _without_logits(self, weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
        """Losses that read the head's weight themselves."""
        head = weights["lm_head.weight"]
        flat = meta.view(hidden, labels.numel, hidden.shape[-1])
        if self.loss_kind == "fused":
            return meta.scale(cut_loss(flat, head, labels))
        return meta.scale(liger_loss(flat, head, shift_labels(labels)))

    def logits(self, forward: Forward, weights: Weights, hidden: Tensor) -> Tensor:
        """The head's, as `bend_logits` has them."""
        return bend_logits(forward.architecture, self._project_head(forward, weights, hidden))

    def _project_head(self, forward: Forward, weights: Weights, hidden: Tensor) -> Tensor:
        logits = project(self._configure(forward), weights, "lm_head", hidden)
        if forward.tail is not None:
            forward.tail.leave(logits)
        return logits

    def _older_loss(
        self, forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor
    ) -> Tensor:
        """The outputs hold the logits upcast, and a copy of them is shifted."""
        logits = self.logits(forward, weights, hidden)
        logits = meta.cast(logits, "float32")
        rows, tokens = labels.shape
        shifted_logits = meta.contiguous(meta.narrow(logits, 1, 0, tokens - 1))
        flat = meta.view(shifted_logits, rows * (tokens - 1), shifted_logits.shape[-1])
        if self.keeps_outputs:
            forward.loop["outputs"] = [logits.detached()]
        shifted = meta.empty(forward.meter, (rows, tokens - 1), "int64")
        return meta.scale(cross_entropy_sum(flat, shifted))

    def outputs(self, forward: Forward, weights: Weights, hidden: Tensor) -> list[Tensor]:
        """See `plan.program.Comparing.outputs`."""
        weight, bias = weights.get("lm_head.weight"), weights.get("lm_head.bias")
        if self.completion and weight is not None:
            return log_probs_of_tokens(hidden, weight, bias, self.completion)[:2]
        if self.compares == TILED and weight is not None:
            return log_probs_of_tokens(hidden, weight, bias)
        return [self.logits(forward, weights, hidden)]

    def returned(self, outputs: list[Tensor]) -> list[Tensor]:
        """See `plan.program.Comparing.returned`."""
        if not self.widens or self.completion or self.compares == TILED:
            return outputs
        return [meta.cast(outputs.pop(), "float32")]

    def compare(self, outputs: list[Tensor], refer: Refer) -> Tensor:
        """See `plan.program.Comparing.compare`."""
        if self.completion:
            return policy_loss(outputs, self.completion, refers=self.refers)
        return compare(outputs, refer, self.compares)


def hf_program(job: Job, *, keeps_outputs: bool) -> HfProgram:
    """The program of a job's recipe."""
    recipe = job.recipe
    compares = whose(job) if recipe.prefers else ""
    older = recipe.options.get("release") == "4.38"
    return HfProgram(
        family=job.model.architecture.family,
        computed=recipe.compute_dtype,
        product=find_base_format(recipe.base_format).product,
        adapter_casts=recipe.method == "lora",
        keeps_inputs=recipe.options.get("bitsandbytes") == "0.43",
        older=older,
        keeps_outputs=keeps_outputs,
        tiled=TILED in (recipe.options.get("version"), recipe.options.get("trl")),
        liger=kernels_of(recipe),
        loss_kind=recipe.loss,
        compares=compares,
        completion=completion_of(recipe),
        refers=recipe.samples and recipe.policy.beta > 0,
        widens=bool(
            recipe.autocast
            or older
            or compares == LLAMA_FACTORY
            or recipe.options.get("fp32_outputs")
        ),
    )


def hf_model(job: Job) -> Model:
    """The job's parameters as the trainer stores them: adapters of fp32, quantised projections."""
    return _adapted(job.model, without_passes(job.recipe))


def without_passes(recipe: Recipe) -> Recipe:
    """The same for every recipe that differs in its forward and backward alone.

    Weights, states and updates depend on none of that, so that candidates share them.
    """
    return replace(
        without_shape(recipe), accumulation=1, recompute_blocks=0, loss="plain", loss_chunk=0,
        attention="math",
    )  # fmt: skip


@lru_cache(maxsize=256)
def _adapted(model: Model, recipe: Recipe) -> Model:
    return _first_of_equal(_adapt(model, recipe))


@lru_cache(maxsize=64)
def _first_of_equal(model: Model) -> Model:
    """The first of equal models: one object compares at once, hundreds of weights do not."""
    return model


def _adapt(model: Model, recipe: Recipe) -> Model:
    if recipe.method != "lora":
        return find_adapter(recipe).adapt(model, recipe)
    quantised = is_quantised(recipe.base_format)
    changed = replace(recipe, lora=replace(recipe.lora, targets=targets_of(model, recipe)))
    if quantised:
        changed = replace(changed, base_format="bf16")
    adapted = find_adapter(changed).adapt(model, changed)
    rest = "float32" if recipe.options.get("prepare_kbit") else recipe.compute_dtype
    frozen = rest if quantised else recipe.frozen_dtype
    low = recipe.options["adapter_dtype"]
    if low == "auto":
        low = "base" if quantised else "fp32"
    own = "float32" if low == "fp32" else recipe.compute_dtype if quantised else frozen

    def store(w: Weight) -> Weight:
        if w.trainable:
            return replace(w, dtype=own)
        matrix = len(w.shape) == 2 and w.part == "block"
        return replace(w, dtype=QUANTISED_DTYPE if quantised and matrix else frozen)

    stored = replace(adapted, weights=tuple(map(store, adapted.weights)))
    return copied(stored, recipe, "float32" if copies_wide(recipe) else "")


def targets_of(model: Model, recipe: Recipe) -> tuple[str, ...]:
    """The adapted projections; `all-linear` written out."""
    if recipe.lora.targets != (ALL_LINEAR,):
        return recipe.lora.targets
    if model.architecture.experts.count:
        raise InvalidRequest(
            f"`lora.targets: {ALL_LINEAR}` of a mixture of experts (`{model.name}`) is not"
            " described",
            hint="name the projections, for example `targets: [q_proj, v_proj]`",
        )
    block = [w for w in model.weights if w.layer == 0 and len(w.shape) == 2]
    return tuple(dict.fromkeys(w.name.removesuffix(".weight").rpartition(".")[2] for w in block))


def parameter_bytes(recipe: Recipe, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one stored parameter."""
    if dtype != QUANTISED_DTYPE:
        return prod(shape) * DTYPE_BYTES[dtype]
    rows = shape[0], prod(shape[1:])
    return quantised_bytes(recipe.base_format, rows, double=_doubles(recipe))


def _doubles(recipe: Recipe) -> bool:
    """Whether scales are quantised, too."""
    return bool(recipe.options["double_quantisation"])


@lru_cache(maxsize=256)
def hold_parameters(model: Model, recipe: Recipe, ranks: int = 1) -> Held:
    """Parameters by component."""
    held: dict[tuple[Kind, str], tuple[int, str]] = {}
    for owner, each in owners(model, lambda d, s: parameter_bytes(recipe, d, s) // ranks).items():
        dtypes = {w.dtype for w in model.weights if _owner(w) == owner}
        names = sorted(recipe.base_format if d == QUANTISED_DTYPE else d for d in dtypes)
        reason = f"{len(each)} tensors, {' and '.join(names)}: {show_bytes(sum(each))}"
        held[Kind.PARAMETERS, owner] = (rounded(each), reason)
    buffers = [spec.nbytes for spec in find_family(model.architecture.family).buffers(
        model.architecture
    )]  # fmt: skip
    held[Kind.PARAMETERS, "rotary"] = (sum(buffers), "buffers of the class, on every rank")
    return held


def _owner(w: Weight) -> str:
    return "blocks" if w.part == "block" else w.part


def hf_knobs() -> dict[str, Knob]:
    """What the Trainer and those built on it have of their own."""
    return {
        "adapter_dtype": Knob(
            default="fp32", means="dtype of adapters: peft casts those of a 16-bit base to fp32",
            values=("fp32", "base"),
        ),
        "double_quantisation": Knob(default=False, means="bnb_4bit_use_double_quant"),
        "prepare_kbit": Knob(
            default=True, means="prepare_model_for_kbit_training: what is not quantised is fp32"
        ),
        "reentrant": Knob(
            default=False, means="of recomputed blocks: use_reentrant, transformers 4's default"
        ),
        "keeps_outputs": Knob(
            default=False, means="the loop holds the model's outputs in backward, as own loops do"
        ),
        "fsdp_version": Knob(
            default=1, means="accelerate's: 1 flattens a unit's weights, 2 cuts each", values=(1, 2)
        ),
        "release": Knob(
            default="5", means="whose class: 4.38 makes keys for all heads, and shifts fp32 logits",
            values=("5", "4.38"),
        ),
        "bitsandbytes": Knob(
            default="0.50", means="0.43 keeps what products with quantised weights have read",
            values=("0.50", "0.43"),
        ),
        **KNOBS,
        **MASK_KNOBS,
        **LIGER_KNOBS,
        **COMPARES,
        **APART,
        **COPIES,
    }  # fmt: skip


def predict_hf(job: Job) -> Ledger:
    """The Trainer's step: its own passes, states and update, and DDP's buckets."""
    job = lay_out(job)
    recipe, device = job.recipe, job.device
    model = hf_model(job)
    kernel, masking = attention_kernel(job), masking_of(job)
    program = hf_program(job, keeps_outputs=bool(recipe.options["keeps_outputs"]))
    fixed = without_passes(recipe)
    compares = program if recipe.prefers or recipe.samples else None
    if asks_units(job):
        return predict_units(
            job, model, program, kernel,
            weights=lambda local: hold_parameters(local, fixed),
            states=lambda local: hold_states(local, fixed),
            update=lambda local: hold_update(local, fixed),
            compares=compares, masking=masking,
        )  # fmt: skip
    simulated = run_passes(
        job, model, program, kernel, compares=compares,
        second=second_dtype(job) or second_policy(recipe),
        caches=recipe.parallel.dp_shard == 1, masking=masking,
    )  # fmt: skip
    if recipe.parallel.dp_shard > 1:
        return _sharded(job, model, simulated)
    weights = {**hold_parameters(model, fixed), **hold_reference(job, model)}
    held = {**weights, **hold_states(model, fixed), **cublas(device)}
    if recipe.parallel.dp_replicate > 1:
        held |= ddp_buckets(model)
    update = hold_update(model, fixed)
    if not recipe.samples:
        return assemble(job, simulated, load=weights, held=held, update=update)
    rollout = Rollout(job, model, simulated.setting, simulated.counts)
    held |= hold_engine(job)[1]
    return assemble(
        job, simulated, load=weights, held={**held, **hold_rollout(recipe)}, update=update,
        before=rollout.walk, reasons=rollout.explain(),
    )  # fmt: skip


def _sharded(job: Job, model: Model, simulated: Simulated) -> Ledger:
    """FSDP1 with adapters: trained matrices beside frozen ones have units of their own."""
    recipe, ranks = job.recipe, job.recipe.parallel.dp_shard
    fixed = without_passes(recipe)
    cut = {
        key: (nbytes // ranks, f"1/{ranks} of {because}")
        for key, (nbytes, because) in hold_states(model, fixed).items()
    }
    update = {
        key: (nbytes // ranks, f"1/{ranks} of {because}")
        for key, (nbytes, because) in hold_update(model, fixed).items()
    }
    whole = hold_scales(model, recipe)
    stored = [(w, _parameter(recipe, w)) for w in model.weights]
    return shard_frozen(job, stored, simulated, whole, cut, update)


def _parameter(recipe: Recipe, w: Weight) -> int:
    """Bytes that FSDP cuts: of codes that it cuts as numbers, without their scales."""
    if w.dtype == QUANTISED_DTYPE and find_base_format(recipe.base_format).cut_as_numbers:
        return code_bytes(recipe.base_format, w.shape)
    return parameter_bytes(recipe, w.dtype, w.shape)


def hold_scales(model: Model, recipe: Recipe) -> Held:
    """Scales of quantised weights are no parameters: every rank keeps all of them."""
    quantised = [w for w in model.weights if w.dtype == QUANTISED_DTYPE]
    if not quantised or not find_base_format(recipe.base_format).cut_as_numbers:
        return {}
    nbytes = sum(
        parameter_bytes(recipe, w.dtype, w.shape) - code_bytes(recipe.base_format, w.shape)
        for w in quantised
    )
    reason = f"scales of {len(quantised)} quantised weights, whole on every rank"
    return {(Kind.PARAMETERS, "scales"): (nbytes, reason)}


def check_quantised(job: Job) -> None:
    """Raise InvalidRequest for quantised weights that are not described, or cannot be trained."""
    refuse_apart(job)
    check_masks(job)
    recipe, a = job.recipe, job.model.architecture
    if not is_quantised(recipe.base_format):
        return
    if a.experts.count or a.family == "gpt2":
        what = "a mixture of experts" if a.experts.count else "transposed weights (Conv1D)"
        raise InvalidRequest(
            f"`base_format: {recipe.base_format}` of {what} (`{job.model.name}`) is not described",
            hint="`base_format: bf16`",
        )
    if recipe.method == "full":
        raise InvalidRequest(
            f"`method: full` cannot train weights stored as `base_format: {recipe.base_format}`",
            hint="`method: lora`",
        )


def check_base(job: Job) -> None:
    """Raise InvalidRequest for what the Trainer has, and this file does not describe."""
    check_quantised(job)
    check_optimizer(job)
    check_kernels(job)
    check_compared(job)
    check_rollouts(job)
    recipe = job.recipe
    shards, copies = recipe.parallel.dp_shard, recipe.parallel.dp_replicate
    if shards > 1 and copies > 1:
        raise InvalidRequest(
            f"`parallel.dp_shard: {shards}` with `dp_replicate: {copies}` is not described",
            hint="one of both",
        )
    if shards > 1:
        _check_zero(recipe)
    if asks_version_2(job):
        check_units(job)
        return
    if shards > 1 and not find_base_format(recipe.base_format).cut_as_numbers:
        raise InvalidRequest(
            f"`base_format: {recipe.base_format}` with `parallel.dp_shard: {shards}`: FSDP flattens"
            " no integers",
            hint="`base_format: nf4`, or `parallel: {dp_replicate: N}`",
        )
    if recipe.offload != "none" and shards == 1:
        raise InvalidRequest("`offload: parameters` is FSDP's", hint="`parallel: {dp_shard: N}`")


def _check_zero(recipe: Recipe) -> None:
    """FSDP cuts weights, gradients and states; whole weights may stay after the forward."""
    zero = recipe.parallel.zero
    if zero == 1:
        raise InvalidRequest(
            "`parallel.zero: 1` is none of FSDP's strategies",
            hint="`zero: 2` (SHARD_GRAD_OP) or 3 (FULL_SHARD)",
        )
    if zero == 2 and recipe.method != "full":
        raise InvalidRequest(
            f"`parallel.zero: 2` (FSDP's SHARD_GRAD_OP) with `method: {recipe.method}` is not"
            " described",
            hint="`zero: 3` (FULL_SHARD)",
        )


def shared_values() -> dict[str, Any]:
    """What the trainers over Hugging Face's classes have of the shared knobs."""
    return {
        "precision": ("bf16-mixed", "bf16", "fp32", "fp16-mixed"),
        "method": ("full", "lora"),
        "base_format": ("bf16", "fp16", "fp32", "nf4", "fp4", "int8", "int4"),
        "optimizer": NAMES,
        "implementation": ("fused", "foreach", "loop"),
        "recompute": ("none", "full"),
        "attention": ("flash", "efficient", "math"),
        "loss": ("plain", "chunked", "fused"),
        "compile": ("none",),
        "offload": ("none",),
    }


class HfFramework(Framework):
    """transformers' Trainer and what is built on it; accelerate shares a model's ranks."""

    time = TimeTraits(narrow_gradients=True)
    axes = ("dp_replicate", "dp_shard", "zero")
    pairs = True
    slack = Slack(
        low=1.0, typical=1.04, high=1.12,
        source="bench/certify.py's replays of the allocator over steps without recompute",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """See `Framework.check`."""
        check_base(job)

    def describe_open(self, recipe: Recipe) -> tuple[str, ...]:
        """See `Framework.describe_open`."""
        return describe_masks(recipe)

    def on_host(self, job: Job) -> int:
        """See `Framework.on_host`: shards of FSDP, as they are stored."""
        return shards_on_host(job.recipe, widened(job.recipe, hf_model(job)))

    def predict(self, job: Job) -> Ledger:
        """See `Framework.predict`."""
        return predict_hf(job)
