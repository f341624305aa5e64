"""From a request to what a search starts from: model, device, limit, and the open knobs."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import msgspec

from memfit import catalog, families
from memfit.adapters.shared.projections import choose_targets
from memfit.adapters.shared.quantised_base import check_base
from memfit.adapters.shared.stored import check_stored, is_stored
from memfit.allocator.heap import KEEPING, keeps_freed
from memfit.allocator.settings import check_allocator
from memfit.base_formats import find_base_format
from memfit.catalog import links
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import read_cudnn
from memfit.families.capabilities import float8, qat
from memfit.families.capabilities.compiled import check_compiled, settle_compiled
from memfit.families.capabilities.lean import check_lean
from memfit.families.capabilities.limits import check_limits, choose_packing, own_kernels
from memfit.meta.attending.kernels import OLDEST_CUDNN, Heads, heads_of, refusal, usable
from memfit.objectives import find_objective
from memfit.optimizers import default_implementation, optimizers
from memfit.optimizers.low_bit import can_round, check_rounding
from memfit.optimizers.shared.groups import check_layer_decay
from memfit.optimizers.shared.in_backward import refuse_in_backward
from memfit.optimizers.shared.offloaded import check_offload
from memfit.parallelism.context import KERNELS
from memfit.parallelism.limits import check_ranks
from memfit.parallelism.pipeline import runs_in
from memfit.plan.frameworks import Framework, find_framework
from memfit.plan.request.assumed import count_steps, describe_names
from memfit.plan.request.lean import choose_lean, requested_lean
from memfit.plan.request.meshes import divisors, list_meshes
from memfit.plan.request.model_reference import find_published, find_reference, with_head
from memfit.plan.request.objectives.pairs import (
    check_pairs,
    choose_preference,
    describe_baseline,
    settle_baseline,
)
from memfit.plan.request.objectives.sampled import (
    check_sampled,
    choose_policy,
    choose_reward,
    choose_rollout,
    choose_value,
    samples,
    settle_allocator,
)
from memfit.plan.request.positions import check_positions, describe_parts, describe_positions
from memfit.plan.request.precision import HALF, find_conflict, precisions
from memfit.records import Record
from memfit.records.hardware import Device
from memfit.records.model import Model, ModelReference
from memfit.records.recipe import (
    ADAPTED,
    Decays,
    Freeze,
    Lora,
    Method,
    Optimizer,
    Parallel,
    Precision,
    Quantisation,
    Recipe,
    compute_dtype,
)
from memfit.records.request import OptimizerRequest, RecomputeBlocks, Request, find_weights

ASSUMED_SEQUENCE = 4096
CHUNKS = (1024, 256)  # tokens per chunk of the loss that the search tries, see `list_chunks`


class Problem(Record, frozen=True, kw_only=True):
    """A request with its names looked up; what is still open is decided by the search."""

    request: Request
    reference: ModelReference
    model: Model
    device: Device
    usable: int | None  # bytes: the limit that is requested or what the device has, the smaller
    usable_because: str
    assumptions: tuple[str, ...]
    exact: bool = True  # False: what fits, or does not, by far is not replayed
    ranged: bool = True  # False: no other orders of addresses are replayed
    assumed_ratio: float | None = None  # of reserved to allocated bytes, in place of any replay
    rough: bool = False  # True: recomputation is what a bound says, with an assumed ratio alone
    brief: bool = False  # True: of what was considered, the chosen recipe alone is described

    @property
    def framework(self) -> Framework:
        """Whose step it is."""
        return find_framework(self.request.framework)


def read_problem(
    request: Request,
    *,
    device: Device | None = None,
    published: bool = False,
) -> Problem:
    """Look up the framework, the model and the device; raises UnknownName or InvalidRequest.

    Of a step that memfit runs, everything that is requested is checked; what the description of
    another one excludes is found by its search.

    published: where pretrained weights will be loaded, take the config.json beside them. A
    catalogue row says every size, which is all that planning needs, but not the rotary base.
    """
    own = find_framework(request.framework).runs
    stated = request
    request = settle_baseline(settle_compiled(request)) if own else request
    reference = with_head(find_reference(request.model), request.task.objective)
    if published and find_weights(request, reference) == "pretrained":
        reference = find_published(reference)
    model = families.read_model(reference)
    device = device or find_device(request.hardware.device)
    request = settle_allocator(request, device) if own else request
    usable, because = find_usable(request, device)
    problem = Problem(
        request=request,
        reference=reference,
        model=model,
        device=device,
        usable=usable,
        usable_because=because,
        assumptions=_assumptions(stated, request, model),
    )
    if own:
        check_allocator(request.allocator, device)
        check(problem)
    return problem


def read_own_problem(
    request: Request, *, device: Device | None = None, published: bool = False
) -> Problem:
    """As `read_problem`; raises InvalidRequest for a step that memfit does not run."""
    check_own_step(request.framework)
    return read_problem(request, device=device, published=published)


def check_own_step(framework: str) -> None:
    """Raise InvalidRequest for another framework's step: it can only be planned and predicted."""
    if not find_framework(framework).runs:
        raise InvalidRequest(
            f"`framework: {framework}` is another framework's step, which memfit can plan and"
            " predict but neither certify nor run",
            hint="`memfit predict REQUEST` predicts it; `framework: memfit` can be certified",
        )


