"""Stages of a model, each on ranks of its own, run by torch's schedules.

Which stage holds what says `parallelism.pipeline`. A stage's forward is Hugging Face's backbone
with its blocks alone: the first one begins with tokens, others with what they receive, and the
last one ends with the loss. Names stay those of the whole model, so that weights, checkpoints and
the optimizer do not know of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memfit.adapters import find_adapter
from memfit.families import read_model
from memfit.parallelism.pipeline import blocks_of, owner_of, stages_of
from memfit.records.ledger import Phase
from memfit.records.model import Model
from memfit.records.recipe import Recipe
from memfit.train.model.hugging_face import base_model, parts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

c10d: Any = dist  # whose names its types leave out
ATTRIBUTE = "held_stages"  # of Hugging Face's module: a `Pipeline`


@dataclass(frozen=True, slots=True)
class Stage:
    """One piece of the model."""

    number: int
    blocks: nn.ModuleList
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of this rank, in their order, and the ranks that hold the others of its column."""

    stages: tuple[Stage, ...]
    count: int  # of all ranks
    place: int  # of this rank along pp
    group: dist.ProcessGroup


Run = Callable[[Stage, Any, tuple[Tensor, ...]], Tensor]  # (stage, batch, what it receives)


def find_pipeline(model: nn.Module) -> Pipeline | None:
    """The stages of a model that was built for some of them; None of a whole one."""
    found: Pipeline | None = getattr(base_model(model), ATTRIBUTE, None)
    return found


def keep_stages(model: nn.Module, recipe: Recipe, mesh: DeviceMesh) -> None:
    """Leave this rank's stages of a model on the meta device, in place."""
    _import()
    parallel, model_parts = recipe.parallel, parts(model)
    layers, numbers = len(model_parts.blocks), stages_of(parallel, dist.get_rank())
    held = {number: blocks_of(layers, parallel.stages, number) for number in numbers}
    blocks = dict(model_parts.blocks.named_children())
    for name in blocks.keys() - {str(i) for mine in held.values() for i in mine}:
        del model_parts.blocks._modules[name]
    if 0 not in held:
        _replace(model_parts.base, model_parts.embedding)
    if parallel.stages - 1 not in held:
        for module in (*model_parts.norms, model_parts.head):
            _replace(model_parts.base, module)
    stages = tuple(
        Stage(
            number,
            nn.ModuleList([blocks[str(i)] for i in mine]),
            number == 0,
            number == parallel.stages - 1,
        )
        for number, mine in held.items()
    )
    found = Pipeline(
        stages, parallel.stages, parallel.stage_place(dist.get_rank()), mesh["pp"].get_group()
    )
    object.__setattr__(model_parts.base, ATTRIBUTE, found)


def _replace(root: nn.Module, module: nn.Module) -> None:
    """Put nothing in the place of a module that another stage runs."""
    name = next(name for name, child in root.named_modules() if child is module)
    owner, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(owner), leaf, nn.Identity())


@contextmanager
def alone(model: nn.Module, stage: Stage) -> Iterator[None]:
    """The backbone has the blocks of this stage alone meanwhile."""
    modules = parts(model).backbone._modules
    name = next(name for name, child in modules.items() if isinstance(child, nn.ModuleList))
    norms = {} if stage.last else {n: nn.Identity() for n in _names(modules, parts(model).norms)}
    own = {n: modules[n] for n in (name, *norms)}
    modules.update({name: stage.blocks, **norms})
    try:
        yield
    finally:
        modules.update(own)


def _names(modules: Mapping[str, nn.Module | None], wanted: Sequence[nn.Module]) -> list[str]:
    return [n for n, child in modules.items() if any(child is one for one in wanted)]


