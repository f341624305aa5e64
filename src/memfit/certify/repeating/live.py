"""A recorder under which some blocks of the model run, and stand for those that are like them.

The model is whole: loading, clipping, the optimizer and saving are traced at its full depth. While
a forward runs, its list of blocks holds those of the layout alone. Before an optimizer's step the
parameters of the other blocks get gradients like those of the blocks that stand for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from memfit.certify.repeating.alike import Layout, Unlike, find_layout
from memfit.certify.repeating.lengthened import Few, Planted, lengthen
from memfit.certify.tracing.recorder import Recorder, Trace
from memfit.records.hardware import Device
from memfit.records.ledger import Kind, Phase
from memfit.train.measure.live import _DEVICE_OF_FAKE
from memfit.train.measure.storages import is_wrapper
from memfit.train.model.hugging_face import base_model, parts

_current_node = torch._C._current_autograd_node


class RepeatingRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Records a tape that `lengthened` makes the whole model's."""

    def __init__(self, device_type: str, cuda: Device | None) -> None:
        super().__init__(device_type, cuda)
        self.layout: Layout | None = None
        self.regions: list[tuple[int, int]] = []  # of the tape: where only some blocks ran
        self.planted: list[Planted] = []
        self.in_backward: list[bool] = []  # of each storage: whether a backward made it
        self._begun = -1  # of the region that is open
        self._inner: frozenset[int] = frozenset()  # blocks that stand for others
        self._paths: dict[str, int] = {}

    def register_model(self, model: nn.Module) -> None:
        """Label what is there, and find which blocks are alike."""
        super().register_model(model)
        blocks = parts(model).blocks
        prefix = next(name for name, module in self._modules_by_name() if module is blocks) + "."
        self.layout = find_layout(prefix, list(blocks), base_model(model).config)
        if self.layout is not None:
            units, more = self.layout.units, self.layout.more
            self._inner = frozenset(block for unit in more for block in units[unit])

    def _modules_by_name(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, module) for module, name in self._modules.items())

    @contextmanager
    def shallow(self, model: nn.Module) -> Iterator[None]:
        """Only the layout's blocks run meanwhile."""
        if self.layout is None:
            yield
            return
        whole = parts(model).blocks
        few = nn.ModuleList(whole[block] for block in self.layout.traced)
        few.train(whole.training)
        owner, name = _find_place(model, whole)
        owner._modules[name] = few
        try:
            yield
        finally:
            self._end()
            owner._modules[name] = whole

    def enter(self, phase: Phase) -> None:
        """Begin a phase; the first of a step opens a region of the tape, an update closes it."""
        if phase is Phase.SAVE:
            self._end()
        self._turn(phase)
        super().enter(phase)

    def stay(self, phase: Phase) -> None:
        """The same in the first step, which is one phase."""
        self._turn(phase)
        super().stay(phase)

    def begin(self) -> None:
        """Only some blocks run from here on."""
        if self._begun < 0 and self.layout is not None:
            self._begun = len(self._events)

    def _turn(self, phase: Phase) -> None:
        if phase in (Phase.FORWARD, Phase.EVALUATE):
            self.begin()
        elif phase is Phase.OPTIMIZER_STEP and self.layout is not None:
            self._end()
            self._plant(self.layout)

    def _end(self) -> None:
        if self._begun >= 0:
            self.regions.append((self._begun, len(self._events)))
            self._begun = -1

    def _plant(self, layout: Layout) -> None:
        """Give the parameters of blocks that did not run gradients, which an update reads."""
        rows: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in self._parameters.items():
            block, rest = layout.split(name)
            if block is not None and parameter.requires_grad:
                rows.setdefault(block, []).append((rest, parameter))
        for block, like, time in layout.repeated:
            for rest, parameter in rows.get(block, ()):
                grown = self._parameters[f"{layout.prefix}{like}{rest}"].grad
                if grown is not None:
                    self._plant_one(parameter, grown, time)

    def _plant_one(self, parameter: nn.Parameter, like: Tensor, time: int) -> None:
        if is_wrapper(type(like)) or parameter.grad is not None:
            raise Unlike("gradients that are no plain tensors")
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        stored, born = like.untyped_storage(), made.untyped_storage()
        if stored.nbytes() != born.nbytes() or stored._cdata not in self._alive:
            raise Unlike("a gradient that shares its storage")
        parameter.grad = made
        known = self._alive[stored._cdata][0]
        self.planted.append(Planted(self._alive[born._cdata][0], known, time))

    def _allocate(self, nbytes: int, op: str, kind: Kind | None, vocab: bool) -> int:
        self.in_backward.append(_current_node() is not None)
        return super()._allocate(nbytes, op, kind, vocab)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count, and see that no operator outside the blocks reads what all of them made."""
        if func is not _DEVICE_OF_FAKE and self._begun >= 0 and not self._inside_block():
            self._refuse_inner(args)
            if kwargs:
                self._refuse_inner(kwargs.values())
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _inside_block(self) -> bool:
        """Whether a block runs; of a backward, which only mirrors the forward, always."""
        if _current_node() is not None:
            return True
        return bool(self._frames) and self._block_of(self._frames[-1][0]) >= 0

    def _block_of(self, path: str) -> int:
        found = self._paths.get(path)
        if found is None:
            block = self.layout.split(path)[0] if self.layout else None
            found = self._paths[path] = -1 if block is None else block
        return found

    def _refuse_inner(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, list | tuple):
                self._refuse_inner(value)
            elif isinstance(value, Tensor) and not is_wrapper(type(value)):
                known = self._alive.get(value.untyped_storage()._cdata)
                if known and self._block_of(self.blocks[known[0]].module) in self._inner:
                    raise Unlike("what is outside of the blocks reads what each of them made")

    def trace(self, bounds: tuple[str, ...]) -> Trace:
        """The whole model's trace. Raises Unlike where there is a doubt."""
        if self.layout is None:
            return super().trace(bounds)
        if self._uses:
            raise Unlike("several streams")
        few = Few(
            self._events, self.blocks, self._starts, self.regions, self.in_backward, self.planted
        )
        self._events, self.blocks, self._starts, self._peaks = lengthen(few, self.layout)
        return super().trace((*bounds, describe_layout(self.layout)))


def describe_layout(layout: Layout) -> str:
    """What was traced, for a certificate."""
    spans: list[str] = []
    for unit, more in layout.more.items():
        own = layout.units[unit]
        first, last = own[0] + len(own), own[-1] + more * len(own)
        like = str(own[0]) if len(own) == 1 else f"{own[0]} to {own[-1]}"
        spans.append(f"blocks {first} to {last} repeat {like}")
    return f"traced with {len(layout.traced)} of its blocks: {', '.join(spans)}"


def _find_place(model: nn.Module, blocks: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the list of blocks, and its name there."""
    places: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        children: Mapping[str, nn.Module | None] = module._modules
        places += [(module, name) for name, child in children.items() if child is blocks]
    if len(places) != 1:
        raise Unlike("a list of blocks that several modules hold")
    return places[0]
