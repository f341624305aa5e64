"""A step of another framework, predicted: from a request to a plan without a search.

What a request leaves on `auto` takes the framework's own default, and the plan says so.
"""

from __future__ import annotations

from typing import Any

from memfit import __version__, families
from memfit.adapters.shared.projections import choose_targets
from memfit.core.errors import InvalidRequest, MemoryUnknown
from memfit.core.units import show_gib
from memfit.families.capabilities.limits import choose_packing
from memfit.plan.budget.cost import describe_cost
from memfit.plan.frameworks import Framework, Job, find_framework, hinting, resolve_options
from memfit.plan.memory.bounds import find_bounds
from memfit.plan.memory.host_memory import describe_host
from memfit.plan.request.assumed import count_steps, describe_assumed, describe_names
from memfit.plan.request.meshes import match_devices
from memfit.plan.request.model_reference import find_reference
from memfit.plan.request.positions import describe_positions
from memfit.plan.request.precision import choose_precision
from memfit.plan.request.preference_checks import check_pairs, choose_preference
from memfit.plan.request.problem import find_device, find_network, sequence_length
from memfit.plan.step_time.communication.traffic import describe_traffic
from memfit.plan.step_time.predicted_time import (
    describe_time,
    predict_timeline,
    sum_up,
    without_training,
)
from memfit.records.hardware import Device
from memfit.records.ledger import Ledger
from memfit.records.model import Model
from memfit.records.recipe import Freeze, Lora, Optimizer, Parallel, Recipe
from memfit.records.request import ParallelRequest, RecomputeBlocks, Request
from memfit.records.results import Memory, Plan, Verdict


def predict_foreign(request: Request) -> Plan:
    """Time of another framework's step, and memory on its fullest rank where that is described.

    Raises UnknownName or InvalidRequest: no such framework, or what its file does not describe.
    """
    with hinting():
        return _predict_foreign(request)


def _predict_foreign(request: Request) -> Plan:
    recipe, model, assumed = read_foreign(request)
    device = find_device(request.hardware.device)
    usable = usable_memory(request, device)
    try:
        ledger = predict_ledger(recipe, model, device)
        waiting = find_waiting(recipe, model, device)
        memory = describe_foreign(ledger, recipe, device, usable, waiting)
    except MemoryUnknown as reason:
        ledger, memory = Ledger(entries=()), _unknown_memory(usable, str(reason))
    totals = sum_up(model)
    if recipe.adapted:
        totals = without_training(totals)
    timeline = predict_timeline(totals, recipe, device)
    time = describe_time(totals, recipe, device, timeline)
    return Plan(
        recipe_digest=recipe.digest,
        request=request,
        recipe=recipe,
        memory=memory,
        time=time,
        cost=describe_cost(time, device, request),
        ledger=ledger,
        timeline=timeline,
        considered=(),
        levers=(),
        assumptions=(
            *_describe_open(request, recipe, model), *assumed,
            *describe_host(recipe, find_on_host(recipe, model, device)),
        ),
        versions={"memfit": __version__},
        traffic=describe_traffic(totals, recipe),
    )  # fmt: skip


def _describe_open(request: Request, recipe: Recipe, model: Model) -> tuple[str, ...]:
    """What the request leaves open beside its framework's own defaults."""
    length, said = recipe.sequence_length, [*describe_names(request)]
    if request.task.sequence_length == "auto":
        said.append(f"sequence_length {length} (not asked for)")
    steps = count_steps(request, length, recipe.packing).assumed
    positions = describe_positions(model.name, model.architecture, length)
    own = find_framework(recipe.framework).describe_open(recipe)
    return (
        *said, *([steps] if steps else []), *describe_assumed(request, recipe), *own, *positions,
    )  # fmt: skip


def usable_memory(request: Request, device: Device) -> int | None:
    """Bytes of a device that may be used; None where nobody knows."""
    limit = request.limits.memory_bytes
    if limit is None:
        return device.planned_memory
    return min(limit, device.most_memory or limit)


def predict_ledger(recipe: Recipe, model: Model, device: Device) -> Ledger:
    """Allocated bytes of the fullest rank, by phase and kind; model: before any adapter.

    Raises MemoryUnknown where the framework's file describes no bytes, and InvalidRequest.
    """
    job = Job(model=model, recipe=recipe, device=device)
    framework = find_framework(recipe.framework)
    framework.check(job)
    return framework.predict(job)


def find_waiting(recipe: Recipe, model: Model, device: Device) -> tuple[int, str]:
    """Bytes reserved beside the peak's, given back when asked; model: before any adapter."""
    job = Job(model=model, recipe=recipe, device=device)
    return find_framework(recipe.framework).waiting(job)