def find_device(name: str) -> Device:
    """A catalogue row; `cpu` is this machine's processor with its own memory, `auto` its GPU.

    How fast this machine's processor is no catalogue knows, but `memfit calibrate` may have
    measured it.
    """
    if name == "auto":
        name = _this_gpu() or "cpu"
    if name != "cpu":
        return catalog.find_device(name)
    row = catalog.find_device("cpu-x86")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flops = row.flops if row.calibration else {}
    return msgspec.structs.replace(row, memory=memory, memory_driver=memory, flops=flops)


def find_network(request: Request) -> str:
    """The row of links.toml that `hardware.network` names; "" where it, or one machine, needs none.

    Raises UnknownName (did-you-mean), or InvalidRequest for what does not join machines.
    """
    name = request.hardware.network
    found = links.find_network(name).id if name else ""
    return found if request.hardware.nodes > 1 else ""


def _this_gpu() -> str | None:
    """What the driver calls this machine's first GPU; None without one. Never imports torch."""
    import shutil  # two of the slower imports, and most plans name their device
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = done.stdout.strip().splitlines()
    return names[0].strip() if done.returncode == 0 and names else None


def find_usable(request: Request, device: Device) -> tuple[int | None, str]:
    """Bytes of a device that may be used, None where nobody knows, and the reason."""
    limit, memory = request.limits.memory_bytes, device.planned_memory
    if limit is not None and not device.is_cpu:
        memory = device.most_memory  # what the user says of a device that is not on record
    shared = device.is_cpu and request.hardware.count > 1  # its ranks live in one memory
    if shared and memory is not None:
        memory //= request.hardware.count
    if limit is not None and (memory is None or limit <= memory):
        return limit, "the limit of the request"
    if memory is None:
        return None, f"the memory of `{device.id}` is unknown and no limit was set"
    if assumed := device.describe_assumed(memory):
        return memory, assumed
    if device.memory is None and not device.is_cpu:
        return memory, f"the data sheet of `{device.id}` ({device.memory_datasheet})"
    what = "this machine's memory" if device.is_cpu else f"what `{device.id}` gives to torch"
    return memory, f"a rank's share of {what}" if shared else what


