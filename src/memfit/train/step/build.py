"""From a recipe to the module and the optimizer that a step needs.

The module is born on the meta device, gets its dtypes, adapter, recomputation and (on many ranks)
its shards there, and then gets empty storage: the same code runs on real devices and under
`FakeTensorMode`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memfit import parallelism
from memfit.adapters import find_adapter
from memfit.adapters.shared.apply import replace_parameters
from memfit.adapters.shared.reference_copy import hold_reference
from memfit.core.errors import InvalidRequest
from memfit.families import family_of, read_model
from memfit.families.capabilities import qat
from memfit.families.capabilities.added import check_selective, only_added
from memfit.families.capabilities.compiled import check_compiled
from memfit.families.capabilities.lean import check_lean
from memfit.families.capabilities.limits import check_limits
from memfit.meta.attending.kernels import heads_of
from memfit.optimizers import find_optimizer
from memfit.optimizers.low_bit import check_rounding
from memfit.optimizers.shared.groups import check_groups, find_depths, group_parameters
from memfit.optimizers.shared.in_backward import check_in_backward
from memfit.optimizers.shared.offloaded import check_offload
from memfit.parallelism.context import share_tokens
from memfit.parallelism.limits import check_ranks
from memfit.parallelism.pipeline import stage_model
from memfit.records.objectives import check_objective
from memfit.records.recipe import Recipe
from memfit.train.distributed.compared import Together, find_groups, keep_groups
from memfit.train.distributed.pipeline import keep_stages
from memfit.train.habits.noise import add_noise
from memfit.train.lean import apply_lean
from memfit.train.model import float8
from memfit.train.model.attention import check_attention
from memfit.train.model.compiled import compile_blocks
from memfit.train.model.hugging_face import bare_model, base_model, parts
from memfit.train.model.qat import apply_qat
from memfit.train.model.quantised import quantise
from memfit.train.model.weights import fill_weights
from memfit.train.step.host_states import Offloaded
from memfit.train.step.loss import check_chunked
from memfit.train.step.offload import offload_blocks
from memfit.train.step.recompute import recompute_blocks
from memfit.train.step.scaling import make_scaler

__all__ = ["Built", "build_model", "build_optimizer", "check_census", "fill_weights"]


@dataclass(frozen=True, slots=True)
class Built:
    """What a step needs."""

    recipe: Recipe
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """A recipe that computes in fp16 scales its loss."""
        object.__setattr__(self, "scaler", make_scaler(self.recipe, self.device))

    @property
    def together(self) -> Together:
        """The ranks with which answers are compared."""
        return find_groups(self.model)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        first: Any = next(self.model.parameters())
        if self.recipe.offload != "parameters" or first.device_mesh.device_type == "cpu":
            return torch.device(first.device)
        return torch.device("cuda", torch.cuda.current_device())


def build_model(recipe: Recipe, device: torch.device | str) -> nn.Module:
    """The module to train, empty on `device`, in training mode.

    Raises InvalidRequest when the recipe cannot run there: no such attention kernel, a dtype of
    frozen weights that the precision cannot compute with, a sequence that the model cannot hold.
    With more than one rank, this rank's shard; the process group must exist.
    """
    device = torch.device(device)
    if device.type != "meta":
        a = read_model(recipe.model).architecture
        heads = heads_of(a, recipe.sequence_length)
        check_attention(recipe, heads, "cpu" if device.type == "cpu" else "cuda")
    _check(recipe)
    float8.check(recipe, device)
    qat.check_recipe(read_model(recipe.model), recipe)
    check_compiled(read_model(recipe.model), recipe)
    # of shards on the host a CPU runs the same code, and saves nothing: no plan is for that
    check_offload(recipe, cpu=device.type == "cpu" and recipe.offload == "optimizer")
    with _disable_current_modes():  # on meta nothing needs tracing, and peft cannot move fakes
        model = find_adapter(recipe).apply(_bare(recipe), recipe)
    if recipe.loss == "chunked":
        check_chunked(parts(model).head, recipe)
    mesh = None
    if recipe.parallel.world > 1:
        mesh = parallelism.make_mesh(recipe.parallel, device.type)
        if recipe.parallel.pp > 1:
            keep_stages(model, recipe, mesh)
    apply_lean(model, recipe)
    # of stages, their own blocks among the model's first ones
    held = [int(name) for name, _ in parts(model).blocks.named_children()]
    full, recomputed = recipe.recompute_blocks, recipe.recompute_blocks + recipe.selective_blocks
    recompute_blocks(
        parts(model).blocks, sum(i < full for i in held), sum(full <= i < recomputed for i in held),
        partial(only_added, read_model(recipe.model).architecture),
        preserve_rng=recipe.lora.dropout > 0,
    )  # fmt: skip
    if recipe.compile == "blocks":
        compile_blocks(parts(model).blocks)
    if recipe.offload == "activations":
        offload_blocks(list(parts(model).blocks))
    check_census(model, recipe)
    if mesh is not None:
        model_parts = parts(model)
        tail = (*model_parts.norms, model_parts.head)
        parallelism.shard(
            model_parts.base, model_parts.embedding, list(model_parts.blocks), tail, recipe, mesh
        )
        if recipe.parallel.cp > 1:
            share_tokens(model_parts.blocks, recipe.parallel, device.type)
        if recipe.compares:
            keep_groups(model, recipe, device.type)
    if alpha := recipe.regularisation.neftune_alpha:  # on what ranks have when they have summed
        rank = dist.get_rank() if mesh is not None else 0
        add_noise(parts(model).embedding, alpha, recipe.parallel, rank)
    _materialise(model, device, on_host=recipe.offload == "parameters")
    if recipe.copies_reference:
        hold_reference(model)
    return model.train()


def _bare(recipe: Recipe) -> nn.Module:
    """Hugging Face's module with projections of the recipe's kind."""
    return float8.narrow(apply_qat(quantise(bare_model(recipe), recipe), recipe), recipe)


def build_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over what is trainable; its state appears in the first step."""
    declared = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ends = {w.name for w in declared.weights if w.spec.end}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if recipe.offload == "optimizer":
        return Offloaded(named, recipe.optimizer)
    made = find_optimizer(recipe.optimizer).build(
        named.values(), recipe.optimizer, frozenset(p for name, p in named.items() if name in ends)
    )
    names = {p: name for name, p in named.items()}
    group_parameters(made, names, recipe.optimizer, find_depths(declared))
    return made


