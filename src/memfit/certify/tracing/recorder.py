"""What a trace leaves: every allocation and release in order, what each is, and who holds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memfit.allocator.tape import CAUGHT_UP, USED, Event
from memfit.certify.tracing.fake_device import device_type
from memfit.certify.tracing.workspace import PRODUCTS, RULES
from memfit.meta.workspace import bias_workspace, find_grid, product_workspace
from memfit.records.hardware import Device
from memfit.records.ledger import Ledger, Phase
from memfit.records.results import Tensor, group_tensors
from memfit.train.measure.live import Inside, LiveBytes, full_name


@dataclass(frozen=True, slots=True)
class Trace:
    """What the step allocates. Bytes are of tensors (and workspaces), before any rounding."""

    phases: Mapping[Phase, int]  # peak of each
    ledger: Ledger  # what is alive at each of these peaks
    tape: tuple[Event, ...]
    marks: tuple[int, ...]  # where in the tape each stretch after the first begins
    stretches: tuple[Phase, ...]  # the phase of each stretch: len(marks) + 1
    bounds: tuple[str, ...]  # what was assumed
    host: Mapping[Phase, int]  # bytes of host tensors, where the device is another
    tensor: Callable[[int], Tensor] = field(compare=False)  # what a number on the tape is
    # at a phase's peak, those alike in one row
    alive: Callable[[Phase], tuple[Tensor, ...]] = field(compare=False)

    @property
    def peak(self) -> int:
        """Bytes at the largest instant."""
        return max(self.phases.values())

    @property
    def at_peak(self) -> tuple[Tensor, ...]:
        """All tensors alive at the largest peak."""
        return self.alive(self.ledger.peak_phase)


class Recorder(LiveBytes):  # type: ignore[no-untyped-call]
    """LiveBytes that keeps where phases begin on its tape, and counts CUDA's workspaces."""

    def __init__(self, device_type: str, cuda: Device | None) -> None:
        super().__init__(device_type, workspace=None if cuda is None else self._inside)
        self._cublas = 0 if cuda is None else product_workspace(cuda)
        self._of_lt = 0 if cuda is None else bias_workspace(cuda, torch.__version__)
        self._grid = None if cuda is None else find_grid(cuda)
        self._threads: set[bool] = set()  # False: the forward's, True: autograd's
        self._starts: list[tuple[Phase, int]] = [(Phase.LOAD, 0)]
        self.host: dict[Phase, int] = {}
        self._uses: list[tuple[int, Event]] = []  # position among the events, line of the tape

    def enter(self, phase: Phase) -> None:
        """Begin a phase, and a stretch of the tape."""
        super().enter(phase)
        self._starts.append((phase, len(self._events)))
        if phase is Phase.FORWARD:  # the loop has read the step before it: streams are done
            streams = sorted({event.stream for _, event in self._uses})
            self._uses += [(len(self._events), Event(-1, CAUGHT_UP, s)) for s in streams]

    def be_on(self, stream: int) -> None:
        """Record further work on this stream."""
        self.stream = stream

    def use(self, tensor: torch.Tensor, stream: int) -> None:
        """`Tensor.record_stream`: freed, the storage waits for that stream too."""
        index = self._track(tensor, "registered")
        if index is not None:
            self._uses.append((len(self._events), Event(index, USED, stream)))

    @contextmanager
    def shallow(self, model: nn.Module) -> Iterator[None]:
        """Meanwhile forwards and backwards run; all blocks of the model take part in them."""
        del model
        yield

    def begin(self) -> None:
        """A forward begins that no phase announces."""

    def restart_in(self, phase: Phase) -> None:
        """Let the tape begin with a phase other than `load`."""
        self._phase = phase
        self._starts = [(phase, 0)]
        self.restart()

    @contextmanager
    def watch_host(self, phase: Phase) -> Iterator[None]:
        """Count host tensors meanwhile, where the device is another.

        What a copy to the device casts on the host is inside the copy, and not seen.
        """
        if self._device_type == "cpu":
            yield
            return
        with LiveBytes("cpu") as host:
            yield
        self.host[phase] = host.peak

    def stay(self, phase: Phase) -> None:
        """Label what an instant of the first step made, which is one phase as a whole."""
        del phase
        self._label_gradients()
        self._label_state()

    def trace(self, bounds: tuple[str, ...]) -> Trace:
        """The finished trace."""
        tape: list[Event] = []
        marks: list[int] = []
        starts = [position for _, position in self._starts[1:]]
        uses = deque(self._uses)
        for position, event in enumerate(self._events):
            while len(marks) < len(starts) and starts[len(marks)] == position:
                marks.append(len(tape))
            while uses and uses[0][0] == position:
                tape.append(uses.popleft()[1])
            index = event if event >= 0 else ~event
            if nbytes := self.blocks[index].nbytes:
                stream = self.blocks[index].stream
                tape.append(Event(index, nbytes if event >= 0 else 0, stream))
        marks += [len(tape)] * (len(starts) - len(marks))
        bounds += ("streams have caught up when a step begins",) if self._uses else ()
        return Trace(
            phases=self.peaks,
            ledger=self.ledger(),
            tape=tuple(tape),
            marks=tuple(marks),
            stretches=tuple(phase for phase, _ in self._starts),
            bounds=bounds,
            host=self.host,
            tensor=lambda index: self.describe(self.blocks[index]),
            alive=lambda phase: group_tensors(self.at_peak(phase)),
        )

    def _inside(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inside | None:
        """Bytes that the operator's kernel holds while it runs (the `workspace` hook).

        A product asks for cuBLAS's handle, and with it the workspace, once its result is there: a
        recording of an H100 has it so (tests/certify/test_order_of_allocations.py).
        """
        del kwargs
        name = full_name(func)
        if name in PRODUCTS:
            lasting = self._find_cublas_workspace()
            if name == "aten.addmm.default" and args[0].dim() == 1:
                lasting += self._find_own_workspace()
            return Inside(lasting=lasting) if lasting else None
        rule = RULES.get(name)
        if rule is None or _is_on_host(args[0]):
            return None
        pieces = rule.pieces(args, self._grid)
        return Inside(before=pieces) if rule.before else Inside(after=pieces)

    def _find_cublas_workspace(self) -> tuple[int, ...]:
        """One of each thread, from its first product on."""
        in_backward = torch._C._current_autograd_node() is not None
        if in_backward in self._threads:
            return ()
        self._threads.add(in_backward)
        return (self._cublas,)

    def _find_own_workspace(self) -> tuple[int, ...]:
        """A product with a bias runs on cuBLASLt, which shared no workspace before torch 2.12."""
        own, self._of_lt = self._of_lt, 0
        return (own,) if own else ()


def make_recorder(made: type[Recorder], device: Device, *, workspaces: bool = True) -> Recorder:
    """A recorder of a device, with or without what its kernels allocate inside themselves."""
    kind = device_type(device)
    return made(kind, device if workspaces and kind == "cuda" else None)


def _is_on_host(argument: Any) -> bool:
    """Whether an operator's first argument, a tensor or several, is the host's."""
    first = argument[0] if isinstance(argument, list | tuple) and argument else argument
    return isinstance(first, torch.Tensor) and first.device.type == "cpu"
