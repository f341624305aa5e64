"""Exact bytes of live tensor storages, by phase, kind and owner, on real and on fake tensors.

`LiveBytes` sees every operator that torch dispatches. A storage counts from the operator that
returned it until it is freed, so what the trace of fake tensors holds and what a run on a CPU
holds are the same number, to the byte. What kernels allocate inside themselves is not dispatched;
the `workspace` hook is where that is added.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.parallelism.collectives import BUFFERS, buffers, meshes_outside_modes, propagation
from memfit.parallelism.whole import sharers
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.results import Tensor as TensorRow
from memfit.train.measure.components import OUTSIDE, Owners
from memfit.train.measure.source import find_source
from memfit.train.measure.storages import Block, describe, inner_tensors, is_wrapper, resizes


class Inside(NamedTuple):
    """Bytes of each allocation that an operator's kernel makes beside its results."""

    before: tuple[int, ...] = ()  # its results; freed when it returns
    after: tuple[int, ...] = ()
    lasting: tuple[int, ...] = ()  # after its results, and never freed


Workspace = Callable[[Any, Sequence[Any], Mapping[str, Any]], Inside | None]
Run = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]  # the outputs of one operator

CUBLAS = "cublasSetWorkspace"  # the name under which what a product's handle keeps is recorded
_DEVICE_OF_FAKE = torch.ops.prim.device.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_sequence_number: Callable[[], int] | None = getattr(torch.autograd, "_get_sequence_nr", None)
_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)


_names: dict[int, tuple[str, str, Any]] = {}  # by identity: hashing an operator runs Python


def find_names(operator: Any) -> tuple[str, str, Any]:
    """(`mm.default`, `aten.mm.default`, the operator), composed once."""
    found = _names.get(id(operator))
    if found is None:
        full = str(operator)
        found = _names[id(operator)] = (getattr(operator, "__name__", full), full, operator)
    return found


