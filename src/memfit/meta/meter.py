"""What is alive, byte for byte: a log of allocations and frees, read once at the end.

The log is written by storages that come and go with Python's own reference counts, so that code
written with the local variables of the real module holds what the real module holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memfit.core.units import MIB
from memfit.records.ledger import Kind

if TYPE_CHECKING:
    from memfit.meta.tensor import Tensor
    from memfit.meta.workspace import Grid


GRANULARITY = 512  # bytes; torch's caching allocator for CUDA rounds every request up to it
SMALL = MIB  # largest block of the pool that splits without a rest
SEGMENT = 20 * MIB  # holds requests below half of it
PASSES = 3  # run of a loop with many: the first, the second and the last
# looked up here a hundred thousand times a plan
LOGITS, ACTIVATIONS, TEMPORARY = Kind.LOGITS, Kind.ACTIVATIONS, Kind.TEMPORARY
ROUNDING = 2 * MIB  # of the segment that is made for one request of half of it or more


def block_size(nbytes: int) -> int:
    """Bytes that CUDA's caching allocator counts as allocated for one request; an estimate.

    c10/cuda/CUDACachingAllocator.cpp: a large block keeps a rest of up to 1 MiB. From 10 MiB on a
    request has a segment of its own, and its rest is known. Below, the rest depends on which block
    earlier requests have left; on average it was found to be 3/16 of the way to the next MiB, in
    replays of the allocator (bench/predict_grid.py measures what this leaves: 2 % at most).
    """
    size = -(-nbytes // GRANULARITY) * GRANULARITY
    if size <= SMALL:
        return size
    if size < SEGMENT // 2:
        return size + -size % MIB * 3 // 16
    rest = -size % ROUNDING
    return size + (rest if rest <= SMALL else 0)


class Meter:
    """The live bytes of one simulated device: a CPU's tensors, or a CUDA allocator's blocks."""

    def __init__(
        self,
        *,
        cuda: bool = False,
        grid: Grid | None = None,
        autocast: bool = False,
        low: str = "bfloat16",
        vocab: int = -1,
        unrolled: bool = False,
    ) -> None:
        self.cuda = cuda
        self.grid = grid  # of the device, where sums over rows are known to need partial results
        self.autocast = autocast
        self.low = low  # the dtype that autocast lowers to
        self.vocab = vocab
        self.unrolled = unrolled  # every pass of a loop runs, as the allocator would see them
        self.casts: dict[int, Tensor] | None = None  # of weights, which autocast's cache keeps:
        self.casts_frozen = False  # of those that are trained, and of others
        self.saver: Any = None  # the recomputed region that saved tensors are handed to
        self.forgets = False  # a product runs whose result no recomputation asks for
        self.graph = True  # whether operations are recorded for a backward: torch's grad mode
        self.sequence = 0  # autograd's sequence number
        self.owner = ""  # the component that is running
        self.on_product: Callable[[], None] | None = None  # told once of the next matrix product
        # told of each weight whose gradient is whole
        self.on_gradient: Callable[[Tensor], None] | None = None
        self.events: list[int] = []  # i: storage i was born; ~i: it died
        self.requested: list[int] = []  # bytes of each storage
        self.copies = 1  # what is made now stands for so many, one made after the other
        self.node_copies = 1  # and so does what the derivatives of it make
        self.counts: list[int] = []  # how many each storage stands for
        self.kinds: list[Kind] = []
        self.owners: list[str] = []
        self.stream = 0  # whose pools serve what is allocated now
        self.streams: list[int] = []  # of each storage
        self._calls: list[int] = [0]  # calls of modules that are open, innermost last
        self._next_call = 1
        self._open: set[int] = set()

    def allocate(self, nbytes: int, kind: Kind | None, last: int) -> tuple[int, int]:
        """Log a birth; returns the storage's index and the module call that made it."""
        requested = self.requested
        index = len(requested)
        requested.append(nbytes)
        self.counts.append(self.copies)
        call = 0
        if kind is None:
            call = self._calls[-1]
            if last == self.vocab:
                kind, call = LOGITS, 0
            else:
                kind = ACTIVATIONS if call else TEMPORARY
        self.kinds.append(kind)
        self.owners.append(self.owner)
        self.streams.append(self.stream)
        self.events.append(index)
        return index, call

    def free(self, index: int, call: int) -> None:
        """Log a death; what dies before the module that made it returns was a temporary."""
        if call in self._open:
            self.kinds[index] = TEMPORARY
        self.events.append(~index)

    def held(self, index: int) -> int:
        """Bytes of what holds a storage: itself, or its block."""
        return block_size(self.requested[index]) if self.cuda else self.requested[index]

    def begin_module(self) -> int:
        """Open a module's call: what is allocated in it and outlives it is an activation."""
        call = self._next_call
        self._next_call += 1
        self._calls.append(call)
        self._open.add(call)
        return call

    def end_module(self, call: int) -> None:
        """Close the call, when the local variables of the module's code are gone."""
        self._calls.pop()
        self._open.discard(call)

    @contextmanager
    def with_autocast(self, enabled: bool) -> Iterator[None]:
        """Autocast on or off: off below its dispatch key and in a backward."""
        before, self.autocast = self.autocast, enabled
        try:
            yield
        finally:
            self.autocast = before

    @contextmanager
    def without_graph(self) -> Iterator[None]:
        """`torch.no_grad()`."""
        before, self.graph = self.graph, False
        try:
            yield
        finally:
            self.graph = before

    def begin_product(self) -> None:
        """A matrix product is about to run."""
        if self.on_product is not None:
            callback, self.on_product = self.on_product, None
            callback()

    @contextmanager
    def standing_for(self, copies: int, gradients: int | None = None) -> Iterator[None]:
        """What is made inside stands for that many.

        gradients: as many as what its derivatives make stands for, where these are others.
        """
        before = self.copies, self.node_copies
        self.copies, self.node_copies = copies, copies if gradients is None else gradients
        try:
            yield
        finally:
            self.copies, self.node_copies = before

    def passes(self, count: int) -> range:
        """Return which of `count` passes to run: all, or the first, the second and the last.

        Without `unrolled`, what the others leave behind must be counted (`standing_for`).
        """
        return range(PASSES if count > PASSES and not self.unrolled else count)

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """What is allocated inside comes from the pools of this CUDA stream."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Within this context a selective region does not save products."""
        self.forgets = True
        try:
            yield
        finally:
            self.forgets = False

    @contextmanager
    def saving_to(self, saver: Any) -> Iterator[None]:
        """Saved tensors are handed to this; None leaves it as it is."""
        before = self.saver
        self.saver = before if saver is None else saver
        try:
            yield
        finally:
            self.saver = before

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of a saved tensor: a handle without its history, or a promise."""
        return tensor.detached() if self.saver is None else self.saver.pack(tensor)
