"""A request for a step that memfit does not run, as a recipe without a search.

What a request leaves on `auto` takes the framework's own default, and the plan says so.
"""

from __future__ import annotations

from typing import Any

from memfit import families
from memfit.adapters.shared.projections import choose_targets
from memfit.core.errors import InvalidRequest
from memfit.families.capabilities.limits import choose_packing
from memfit.objectives import find_objective
from memfit.plan.frameworks import Framework, find_framework, frameworks, resolve_options
from memfit.plan.request.assumed import count_steps
from memfit.plan.request.meshes import match_devices
from memfit.plan.request.model_reference import find_reference
from memfit.plan.request.objectives.pairs import check_described, check_pairs, choose_preference
from memfit.plan.request.objectives.sampled import choose_policy, choose_reward, choose_rollout
from memfit.plan.request.precision import choose_precision
from memfit.plan.request.problem import find_device, find_network, sequence_length
from memfit.records.hardware import Device
from memfit.records.model import Model
from memfit.records.recipe import OWN_STEP, Freeze, Lora, Optimizer, Parallel, Recipe
from memfit.records.request import RecomputeBlocks, Request


def _list_samplers(objective: str) -> str:
    """The frameworks whose step of an objective is described, memfit's own first."""
    return "` or `".join(
        [
            OWN_STEP,
            *(name for name in frameworks.names() if objective in find_framework(name).samples),
        ]
    )


def read_defaults(
    request: Request, device: Device | None = None
) -> tuple[Recipe, Model, tuple[str, ...]]:
    """The recipe of a request, its model, and what was left to the framework's defaults.

    device: None looks it up. Raises UnknownName or InvalidRequest: no such framework, or what its
    file does not describe.
    """
    framework = find_framework(request.framework)
    objective = find_objective(request.task.objective)
    if objective.compares and not framework.pairs:
        raise InvalidRequest(
            f"`objective: {objective.name}` under `framework: {request.framework}`: memfit"
            " describes how it predicts tokens, not how it compares pairs",
            hint="use `framework: trl` or `hf-trainer`, or `memfit`",
        )
    if objective.samples and objective.name not in framework.samples:
        raise InvalidRequest(
            f"`objective: {objective.name}` under `framework: {request.framework}`: memfit"
            " describes how it predicts tokens, not how it samples and judges answers",
            hint=f"use `framework: {_list_samplers(objective.name)}`",
        )
    check_described(request)
    check_pairs(request)
    reference = find_reference(request.model)
    model = families.read_model(reference)
    device = device or find_device(request.hardware.device)
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
        rollout=choose_rollout(request),
        policy=choose_policy(request, method, second=True),
        reward=choose_reward(request, method),
        method=method,
        lora=Lora(
            rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, scaling=lora.scaling,
            targets=choose_targets(lora.targets, model, targets),
        ) if method == "lora" else Lora(),
        freeze=request.freeze if method == "freeze" else Freeze(),
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
    keys: dict[str, Any] = {
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
    for key, value in keys.items():
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
    """What is recomputed, and in how many blocks."""
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
    requested = request.optimizer
    if requested.in_backward is True:
        raise InvalidRequest(
            f"`optimizer.in_backward` of `framework: {request.framework}` is not described",
            hint="`framework: memfit`, or `optimizer.in_backward: false`",
        )
    implementation: Any = chosen["implementation"]
    return Optimizer(
        name=chosen["optimizer"],
        implementation=implementation,
        learning_rate=1e-4 if requested.learning_rate == "auto" else requested.learning_rate,
        **requested.stated,
    )


def read_parallel(request: Request, framework: Framework) -> Parallel:
    """The requested axes; left on `auto`, all devices are data-parallel in the framework's way."""
    devices = request.devices
    if request.parallel == "auto":
        sharded = "dp_shard" in framework.axes
        if not sharded:
            return Parallel(dp_replicate=devices)
        return Parallel(dp_shard=devices, zero=framework.choose_zeros(request)[0])
    requested, plain = request.parallel, Parallel()
    for name in requested.__struct_fields__:
        value = getattr(requested, name)
        if value != getattr(plain, name) and name not in framework.axes:
            raise InvalidRequest(
                f"`parallel.{name}: {value}` is not described for `framework: {framework.name}`",
                hint=f"described: {', '.join(framework.axes) or 'one device'}",
            )
    if requested.world != devices:
        raise InvalidRequest(
            f"`parallel` names {requested.world} ranks, but `hardware` has {devices} devices",
            hint=match_devices(requested.world, devices),
        )
    return requested