def full_name(operator: Any) -> str:
    """Return `aten.mm.default`."""
    return find_names(operator)[1]


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered; enter it inside `FakeTensorMode`, not around it.

    Register what exists before the step (`register_model`, `register_optimizer`,
    `register_batch`), pass `enter` to the step, then read `peaks`, `ledger()`, `at_peak()` or
    `tape()`. Events accumulate until `restart()`, so watch a few steps, not a whole run.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compiled code is not watched, so no call need be guarded against compilation (torch's
        guard costs more than the counting; a fake tensor's device is read here too).
        """
        return False

    def __init__(self, device_type: str, *, workspace: Workspace | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0  # bytes alive now
        self.blocks: list[Block] = []
        self.stream = 0  # what new blocks are allocated on
        self.run: Run | None = None  # what runs an operator; None calls it
        self._sharded = False  # whether FSDP2's operators may be met
        self._hidden = 0  # > 0 while DTensor runs operators on shapes alone
        self._device_type = device_type
        self._workspace = workspace
        self._events: list[int] = []  # index of a block: allocated; its complement: released
        self._alive: dict[int, tuple[int, Any]] = {}  # StorageImpl -> block, weak reference
        self._phase = Phase.LOAD
        self._peaks: dict[Phase, tuple[int, int]] = {}  # bytes, number of events before it
        self._owners = Owners()
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: dict[Tensor, str] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._updating = False  # whether an optimizer's step is running
        self._vocab = -1
        self._frames: list[tuple[str, list[int]]] = []  # module calls in progress
        self._modules: dict[nn.Module, str] = {}
        # sequence number of autograd's node -> module and line of its forward
        self._place_of_node: dict[int, tuple[str, str]] = {}
        self._hooks: list[Any] = []

    # -- what exists and what it is ---------------------------------------------------------

    def register_model(self, model: nn.Module) -> None:
        """Label parameters and buffers; from now on allocations name the module they are in."""
        self._owners = Owners.of(model)
        self._modules = {module: name for name, module in model.named_modules()}
        self._parameters = dict(model.named_parameters())
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._vocab = getattr(getattr(model, "config", None), "vocab_size", -1) // sharers(model)
        for name, tensor in model.named_buffers():
            self._label(tensor, Kind.PARAMETERS, name)
        self._label_gradients()

    def register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Label the state, now and whenever a phase ends; and the gradients that a step reads.

        A weight that is updated within backward has none when its phase ends.
        """
        self._optimizers.append(optimizer)
        self._label_state()
        self._hooks += [
            optimizer.register_step_pre_hook(self._update_begins),
            optimizer.register_step_post_hook(self._update_ends),
        ]

    def register_batch(self, *tensors: Tensor | None) -> None:
        """Label the tensors of a batch."""
        for tensor in tensors:
            if tensor is not None:
                self._label(tensor, Kind.INPUT, "batch")

    def register_cache(self, *tensors: Tensor) -> None:
        """Label keys, values and states of rows in flight."""
        for tensor in tensors:
            self._label(tensor, Kind.KV_CACHE, "cache")

    def enter(self, phase: Phase) -> None:
        """The instant at which a phase begins; what is alive then belongs to its peak too."""
        self._label_gradients()
        self._label_state()
        self._phase = phase
        self._note_peak()

    def restart(self) -> None:
        """Forget the past; what is alive stays registered and becomes the start of the tape."""
        alive = sorted(index for index, _ in self._alive.values())
        self._events = alive
        self._peaks = {}
        self._note_peak()

    # -- results -----------------------------------------------------------------------------

    @property
    def peaks(self) -> dict[Phase, int]:
        """The peak of each phase entered, bytes, in the order of `Phase`."""
        return {phase: self._peaks[phase][0] for phase in Phase if phase in self._peaks}

    @property
    def peak(self) -> int:
        """The largest of all instants, bytes."""
        return max((nbytes for nbytes, _ in self._peaks.values()), default=0)

    def ledger(self) -> Ledger:
        """What was alive at each phase's own peak, by kind and owner."""
        return Ledger(entries=tuple(e for phase in self.peaks for e in self._entries(phase)))

    def at_peak(self, phase: Phase | None = None) -> tuple[TensorRow, ...]:
        """The tensors alive at a phase's peak (or at the largest one), largest first."""
        if not self._peaks:
            return ()
        phase = phase or max(self.peaks, key=lambda p: self._peaks[p][0])
        rows = [self.describe(block) for block in self._alive_at(self._peaks[phase][1])]
        return tuple(sorted(rows, key=lambda row: -row.nbytes))

    def describe(self, block: Block) -> TensorRow:
        """The block as results show it."""
        return TensorRow(
            nbytes=block.nbytes,
            kind=self.kind_of(block),
            module=block.module,
            op=block.op,
            shape=tuple(block.shape),
            dtype="" if block.dtype is None else str(block.dtype).removeprefix("torch."),
            source=block.source,
        )

    def tape(self) -> list[tuple[int, int, int]]:
        """(+1 allocated or -1 released, storage, bytes), in order; storages of 0 bytes left out."""
        events = ((1, e) if e >= 0 else (-1, ~e) for e in self._events)
        return [(sign, i, self.blocks[i].nbytes) for sign, i in events if self.blocks[i].nbytes]

    def kind_of(self, block: Block) -> Kind:
        """Rule 8 of docs/ARCHITECTURE.md."""
        if block.kind is not None:
            return block.kind
        if block.vocab:
            return Kind.LOGITS
        return Kind.ACTIVATIONS if block.outlived else Kind.TEMPORARY

    def now(self) -> tuple[Phase, list[Entry], tuple[TensorRow, ...]]:
        """The phase, and what is alive at this moment."""
        blocks = self._alive_at(len(self._events))
        return self._phase, self._group(blocks, self._phase), tuple(map(self.describe, blocks))

    def owner_of(self, tensor: TensorRow) -> str:
        """The component that a ledger counts a tensor under."""
        return self._owner(tensor.kind, tensor.module)

    def _owner(self, kind: str, module: str) -> str:
        return "optimizer" if kind == Kind.OPTIMIZER_STATE else self._owners.find(module)

    def _entries(self, phase: Phase) -> list[Entry]:
        return self._group(self._alive_at(self._peaks[phase][1]), phase)

    def _group(self, blocks: list[Block], phase: Phase) -> list[Entry]:
        groups: dict[tuple[Kind, str], list[Block]] = {}
        for block in blocks:
            kind = self.kind_of(block)
            groups.setdefault((kind, self._owner(kind, block.module)), []).append(block)
        return [
            Entry(
                kind=kind,
                phase=phase,
                owner=owner,
                nbytes=sum(b.nbytes for b in group),
                because=describe(group),
            )
            for (kind, owner), group in sorted(groups.items())
        ]

    def _alive_at(self, position: int) -> list[Block]:
        alive: dict[int, Block] = {}
        for event in self._events[:position]:
            if event >= 0:
                alive[event] = self.blocks[event]
            else:
                del alive[~event]
        return [block for block in alive.values() if block.nbytes]

    # -- counting ----------------------------------------------------------------------------

    def __enter__(self) -> LiveBytes:
        self._note_peak()
        register_before = nn.modules.module.register_module_forward_pre_hook
        register_after = nn.modules.module.register_module_forward_hook
        self._hooks += [
            register_before(self._call_begins),
            register_after(self._call_ends, always_call=True),  # recomputation stops by raising
        ]
        self._sharded = "torch.distributed.fsdp" in sys.modules
        self._patches = ExitStack()
        self._patches.enter_context(propagation(self._hide, self._show))
        if self._sharded:
            self._patches.enter_context(meshes_outside_modes())
        self._patches.enter_context(resizes(self._on_resize))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._patches.close()
        for hook in self._hooks:
            hook.remove()
        self._label_gradients()
        self._label_state()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator and count what it returned."""
        if func is _DEVICE_OF_FAKE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # first, as it is asked for more often than all else
        if any([kind is not FakeTensor and is_wrapper(kind) for kind in types]):
            return NotImplemented  # its class runs operators on the tensors inside, seen here
        kwargs = kwargs or {}
        if self._hidden:
            return func(*args, **kwargs)
        if func is _WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # as it does; the fake one would make a tensor
        inside = self._workspace(func, args, kwargs) if self._workspace else None
        name, full, _ = find_names(func)
        held = self._take(inside.before, name) if inside else []
        out = self.run(func, args, kwargs) if self.run else func(*args, **kwargs)
        if torch.is_grad_enabled():
            self._remember_node()
        if isinstance(out, Tensor):
            self._track(out, name)
        elif isinstance(out, tuple | list):
            self._track_all(out, name)
        if inside:
            self._take(inside.lasting, CUBLAS)
            for index in (*held, *self._take(inside.after, name)):
                self._release(index)
        if self._sharded and full in BUFFERS:
            for kind, tensor in buffers(full, args, kwargs):
                self._label(tensor, kind)
        return out

    def _take(self, pieces: tuple[int, ...], op: str) -> list[int]:
        """What a kernel allocates inside itself."""
        return [self._allocate(n, op, Kind.WORKSPACE, False) for n in pieces if n]

    def _track_all(self, outputs: Iterable[Any], op: str) -> None:
        for out in outputs:
            if isinstance(out, Tensor):
                self._track(out, op)
            elif isinstance(out, tuple | list):
                self._track_all(out, op)

    def _track(self, tensor: Tensor, op: str) -> int | None:
        """The block of a tensor's storage, made when it is new; None on another device.

        A tensor that wraps others has no storage of its own: they are counted when they are made.
        """
        if is_wrapper(type(tensor)):
            return None
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != self._device_type:
            return None
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is not None:
            if self.blocks[known[0]].nbytes == storage.nbytes():
                return known[0]
            return self._resized(storage, op)
        shape = tensor.shape
        vocab = bool(shape) and shape[-1] == self._vocab
        index = self._allocate(storage.nbytes(), op, None, vocab)
        block = self.blocks[index]
        block.shape, block.dtype = shape, tensor.dtype
        self._watch(storage, index)
        return index

    def _resized(self, storage: torch.UntypedStorage, op: str) -> int:
        """Record a storage resized in place as a release and an allocation of the same kind."""
        old, _ = self._alive[storage._cdata]
        before = self.blocks[old]
        self._release(old)
        index = self._allocate(storage.nbytes(), op, before.kind, before.vocab)
        block = self.blocks[index]
        block.shape, block.dtype = before.shape, before.dtype
        if before.kind is not None:
            block.module = before.module
        self._watch(storage, index)
        return index

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        """Release the block when its storage is freed."""
        key = storage._cdata

        def freed(_: object) -> None:
            entry = self._alive.get(key)
            if entry is not None and entry[0] == index:
                del self._alive[key]
                self._release(index)

        self._alive[key] = (index, weakref.ref(storage, freed))

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._alive:
            self._resized(storage, "resize_")

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """What is allocated meanwhile is not counted."""
        self._hide()
        try:
            yield
        finally:
            self._show()

    def _hide(self) -> None:
        self._hidden += 1

    def _show(self) -> None:
        self._hidden -= 1

    def _allocate(self, nbytes: int, op: str, kind: Kind | None, vocab: bool) -> int:
        index = len(self.blocks)
        block = Block(nbytes, op, *self._place_now(), vocab)
        block.kind = kind
        block.stream = self.stream
        self.blocks.append(block)
        if self._frames:
            self._frames[-1][1].append(index)
        self._events.append(index)
        self.live += nbytes
        self._note_peak()
        return index

    def _release(self, index: int) -> None:
        block = self.blocks[index]
        block.released = True
        self._events.append(~index)
        self.live -= block.nbytes

    def _note_peak(self) -> None:
        known = self._peaks.get(self._phase)
        if known is None or self.live > known[0]:
            self._peaks[self._phase] = (self.live, len(self._events))

    # -- labels ------------------------------------------------------------------------------

    def _label(self, tensor: Tensor, kind: Kind, module: str = "") -> None:
        for part in inner_tensors(tensor).values():
            self._label_one(part, kind, module)

    def _label_one(self, tensor: Tensor, kind: Kind, module: str) -> None:
        index = self._track(tensor, "registered")
        if index is not None:
            block = self.blocks[index]
            reduced = kind is Kind.GRADIENTS and block.kind is Kind.REDUCE_SCATTER
            if block.kind is None or reduced:  # a reduced buffer may be the gradient itself
                block.kind, block.module = kind, module or block.module

    def _label_gradients(self) -> None:
        for name, parameter in self._parameters.items():
            self._label(parameter, Kind.PARAMETERS, name)  # FSDP2 pads shards in the first forward
            if parameter.grad is not None:
                self._label(parameter.grad, Kind.GRADIENTS, name)

    def _label_state(self) -> None:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        self._label(value, Kind.OPTIMIZER_STATE, name)

    def _update_begins(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        self._updating = True
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    name = self._names.get(parameter, "")
                    self._label(parameter.grad, Kind.GRADIENTS, name)

    def _update_ends(self, _: torch.optim.Optimizer, __: Any, ___: Any) -> None:
        self._updating = False

    # -- where -------------------------------------------------------------------------------

    def _call_begins(self, module: nn.Module, _: Any) -> None:
        name = self._modules.get(module)
        if name is not None:
            self._frames.append((name, []))

    def _call_ends(self, module: nn.Module, _: Any, __: Any) -> None:
        if module in self._modules and self._frames:
            for index in self._frames.pop()[1]:
                block = self.blocks[index]
                block.outlived = not block.released

    def _place_now(self) -> tuple[str, str]:
        """The module whose forward, recomputation or backward is running, and the line; or ""."""
        if self._updating:
            return OUTSIDE[Phase.OPTIMIZER_STEP], find_source()
        if self._frames:
            return self._frames[-1][0], find_source()
        node = _current_node() if _current_node else None
        if node is not None:  # the stack ends at `loss.backward()`, which is every node's line
            place = self._place_of_node.get(node._sequence_nr())
            return ("", find_source()) if place is None else place
        return OUTSIDE.get(self._phase, ""), find_source()

    def _remember_node(self) -> None:
        """Operators of the forward made autograd's latest node; its backward is this module's."""
        if _sequence_number is not None:
            number = _sequence_number() - 1
            if number not in self._place_of_node:
                path = self._frames[-1][0] if self._frames else OUTSIDE.get(self._phase, "")
                self._place_of_node[number] = path, find_source()