class _Turns(nn.Module):
    """A stage as torch's schedule calls it: each call is the next micro-batch's forward.

    It holds no module of the model's: FSDP2 gathers and reduces as without stages. (A schedule
    that calls FSDP2's module itself holds whole weights and whole gradients for all of a step.)
    """

    _run: Callable[[Any, tuple[Tensor, ...]], Tensor]

    def __init__(self, stage: Stage, batches: Sequence[Any], run: Run) -> None:
        super().__init__()
        self.batches, self.turn = batches, 0
        self._run = partial(run, stage)

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the next stage receives, or the loss."""
        batch = self.batches[self.turn]
        self.turn += 1
        return self._run(batch, inputs)


def run_stages(
    model: nn.Module, recipe: Recipe, batches: Sequence[Any], run: Run, device: torch.device
) -> Tensor:
    """All micro-batches through all stages, by one step of torch's schedule; backwards too where
    gradients are wanted. Returns the sum of the losses, 0-dim: of ranks without the last stage 0.

    batches: of equal shapes, each with `input_ids`. run: the forward of a stage. Buffers that
    stages receive into are gone when this returns.
    """
    torchs, pipeline = _import(), find_pipeline(model)
    assert pipeline is not None
    between = _between(recipe, *batches[0].input_ids.shape)
    loss = torch.empty((), device="meta", requires_grad=True)
    stages = [
        torchs.PipelineStage(
            _Turns(stage, batches, run), stage.number, pipeline.count, device,
            input_args=() if stage.first else between, output_args=loss if stage.last else between,
            group=pipeline.group,
        )
        for stage in pipeline.stages
    ]  # fmt: skip
    micro_batches, trains = len(batches), torch.is_grad_enabled()
    options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
    schedule: Any
    if recipe.parallel.virtual_pp > 1:
        schedule = torchs.ScheduleInterleaved1F1B(stages, micro_batches, **options)
    else:  # to run forwards alone 1F1B wants as many micro-batches as stages, GPipe does not
        kind = torchs.Schedule1F1B if trains else torchs.ScheduleGPipe
        schedule = kind(stages[0], micro_batches, **options)
    losses: list[Tensor] = []
    # it cuts a target for each micro-batch; stages have their own
    nothing = torch.empty(micro_batches, 0, device="meta")
    work = schedule.step if trains else schedule.eval
    work(target=nothing, losses=losses, return_outputs=False)
    total = losses[0].detach() if losses else torch.zeros((), device=device)
    for other in losses[1:]:
        total.add_(other.detach())
    return total


def _import() -> Any:
    """torch's pipelining, whose modules hold tensors of their own, which are no step's."""
    with _disable_current_modes():
        import torch.distributed.pipelining as torchs
    return torchs


def _between(recipe: Recipe, rows: int, tokens: int) -> Tensor:
    """What stages send each other, on the meta device: (rows, tokens / tp, hidden).

    tokens: those of a rank, where ranks share rows. Of ranks that share products each sends its
    share to its like in the next stage, as it is: between products torch's styles hand over local
    tensors, the embedding's and each block's last sum alike (`parallelism.tensor`), and the next
    block's first norm takes one and calls it cut by tokens. No DTensor crosses a border.
    """
    a = read_model(recipe.model).architecture
    dtype: torch.dtype = getattr(torch, recipe.compute_dtype)
    shape = (rows, tokens // recipe.parallel.tp, a.hidden)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


class PhaseTracker:
    """The phases of a step whose micro-batches overlap: all is `accumulate` from the second one's
    forward on."""

    def __init__(self, batches: Sequence[Any], enter: Callable[[Phase], None]) -> None:
        self._batches, self._enter = batches, enter
        self._over = False
        enter(Phase.FORWARD)

    def begin(self, batch: Any) -> None:
        """A forward begins."""
        if not self._over and len(self._batches) > 1 and batch is self._batches[1]:
            self._enter(Phase.ACCUMULATE)
            self._over = True

    def enter(self, phase: Phase) -> None:
        """Another phase of the first micro-batch."""
        if not self._over:
            self._enter(phase)


@contextmanager
def present(
    module: nn.Module, recipe: Recipe, like: Tensor, *, children: bool = True
) -> Iterator[None]:
    """Parameters of other stages are there meanwhile, empty: what is drawn for them is forgotten,
    and what comes after them is drawn as in one process.

    like: a parameter of this rank's. children: those of the module's children, too.
    """
    absent = [
        (child, name, old)
        for child in (module.modules() if children else (module,))
        for name, old in child._parameters.items()
        if old is not None and old.device.type == "meta" and recipe.parallel.pp > 1
    ]
    for child, name, old in absent:
        new = torch.empty(old.shape, dtype=like.dtype, device=like.device)
        child._parameters[name] = nn.Parameter(new, requires_grad=False)
        del new
    try:
        yield
    finally:
        for child, name, old in absent:
            child._parameters[name] = old


def name_all(model: nn.Module, recipe: Recipe, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank trains, and in their places meta tensors of what other stages train."""
    if recipe.parallel.pp == 1:
        return dict(held)
    dtype: torch.dtype = getattr(torch, recipe.trainable_dtype)
    others = {
        w.name: torch.empty(w.shape, dtype=dtype, device="meta")
        for w in _declared(recipe).weights
        if w.trainable
    }
    return {name: held.get(name, other) for name, other in others.items()}


def _declared(recipe: Recipe) -> Model:
    """The whole model's weights with those of the adapter."""
    return find_adapter(recipe).adapt(read_model(recipe.model), recipe)


def receive(model: nn.Module, recipe: Recipe, name: str, whole: Tensor) -> Tensor:
    """A whole weight on all places along pp, from those that hold it; others give a meta tensor."""
    pipeline = find_pipeline(model)
    if pipeline is None:
        return whole
    model_ = _declared(recipe)
    weight = next(w for w in model_.weights if w.name == name)
    owner = owner_of(weight, model_.architecture.layers, recipe.parallel)
    device = next(model.parameters()).device
    found = whole if whole.device.type != "meta" else torch.empty_like(whole, device=device)
    c10d.broadcast(found.detach(), group=pipeline.group, group_src=owner)
    return found