def _assumptions(stated: Request, request: Request, model: Model) -> tuple[str, ...]:
    """What the request, as `stated` and as settled, leaves at its default."""
    lines = [*describe_names(request)]
    if baseline := describe_baseline(stated, request):
        lines.append(baseline)
    if request.allocator != stated.allocator:
        lines.append(f"allocator {request.allocator} (answers of many lengths; not asked for)")
    if request.task.sequence_length == "auto":
        lines.append(f"sequence_length {sequence_length(request, model)} (not asked for)")
    if request.task.global_batch == "auto":
        lines.append(f"global_batch {request.global_batch} (not asked for)")
    length = sequence_length(request, model)
    packed = choose_packing(request, model.architecture)
    if assumed := count_steps(request, length, packed).assumed:
        lines.append(assumed)
    lines += describe_positions(model.name, model.architecture, length)
    return (*lines, *describe_parts(model.architecture))


def sequence_length(request: Request, model: Model) -> int:
    """The requested one, else a prompt's and its answer's, else the model's own up to 4096."""
    requested = request.task.sequence_length
    if requested != "auto":
        return requested
    if samples(request):
        return choose_rollout(request).width
    return min(ASSUMED_SEQUENCE, model.architecture.max_sequence)


def check(problem: Problem) -> None:
    """Raise InvalidRequest where two requested things exclude each other, or one the device."""
    request, architecture = problem.request, problem.model.architecture
    length = sequence_length(request, problem.model)
    name = problem.reference.name
    if architecture.recurrent and not find_framework(request.framework).recurrent:
        raise InvalidRequest(
            f"`framework: {request.framework}` with linear attention, which `{name}` has, is not"
            " described: which of its kernels run depends on the packages that are installed",
            hint="leave `framework` out: memfit's own step runs torch's code of it",
        )
    check_positions(name, architecture, length)
    packing, loss = choose_packing(request, architecture), request.loss
    check_limits(
        name, architecture,
        attention=request.attention, packing=packing, loss=loss, tokens=length,
        offload=request.offload,
    )  # fmt: skip
    check_lean(name, architecture, requested_lean(request))
    check_pairs(request)
    check_sampled(request)
    qat.check_request(request, problem.model)
    if request.precision == "fp8-mixed":
        float8.check_request(request, problem.model, problem.device, length)
    list_meshes(request)
    micro, batch = request.micro_batch, request.global_batch
    if micro != "auto" and batch % micro:
        raise InvalidRequest(
            f"`micro_batch: {micro}` does not divide `task.global_batch: {batch}`",
            hint=f"use one of {', '.join(map(str, divisors(batch)))}",
        )
    if request.optimizer.stochastic_rounding is True and request.precision != "auto":
        check_rounding(request.optimizer.name, request.precision)
    if request.optimizer.in_backward is True and (found := why_not_in_backward(request)):
        raise InvalidRequest(
            f"`optimizer.in_backward: true` cannot be: {found[0]}",
            hint=f"{found[1]}; or `optimizer.in_backward: false`",
        )
    if isinstance(request.recompute, RecomputeBlocks):
        blocks, part = request.recompute.blocks, request.recompute.selective
        layers = architecture.layers
        if blocks + part > layers:
            both = f"{blocks}` and `recompute.selective: {part}` are" if part else f"{blocks}` is"
            raise InvalidRequest(
                f"`recompute.blocks: {both} more than the {layers} blocks of `{name}`",
                hint=f"use at most {layers}, or `recompute: full`",
            )
    check_base(problem.model, request.base_format, request.method)
    if conflict := find_conflict(request.base_format, request.precision):
        own = HALF.get(request.precision, "fp32")
        raise InvalidRequest(
            f"`precision: {request.precision}` {conflict}, but `base_format: {request.base_format}`"
            " was asked for",
            hint=f"use `base_format: {own}`, or leave it out",
        )
    tried = precisions(request, problem.device)
    if all(reasons := [why_not_compiled(problem, precision) for precision in tried]):
        raise InvalidRequest(
            f"`attention: {request.attention}` {reasons[-1]}",
            hint=f"use one of {', '.join(find_kernels(problem, tried[-1]))}",
        )


