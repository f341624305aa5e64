"""What FSDP2 gathers, keeps and reduces: its units, with sizes only.

Written as torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py run
(torch 2.13): a unit's weights are gathered into one buffer and copied out of it before its
forward, resharded after it and gathered before its backward, while the next unit's are
prefetched. Its gradients are reduced in one buffer after its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from msgspec.structs import replace

from memfit.base_formats import stored_tensors
from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import Incoming, attach
from memfit.meta.layers.dequantised import QUANTISED_DTYPE
from memfit.meta.meter import Meter
from memfit.meta.tensor import Shape, Storage, Tensor, empty, parameter, row_major
from memfit.records import Record
from memfit.records.ledger import Kind
from memfit.records.model import DTYPE_BYTES

SHARDS = "shards"  # the owner of reduced gradients
# FSDP2's streams, as FSDPCommContext makes them; the default stream is 0
GATHERING, REDUCING = 1, 3
OnReduced = Callable[[Tensor], None]


class Dealt(Record, frozen=True, kw_only=True):
    """How the experts of a layer are dealt to ranks (`parallelism.experts`)."""

    ranks: int
    imbalance: float  # rows that a rank receives over those of an even routing
    parts: int  # ranks among which FSDP2 cuts what one has of the experts
    part: int  # this one's place among them


class Sharding(Record, frozen=True, kw_only=True):
    """How one rank of many holds a model."""

    shards: int  # ranks that share one copy
    shard: int  # this one's place among them
    copies: int  # of the model
    reshards: bool  # whole weights are given up between forward and backward
    low: str  # the dtype that fp32 weights are gathered in; "" is their own
    wide: str  # the dtype that gradients are reduced in; "" is their own
    tp: int = 1  # ranks that share each product, of whose part of the model this is a part
    coding: str = ""  # how frozen projections are quantised (`memfit.base_formats`)
    on_host: bool = False  # shards, and their gradients, wait in the host's memory
    ends: tuple[str, ...] = ("norm", "head")  # parts of the unit that a backward begins with
    joins: bool = False  # a tied embedding is of that unit, which is whole as long as a root's
    reads: bool = False  # nothing runs the head: its weight is gathered where it is read
    defers: bool = False  # gradients wait unsharded until the last micro-batch (`no_sync`)
    dealt: Dealt | None = None
    flat: bool = False  # FSDP1's units (`sizes.flat`), beside which autocast does what it does

    def padded(self, shape: Shape) -> int:
        """Elements of a rank's part of a buffer: the first dimension cut, the last parts padded."""
        return -(-shape[0] // self.shards) * prod(shape[1:])

    def local(self, shape: Shape) -> Shape:
        """A rank's shard, as `parallelism.shards.local_shape`."""
        rows = -(-shape[0] // self.shards)
        return (max(0, min(rows, shape[0] - self.shard * rows)), *shape[1:])

    @property
    def of_experts(self) -> Sharding:
        """How it holds the experts that are dealt to it."""
        assert self.dealt is not None
        return replace(self, shards=self.dealt.parts, shard=self.dealt.part)

    def gathered(self, dtype: str) -> str:
        """The dtype of a weight while it is whole."""
        return self.low if self.low and dtype == "float32" else dtype


class Whole(Storage):
    """The bytes of a gathered weight, which come and go while tensors refer to them."""

    __slots__ = ("held", "inner", "nbytes")

    def __init__(self, meter: Meter, nbytes: int) -> None:
        self.meter, self.nbytes = meter, nbytes
        self.inner: Unit | None = None  # the unit within a block that the weight is of
        self.index, self.call, self.held = -1, 0, False

    def fill(self) -> None:
        """Allocate them."""
        if not self.held:
            self.index, self.call = self.meter.allocate(self.nbytes, Kind.ALL_GATHER, 1)
            self.held = True

    def release(self) -> None:
        """Free them."""
        if self.held:
            self.held = False
            self.meter.free(self.index, self.call)

    def __del__(self) -> None:
        self.release()


class Shared:
    """What the units of one model share: torch's FSDPCommContext."""

    def __init__(self, meter: Meter, sharding: Sharding, on_reduced: OnReduced | None) -> None:
        self.meter, self.sharding, self.on_reduced = meter, sharding, on_reduced
        self.units: list[Unit] = []  # in the order of `named_modules`
        self.order: list[Unit] = []  # of the forwards that ran
        self.gathering: Tensor | None = None  # a forward's buffer, kept until the next copies out
        self.reducing: list[Tensor] = []  # a reduction's input, kept until the next begins
        self.syncs = True  # whether this micro-batch's gradients are reduced
        self.backward = False  # whether a backward runs: forwards are of recomputed blocks

    def end_forward(self) -> None:
        """The root's forward is over."""
        self.gathering = None

    def end_backward(self) -> None:
        """After all units: nothing is on its way any more."""
        self.backward = False
        self.reducing.clear()
        self.order.clear()


class Unit:
    """Weights that are gathered, and whose gradients are reduced, together."""

    def __init__(self, shared: Shared, owner: str, *, reshards: bool, inner: bool = False) -> None:
        """inner: of experts within a block, which are dealt to ranks."""
        self.shared, self.owner, self.reshards = shared, owner, reshards
        self.inner = inner
        self.sharding = shared.sharding.of_experts if inner else shared.sharding
        self.weights: list[tuple[Tensor, Tensor]] = []  # whole, and this rank's shard
        self.summed: list[Tensor] = []  # of those, whole weights on each of the tp ranks
        self.gradient: Tensor | None = None  # of all shards: they are views of one buffer
        self._state = ""
        self._whole = False
        self._pending: list[Tensor] | None = None  # gathered, and not copied out yet
        self._places: list[int] = []  # in `Shared.order`
        self._reduced: Tensor | None = None  # kept until the end where copies are summed
        shared.units.append(self)

    def add(self, shape: Shape, dtype: str, *, trainable: bool, summed: bool = False) -> Tensor:
        """A weight of this unit, not gathered; summed: its gradient is a sum over the tp ranks.

        Of a quantised one each tensor that holds it is cut and gathered.
        """
        sharding, meter = self.sharding, self.shared.meter
        if dtype == QUANTISED_DTYPE and sharding.coding:
            held = stored_tensors(sharding.coding, shape)
            codes, *_ = [self._add(t.shape, t.dtype, trainable=False) for t in held]
            return Tensor(meter, shape, QUANTISED_DTYPE, row_major(shape), codes.storage)
        whole = self._add(shape, dtype, trainable=trainable)
        if summed:
            self.summed.append(whole)
        return whole

    def _add(self, shape: Shape, dtype: str, *, trainable: bool) -> Tensor:
        sharding, meter = self.sharding, self.shared.meter
        gathered = sharding.gathered(dtype)
        nbytes = sharding.padded(shape) * sharding.shards * DTYPE_BYTES[gathered]
        storage = Whole(meter, nbytes)
        storage.inner = self if self.inner else None
        whole = Tensor(meter, shape, gathered, row_major(shape), storage)
        whole.requires_grad = trainable
        shard = parameter(meter, sharding.local(shape), dtype, trainable=trainable)
        self.weights.append((whole, shard))
        return whole

    # -- the forward ---------------------------------------------------------------------------

    def enter(self, x: Tensor) -> Tensor:
        """Before the forward of a module with this input: the same, marked where it enters."""
        return self.enter_with(x)[0]

    def enter_with(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The same of several inputs. A block that is recomputed may enter an inner unit whose
        backward has begun: it is whole, and its hooks are there."""
        if self._state == "backward":
            return inputs
        self.gather()
        node = record(self._leave_backward, [x for x in inputs if x.requires_grad])
        if node is None:
            return inputs
        return tuple(attach(node, x.detached()) if x.requires_grad else x for x in inputs)

    def gather(self) -> None:
        """Before a forward whose input has no gradient."""
        self._state = "forward"
        self._fetch()
        self._copy_out()

    def leave(self, out: Tensor) -> None:
        """After the forward; out: what a backward begins with."""
        if self._state == "backward":
            return
        if self.shared.backward:  # of a block that is recomputed: to torch a forward of its own,
            self.shared.gathering = None  # with whose end the buffer goes (`iter_forward_root`)
            self._state = ""
            return
        if self.reshards:
            self.give_up()
        self._places.append(len(self.shared.order))
        self.shared.order.append(self)
        if out.grad_fn is not None and out.requires_grad:
            out.grad_fn.hooks = (*out.grad_fn.hooks, self._enter_backward)
        self._state = ""

    @property
    def entered(self) -> bool:
        """Whether a forward has begun and not ended."""
        return self._state == "forward"

    def _owned(self) -> str:
        """Make the unit the owner of what is allocated; returns whose turn it was."""
        before, self.shared.meter.owner = self.shared.meter.owner, self.owner
        return before

    def _fetch(self) -> None:
        if self._pending is not None or self._whole:
            return
        sharding, meter = self.sharding, self.shared.meter
        if sharding.shards == 1:
            self._pending = []
            return
        before = self._owned()
        dtypes = {w.dtype for w, _ in self.weights}
        dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"  # weights of several go as bytes
        nbytes = sum(sharding.padded(w.shape) * DTYPE_BYTES[w.dtype] for w, _ in self.weights)
        total = nbytes * sharding.shards // DTYPE_BYTES[dtype]
        with meter.on_stream(GATHERING):
            entering = self._from_host() if sharding.on_host else self._cast()
            self._pending = [empty(meter, (total,), dtype, Kind.ALL_GATHER)]
        entering.clear()
        meter.owner = before

    def _cast(self) -> list[Tensor]:
        """This rank's shards as they are gathered, where they are not already so: one buffer."""
        sharding, meter = self.sharding, self.shared.meter
        narrower = (w for w, shard in self.weights if w.dtype != shard.dtype)
        cast = sum(sharding.padded(w.shape) for w in narrower)
        return [empty(meter, (cast,), sharding.low, Kind.ALL_GATHER)] if cast else []

    def _from_host(self) -> list[Tensor]:
        """Each of this rank's shards, copied to the device and cast there."""
        sharding, meter = self.sharding, self.shared.meter
        found = []
        for weight, shard in self.weights:
            size = (sharding.padded(weight.shape),)
            part = empty(meter, size, shard.dtype, Kind.ALL_GATHER)
            if weight.dtype != shard.dtype:
                part = empty(meter, size, weight.dtype, Kind.ALL_GATHER)
            found.append(part)
        return found

    def _copy_out(self) -> None:
        if self._pending is None:
            return
        forward = self._state == "forward"
        previous: Tensor | None = None  # a local variable of torch's, too: alive until the end
        if forward:
            previous, self.shared.gathering = self.shared.gathering, None
        before, alone = self._owned(), self.sharding.shards == 1
        for weight, shard in self.weights:
            part = None
            if alone and weight.dtype != shard.dtype:
                part = empty(weight.meter, weight.shape, weight.dtype, Kind.ALL_GATHER)
            _bytes_of(weight).fill()
            del part
        self._whole = True
        if forward and self._pending:
            self.shared.gathering = self._pending[0]
        self._pending = None
        self.shared.meter.owner = before
        del previous

    def give_up(self) -> None:
        """Free the gathered weights."""
        for weight, _ in self.weights:
            _bytes_of(weight).release()
        self._whole = False

    # -- the backward --------------------------------------------------------------------------

    def _enter_backward(self) -> None:
        if self._state == "backward":
            return
        self._state = "backward"
        self._fetch()
        self._copy_out()
        if not self._places:
            return
        place = self._places.pop()
        if place:
            self.shared.order[place - 1]._fetch()

    def _leave_backward(self, node: Node, grads: Incoming) -> Gradients:
        self.reduce()
        return grads

    def reduce(self) -> None:
        """When the backward is over: give the weights up, reduce their gradients."""
        self._state = "reduced"
        if not self.shared.syncs:
            self.give_up()
            return
        grads: list[Tensor] = []
        trained: list[Tensor] = []
        for weight, shard in self.weights:
            if weight.grad is not None:
                grad = weight.grad
                over = any(weight is one for one in self.summed)
                grads.append(empty(grad.meter, grad.shape, grad.dtype) if over else grad)
                del grad
                trained.append(shard)
                weight.grad = None
        self.give_up()
        del self.shared.reducing[:1]
        if grads:
            before = self._owned()
            self._reduce(grads, trained)
            self.shared.meter.owner = before

    def _reduce(self, grads: list[Tensor], trained: Sequence[Tensor]) -> None:
        shared, sharding, meter = self.shared, self.sharding, self.shared.meter
        dtype = sharding.wide or grads[0].dtype
        part = sum(sharding.padded(grad.shape) for grad in grads)
        entering = empty(meter, (part * sharding.shards,), dtype, Kind.REDUCE_SCATTER)
        # a loop's variable of torch's `foreach_reduce` (2.11 to 2.13): alive until that returns
        last = grads[-1] if sharding.shards > 1 else None
        grads.clear()
        with meter.on_stream(REDUCING):
            reduced = empty(meter, (part,), dtype, Kind.REDUCE_SCATTER)
            if sharding.shards == 1:  # torch divides, by 1, what one rank need not reduce
                empty(meter, (part,), dtype, Kind.REDUCE_SCATTER)
            if sharding.copies > 1:
                self._reduced = reduced
            if trained[0].dtype != dtype:
                reduced = empty(meter, (part,), trained[0].dtype, Kind.REDUCE_SCATTER)
        del last
        shared.reducing.append(entering)
        if sharding.on_host:
            return
        if shared.on_reduced is not None:
            meter.kinds[reduced.storage.index] = Kind.GRADIENTS
            for shard in trained:
                shared.on_reduced(shard)
        elif self.gradient is None:
            self._keep(reduced)

    def _keep(self, reduced: Tensor) -> None:
        """A rank's part of the gradients, until the optimizer's step."""
        meter, index = self.shared.meter, reduced.storage.index
        meter.kinds[index] = Kind.GRADIENTS
        if self.sharding.defers:  # others wait unsharded, in the pool of all else
            meter.owners[index] = SHARDS
        self.gradient = reduced

    def finish(self) -> None:
        """At the end of the whole backward."""
        if self._state != "reduced":
            self.reduce()
        self._state = ""
        self._pending = self._reduced = None
        self._places.clear()


def whole(weight: Tensor) -> Tensor:
    """`DTensor.full_tensor()` of what no unit has gathered; else the weight itself."""
    if not isinstance(weight.storage, Whole) or weight.storage.held:
        return weight
    return empty(weight.meter, weight.shape, weight.dtype, Kind.ALL_GATHER)


def inner_unit(weight: Tensor) -> Unit | None:
    """The unit within a block that a weight is of; None where it is of the block's or of none."""
    return weight.storage.inner if isinstance(weight.storage, Whole) else None


def _bytes_of(weight: Tensor) -> Whole:
    whole = weight.storage
    assert isinstance(whole, Whole)
    return whole