def _materialise(model: nn.Module, device: torch.device, *, on_host: bool) -> None:
    """Compute every buffer, and give every parameter empty storage; tied ones stay tied.

    on_host: the parameters wait in the host's memory.

    Buffers first: what computing them needs is gone when the weights come.
    """

    def empty(_: str, old: Tensor) -> Tensor:
        new = parallelism.materialise(old, "cpu" if on_host and device.type != "meta" else device)
        return nn.Parameter(new, requires_grad=old.requires_grad)

    for module in list(model.modules()):
        if any(b is not None and b.device.type == "meta" for b in module._buffers.values()):
            _fill_buffers(model, module, device)
    replace_parameters(model, empty)


def _fill_buffers(model: nn.Module, module: nn.Module, device: torch.device) -> None:
    """Buffers are not in a checkpoint (rotary frequencies): a twin on the CPU computes them.

    A module that holds projections (GPT-J's attention) is not made twice: its model fills it.
    """
    if hasattr(module, "scalar_embed_scale"):  # Gemma's embedding, which has no config
        factor = cast(float, module.scalar_embed_scale)
        module._buffers["embed_scale"] = torch.full((), factor, device=device)
        return
    if any(True for child in module.children() for _ in child.parameters()):
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device=device)
        with torch.no_grad():
            base_model(model)._init_weights(module)
        return
    twin = type(module)(base_model(model).config)
    for name, value in twin._buffers.items():
        if value is not None:
            module._buffers[name] = value.to(device)


def check_census(model: nn.Module, recipe: Recipe) -> None:
    """Raise ValueError (our bug) when the module does not store what its adapter declares."""
    declared = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    if recipe.parallel.pp > 1:
        declared = stage_model(declared, recipe.parallel, dist.get_rank())
    want = {
        name: (spec.shape, spec.dtype, w.trainable)
        for w in declared.weights
        for name, spec in w.stored.items()
    }
    have = {
        name: (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
        for name, p in model.named_parameters()
    }
    for name in want.keys() | have.keys():
        if want.get(name) != have.get(name):
            raise ValueError(
                f"`{name}` is declared as {want.get(name)} but built as {have.get(name)}"
            )


def _check(recipe: Recipe) -> None:
    """What no device can run."""
    if not recipe.is_own:
        raise InvalidRequest(
            f"the recipe is of `framework: {recipe.framework}`, whose step memfit cannot build",
            hint="`memfit predict` predicts it",
        )
    check_in_backward(recipe)
    check_groups(recipe)
    if recipe.optimizer.stochastic_rounding:
        check_rounding(recipe.optimizer.name, recipe.precision)
    check_objective(recipe)
    check_ranks(recipe)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    architecture, length = model.architecture, recipe.sequence_length
    frozen = any(not w.trainable for w in model.weights)
    if frozen and not recipe.autocast and recipe.frozen_dtype != recipe.trainable_dtype:
        raise InvalidRequest(
            f"`base_format: {recipe.base_format}` cannot be computed with under"
            f" `precision: {recipe.precision}`, which casts nothing",
            hint="use `precision: bf16-mixed`, or the same format for both",
        )
    if frozen and recipe.autocast and recipe.frozen_dtype not in ("float32", recipe.compute_dtype):
        raise InvalidRequest(
            f"`base_format: {recipe.base_format}` would be cast to another 16-bit format in every"
            f" product under `precision: {recipe.precision}`",
            hint=f"use `base_format: {recipe.precision.removesuffix('-mixed')}`",
        )
    if family_of(recipe.model).ends and length > architecture.max_sequence:
        raise InvalidRequest(
            f"sequence_length {length} is longer than the {architecture.max_sequence} positions"
            f" that `{model.name}` has",
            hint=f"use a sequence_length of at most {architecture.max_sequence}",
        )
    check_limits(
        model.name, architecture,
        attention=recipe.attention, packing=recipe.packing, loss=recipe.loss, tokens=length,
        offload=recipe.offload,
    )  # fmt: skip
    check_lean(model.name, architecture, recipe.lean)
    if recipe.selective_blocks:
        check_selective(model.name, architecture, recipe)
    recomputed = recipe.recompute_blocks + recipe.selective_blocks
    if recomputed > architecture.layers:
        raise InvalidRequest(
            f"recompute of {recomputed} blocks, but `{model.name}` has {architecture.layers}",
            hint="use `recompute: full`",
        )