def why_not_in_backward(request: Request) -> tuple[str, str] | None:
    """Why weights cannot be updated within backward, and what to use; None where they can."""
    micro, batch = request.micro_batch, request.global_batch
    if request.parallel != "auto" and request.parallel.tp > 1:
        return "it is not built for ranks that share products", "leave `parallel.tp` out"
    if request.parallel != "auto" and request.parallel.pp > 1:
        return "it is not built for stages", "leave `parallel.pp` out"
    return refuse_in_backward(
        clip_norm=request.optimizer.clip_norm,
        accumulation=1 if micro == "auto" else batch // (micro * request.shares),
        scaled=request.precision == "fp16-mixed",
    )


def list_chunks(tokens: int, *, adapted: bool) -> list[int]:
    """Chunk sizes of the loss to try for a micro-batch of this size, the largest first.

    Where the head is trained, two chunks of the smallest size may be one instead: its gradient is
    then a single product, with no sum over chunks in fp32. That sum costs 3 to 6 % of a small
    model's 16-bit step, and more bytes than the second half of the logits where the hidden size is
    above the tokens.
    """
    smallest = min(CHUNKS)
    whole = [tokens] if smallest < tokens <= 2 * smallest and not adapted else []
    return whole + ([c for c in CHUNKS if c < tokens] or [smallest])