def find_on_host(recipe: Recipe, model: Model, device: Device) -> int:
    """Bytes in the memory of all hosts; model: before any adapter."""
    if recipe.offload == "none":
        return 0
    job = Job(model=model, recipe=recipe, device=device)
    return find_framework(recipe.framework).on_host(job)


def _unknown_memory(usable: int | None, because: str) -> Memory:
    return Memory(
        peak_allocated=None, peak_reserved=None, device_total=None, usable=usable,
        verdict="unproven", because=because, peak_phase="", entries=(),
    )  # fmt: skip


def describe_foreign(
    ledger: Ledger,
    recipe: Recipe,
    device: Device,
    usable: int | None,
    waiting: tuple[int, str] = (0, ""),
) -> Memory:
    """The three numbers and a verdict; reserved and context are bands, and the verdict sees both.

    `fits` at the high ends, `at_risk` between, `does_not_fit` at the low ends; where no context is
    known, only `does_not_fit` can be. waiting: as `find_waiting` says; where less is free, less.
    """
    framework, peak = find_framework(recipe.framework), ledger.peak
    slack, bounds = framework.slack, find_bounds(framework, device, recipe.parallel, peak)
    live = {p: ledger.live(p) for p in ledger.phases}
    peak_phase = max(live, key=live.__getitem__)
    verdict: Verdict = "unproven"
    if usable is not None and peak * framework.slack.low > usable:
        verdict = "does_not_fit"  # whatever the context is
    elif usable is not None and bounds.outside is not None:
        verdict = "fits"
        if bounds.high > usable:
            verdict = "at_risk"
        if bounds.low > usable:
            verdict = "does_not_fit"
    said = (
        f"{framework.title}: read from {framework.source}; reserved is allocated x"
        f" {slack.typical:.3f} ({slack.low:.3f} to {slack.high:.3f}: {slack.source})"
    )
    outside, (waits, why) = bounds.outside, waiting
    if usable is not None:
        waits = min(waits, max(0, usable - (bounds.total or bounds.reserved)))
    if waits:
        said += f"; beside it {show_gib(waits)} of {why}, given back before memory runs out"
    said += f"; context {outside.because}" if outside else "; the context is unknown"
    if assumed := device.describe_assumed(usable):
        said += f"; the limit is {assumed}"
    return Memory(
        peak_allocated=live[peak_phase],
        peak_reserved=bounds.reserved + waits,
        device_total=None if bounds.total is None else bounds.total + waits,
        total_low=None if bounds.low is None else round(bounds.low),
        total_high=None if bounds.high is None else round(bounds.high),
        usable=usable,
        verdict=verdict,
        because=said,
        peak_phase=ledger.peak_phase,
        entries=ledger.at(ledger.peak_phase),
    )


def read_foreign(request: Request) -> tuple[Recipe, Model, tuple[str, ...]]:
    """The recipe of a request, its model, and what was left to the framework's defaults."""
    framework = find_framework(request.framework)
    if request.task.objective == "dpo" and not framework.pairs:
        raise InvalidRequest(
            f"`objective: dpo` under `framework: {request.framework}`: memfit describes how it"
            " predicts tokens, not how it compares pairs",
            hint="use `framework: trl` or `hf-trainer`, or `memfit` on one device",
        )
    check_pairs(request)
    reference = find_reference(request.model)
    model = families.read_model(reference)
    device = find_device(request.hardware.device)
    parallel = read_parallel(request, framework)
    length = sequence_length(request, model)
    micro = 1 if request.micro_batch == "auto" else request.micro_batch
    each = parallel.dp * micro
    if request.global_batch % each:
        raise InvalidRequest(
            f"`task.global_batch: {request.global_batch}` is not a multiple of {each}:"
            f" {parallel.dp} data-parallel ranks x `micro_batch: {micro}`",
            hint=f"use `global_batch: {-(-request.global_batch // each) * each}`",
        )
    chosen, left = _choose(request, framework, device)
    layers = model.architecture.layers
    kind, blocks = _recompute(chosen["recompute"], request, layers)
    if parallel.pp * parallel.virtual_pp > layers + framework.ends:
        raise InvalidRequest(
            f"`parallel.pp: {parallel.pp}` x `virtual_pp: {parallel.virtual_pp}` is more than the"
            f" {layers} blocks of `{reference.name}`",
            hint="a stage holds one block or more",
        )
    lora = request.lora
    a = model.architecture
    targets = families.find_family(a.family).default_targets(a)
    method: Any = chosen["method"]
    values: dict[str, Any] = {
        key: chosen[key]
        for key in ("precision", "base_format", "attention", "loss", "compile", "offload")
    }
    recipe = Recipe(
        **values,
        framework=framework.name,
        model=reference,
        weights="random",
        objective=request.task.objective,
        preference=choose_preference(request, method, whole="second-model"),
        method=method,
        lora=Lora(
            rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, scaling=lora.scaling,
            targets=choose_targets(lora.targets, model, targets),
        ) if method == "lora" else Lora(),
        freeze=Freeze(last_blocks=request.freeze.last_blocks, patterns=request.freeze.patterns)
        if method == "freeze" else Freeze(),
        optimizer=_optimizer(request, chosen),
        recompute_blocks=blocks,
        recompute=kind,
        loss_chunk=request.loss_chunk,
        sequence_length=length,
        packing=choose_packing(request, a),
        micro_batch=micro,
        accumulation=request.global_batch // each,
        steps=count_steps(request, length, choose_packing(request, a)).steps,
        device=device.id,
        seed=request.seed,
        parallel=parallel,
        allocator=request.allocator,
        devices_per_node=request.hardware.count if request.hardware.nodes > 1 else 0,
        network=find_network(request),
        options=resolve_options(framework, request.options),
    )  # fmt: skip
    return recipe, model, left