def list_micro_batches(request: Request, parallel: Parallel) -> list[int]:
    """The micro-batches to try on a mesh: whole parts of a rank's share of the global batch, as
    many as its stages take, and whole pairs where answers are compared."""
    if request.micro_batch != "auto":
        return [request.micro_batch]
    own = request.global_batch // parallel.dp
    found = divisors(own)
    found = [n for n in found if runs_in(parallel, own // n)] or found[:1]
    return [n for n in found if not n % find_objective(request.task.objective).least_rows]


def allowed(problem: Problem, precision: Precision) -> bool:
    """Whether the frozen format that the request fixes can go with this precision."""
    conflict = find_conflict(problem.request.base_format, precision)
    alone = precision == "fp16-mixed" and problem.request.precision == "auto"
    if alone and problem.request.ranks > 1:  # see `parallelism.limits`
        return False
    return not conflict and not why_not_compiled(problem, precision)


def why_not_compiled(problem: Problem, precision: Precision) -> str:
    """Why the requested attention kernel does not serve the model here; empty when it does."""
    device, requested = problem.device, str(problem.request.attention)
    if requested == "auto" and not _shares_tokens(problem.request):
        return ""
    requested = KERNELS[0] if requested == "auto" else requested
    dtype, heads = compute_dtype(precision), _heads(problem)
    return refusal(requested, dtype, heads, platform=device.platform, capability=device.capability)


def _heads(problem: Problem) -> Heads:
    """The model's, under the requested sequence length."""
    a = problem.model.architecture
    return heads_of(a, sequence_length(problem.request, problem.model))


def find_kernels(problem: Problem, precision: Precision) -> tuple[str, ...]:
    """The attention kernels that serve the model on the device, the preferred one first.

    cuDNN's, which torch prefers on Hopper and Blackwell, is left to those who name it where it
    would be planned anew for each number of tokens, as of documents of packed rows or of sampled
    answers, where the version beside torch here is too old, and for tools, which take torch's.
    """
    device, heads = problem.device, _heads(problem)
    if only := own_kernels(problem.model.architecture):
        return only
    if _shares_tokens(problem.request):
        return KERNELS
    dtype, request = compute_dtype(precision), problem.request
    found = usable(dtype, heads, platform=device.platform, capability=device.capability)
    packed = choose_packing(request, problem.model.architecture)
    old = (read_cudnn() or OLDEST_CUDNN) < OLDEST_CUDNN
    if packed or samples(request) or old or not request.is_own:
        found = tuple(kernel for kernel in found if kernel != "cudnn")
    return found


def _shares_tokens(request: Request) -> bool:
    return request.parallel != "auto" and request.parallel.cp > 1


@lru_cache(maxsize=256)
def _count(model: Model) -> int:
    return model.parameters


def first_recipe(
    problem: Problem,
    *,
    method: Method,
    precision: Precision,
    parallel: Parallel = Parallel(),  # noqa: B008 (frozen)
) -> Recipe:
    """The recipe of one method and precision with every exact knob at its plainest setting."""
    request = problem.request
    length = sequence_length(request, problem.model)
    packed = choose_packing(request, problem.model.architecture)
    requested = request.base_format
    base = requested if requested != "auto" else HALF.get(precision, "fp32")
    attention: Any = request.attention
    if attention == "auto":
        attention = find_kernels(problem, precision)[0]
    made = Recipe(
        model=problem.reference,
        weights=find_weights(request, problem.reference),
        objective=request.task.objective,
        method=method,
        preference=choose_preference(request, method),
        rollout=choose_rollout(request),
        policy=choose_policy(request, method),
        reward=choose_reward(request, method),
        value=choose_value(request),
        lora=_lora(request, problem) if method in ADAPTED else Lora(),
        freeze=_freeze(request, problem) if method == "freeze" else Freeze(),
        base_format=base if method != "full" else _full_format(precision),
        precision=precision,
        optimizer=_optimizer(request, problem, method, precision, parallel.world),
        recompute_blocks=0,
        attention=attention,
        loss="plain",
        loss_chunk=0,
        qat="" if request.qat == "none" else request.qat,
        regularisation=request.regularisation,
        lean=choose_lean(request, problem.model.architecture),
        compile="blocks" if request.compile == "blocks" else "none",
        offload="none" if request.offload == "auto" else request.offload,
        sequence_length=length,
        packing=packed,
        micro_batch=(smallest := find_objective(request.task.objective).least_rows),
        accumulation=request.global_batch // (smallest * parallel.dp),
        parallel=parallel,
        steps=count_steps(request, length, packed).steps,
        device=problem.device.id,
        seed=request.seed,
        allocator=_allocator(request, problem.device),
        devices_per_node=request.hardware.count if request.hardware.nodes > 1 else 0,
        network=find_network(request),
        quantisation=find_quantisation(request, base if method == "lora" else "bf16"),
    )
    check_offload(made, cpu=problem.device.is_cpu)
    if problem.device.is_cpu and made.allocator:
        _check_keeping(made)
    if is_stored(made.reward.adapter_folder):
        check_stored(made)
    check_compiled(problem.model, made)
    check_ranks(made)
    return made


def _allocator(request: Request, device: Device) -> str:
    """Of a recipe: equal ones have equal digests, whatever was written out."""
    if not device.is_cpu:
        return request.allocator
    return KEEPING if keeps_freed(request.allocator) else ""


def _check_keeping(recipe: Recipe) -> None:
    """Raise InvalidRequest where it is not known what a heap would keep."""
    ranks = recipe.parallel.world
    if ranks > 1 or recipe.samples:
        what = f"{ranks} ranks" if ranks > 1 else f"`task.objective: {recipe.objective}`"
        raise InvalidRequest(
            f"`allocator: {KEEPING}` and {what}: what such a run's heap keeps is not predicted",
            hint="leave `allocator` out, which gives freed memory back",
        )


def find_quantisation(request: Request, base_format: str) -> Quantisation:
    """What the request says of a base of this format; a format uses its own settings alone."""
    requested, declared = request.quantisation, find_base_format(base_format)
    if declared.product == "int8":
        share = requested.outlier_share if requested.outlier_threshold else 0.0
        return Quantisation(outlier_threshold=requested.outlier_threshold, outlier_share=share)
    return Quantisation(double=requested.double and declared.doubles)


def _full_format(precision: Precision) -> Any:
    """Nothing is frozen, so the format is canonical: equal recipes have equal digests."""
    return "bf16" if precision == "bf16" else "fp32"


def _lora(request: Request, problem: Problem) -> Lora:
    requested = request.lora
    family = families.families.find(problem.model.architecture.family)
    own = family.default_targets(problem.model.architecture)
    return Lora(
        rank=requested.rank, alpha=requested.alpha, dropout=requested.dropout,
        scaling=requested.scaling,
        targets=choose_targets(requested.targets, problem.model, own),
    )  # fmt: skip


def _freeze(request: Request, problem: Problem) -> Freeze:
    requested = request.freeze
    if not requested.last_blocks and not requested.patterns:
        raise InvalidRequest(
            "`method: freeze` does not say what stays trainable",
            hint="for example `freeze: {last_blocks: 2}` or `freeze: {patterns: ['*norm*']}`",
        )
    layers = problem.model.architecture.layers
    if requested.last_blocks > layers:
        raise InvalidRequest(
            f"`freeze.last_blocks: {requested.last_blocks}` is more than the {layers} blocks of "
            f"`{problem.reference.name}`",
            hint=f"use at most {layers}",
        )
    return requested


def find_rate(request: Request, reference: ModelReference, model: Model, method: Method) -> float:
    """The requested learning rate, else the usual one of such a training."""
    own = request.optimizer
    if own.learning_rate != "auto":
        return own.learning_rate
    name = "adamw" if own.name == "auto" else own.name
    return optimizers.find(name).rate_of_adamws * _usual_rate(request, reference, model, method)


def _usual_rate(request: Request, reference: ModelReference, model: Model, method: Method) -> float:
    """AdamW's, which Muon's updates are scaled to."""
    if find_weights(request, reference) == "random":
        return 1e-3 if _count(model) < 50_000_000 else 3e-4
    objective = find_objective(request.task.objective)
    if objective.compares or objective.pairs_samples:  # as the alignment handbook's recipes
        return 5e-6 if method in ADAPTED else 5e-7
    if samples(request):  # TRL's; of an adapter ten times as much, as for other objectives
        return 1e-5 if method in ADAPTED else 1e-6
    return 2e-4 if method in ADAPTED else 2e-5


def _find_decays(requested: OptimizerRequest) -> Decays:
    """What the Trainer of transformers decays, unless `all` is stated; without an effect where
    nothing decays."""
    if not requested.weight_decay or requested.decays == "all":
        return "all"
    return "matrices"


def _optimizer(
    request: Request, problem: Problem, method: Method, precision: Precision, ranks: int
) -> Optimizer:
    requested = request.optimizer
    rate = find_rate(request, problem.reference, problem.model, method)
    name = "adamw" if requested.name == "auto" else requested.name
    cuda = not problem.device.is_cpu
    can_be_rounded = (
        precision == "bf16" and requested.stochastic_rounding == "auto" and can_round(name)
    )
    implementation = requested.implementation
    only = optimizers.find(name).cuda_only
    if not cuda and set(optimizers.find(name).implementations) <= set(only):
        raise InvalidRequest(
            f"`optimizer.name: {name}` exists on CUDA only, and the device is a CPU",
            hint="use `optimizer.name: adamw8bit`, or `adamw`",
        )
    if implementation == "auto":
        implementation = default_implementation(name, cuda=cuda)
        family = optimizers.find(name)
        can = [i for i in family.implementations if i not in family.unsharded_only]
        if ranks > 1 and can and implementation not in can:
            implementation = can[0]
    elif not cuda and implementation in only:
        raise InvalidRequest(
            f"`optimizer.implementation: {implementation}` of `{name}` exists on CUDA only, and the"
            " device is a CPU",
            hint=f"use `{default_implementation(name, cuda=False)}`",
        )
    check_layer_decay(requested.layer_decay, name, implementation, request.offload)
    return Optimizer(
        name=name,
        implementation=implementation,
        learning_rate=rate,
        **requested.stated,
        decays=_find_decays(requested),
        lora_plus=requested.lora_plus,
        layer_decay=requested.layer_decay,
        in_backward=requested.in_backward is True,
        stochastic_rounding=requested.stochastic_rounding is True or can_be_rounded,
    )