def _choose(
    request: Request, framework: Framework, device: Device
) -> tuple[dict[str, str], tuple[str, ...]]:
    """A value of each shared knob, and in words those that the framework's default decided."""
    recompute = request.recompute
    asked: dict[str, Any] = {
        "precision": request.precision,
        "method": request.method,
        "base_format": request.base_format,
        "optimizer": request.optimizer.name,
        "implementation": request.optimizer.implementation,
        "recompute": "full" if isinstance(recompute, RecomputeBlocks) else recompute,
        "attention": request.attention,
        "loss": request.loss,
        "compile": request.compile,
        "offload": request.offload,
    }
    chosen: dict[str, str] = {}
    left: list[str] = []
    for key, value in asked.items():
        allowed = framework.values[key]
        if value == "auto":
            value = allowed[0]
            if key == "precision":
                value = choose_precision(allowed, framework.name, device)
            if key != "base_format" or chosen["method"] != "full":  # which has no base
                left.append(f"{key} {value} ({framework.name}'s default)")
        elif value not in allowed:
            raise InvalidRequest(
                f"`{key}: {value}` is not described for `framework: {framework.name}`",
                hint=f"described: {', '.join(allowed)}",
            )
        chosen[key] = value
    return chosen, tuple(left)


def _recompute(chosen: str, request: Request, layers: int) -> tuple[Any, int]:
    """What is computed again, and in how many blocks."""
    if isinstance(request.recompute, RecomputeBlocks):
        if request.recompute.selective:
            raise InvalidRequest(
                f"`recompute.selective: {request.recompute.selective}` is of memfit's own step, and"
                f" `framework: {request.framework}` recomputes one way",
                hint="use `recompute: selective`, or `{blocks: n}` alone",
            )
        return "full", min(request.recompute.blocks, layers)
    if chosen == "none":
        return "full", 0
    return chosen, layers


def _optimizer(request: Request, chosen: dict[str, str]) -> Optimizer:
    asked = request.optimizer
    if asked.in_backward is True:
        raise InvalidRequest(
            f"`optimizer.in_backward` of `framework: {request.framework}` is not described",
            hint="`framework: memfit`, or `optimizer.in_backward: false`",
        )
    implementation: Any = chosen["implementation"]
    return Optimizer(
        name=chosen["optimizer"],
        implementation=implementation,
        learning_rate=1e-4 if asked.learning_rate == "auto" else asked.learning_rate,
        weight_decay=asked.weight_decay,
        beta1=asked.beta1,
        beta2=asked.beta2,
        eps=asked.eps,
        momentum=asked.momentum,
        schedule=asked.schedule,
        warmup_steps=asked.warmup_steps,
        clip_norm=asked.clip_norm,
    )


def read_parallel(request: Request, framework: Framework) -> Parallel:
    """The axes asked for; left on `auto`, all devices are data-parallel in the framework's way."""
    devices = request.devices
    if request.parallel == "auto":
        sharded = "dp_shard" in framework.axes
        if not sharded:
            return Parallel(dp_replicate=devices)
        return Parallel(dp_shard=devices, zero=framework.choose_zeros(request)[0])
    asked, plain = request.parallel, ParallelRequest()
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if value != getattr(plain, name) and name not in framework.axes:
            raise InvalidRequest(
                f"`parallel.{name}: {value}` is not described for `framework: {framework.name}`",
                hint=f"described: {', '.join(framework.axes) or 'one device'}",
            )
    if asked.world != devices:
        raise InvalidRequest(
            f"`parallel` names {asked.world} ranks, but `hardware` has {devices} devices",
            hint=match_devices(asked.world, devices),
        )
    return asked.stated
