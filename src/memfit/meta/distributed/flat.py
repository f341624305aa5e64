"""What FSDP1 gathers, keeps and reduces: the weights of a unit are one tensor, its flat parameter.

Written as torch 2.13 runs it (distributed/fsdp/_flat_param.py and _runtime_utils.py, the same as in
2.2): weights are views of the flat parameter. At the end of the unit's backward its gradient is
concatenated from theirs, the unit is resharded, and the gradient is reduced.
"""

from __future__ import annotations

from memfit.meta.distributed.sharding import Shared, Unit, Whole
from memfit.meta.tensor import Shape, Tensor, empty, parameter, row_major
from memfit.records.ledger import Kind
from memfit.records.model import DTYPE_BYTES


class FlatUnit(Unit):
    """One `FullyShardedDataParallel` module: weights of one dtype, all of them trained."""

    def __init__(self, shared: Shared, owner: str, *, reshards: bool) -> None:
        super().__init__(shared, owner, reshards=reshards)
        self._flat = Whole(shared.meter, 0)
        self._elements = 0
        self._stored = ""  # the shard's dtype
        self._joined: Tensor | None = None  # gradients of earlier micro-batches, unsharded

    @property
    def _part(self) -> int:
        """Elements of a rank's shard."""
        return -(-self._elements // self.shared.sharding.shards)

    def _add(self, shape: Shape, dtype: str, *, trainable: bool) -> Tensor:
        sharding, meter = self.shared.sharding, self.shared.meter
        gathered = sharding.gathered(dtype)
        whole = Tensor(meter, shape, gathered, row_major(shape), self._flat)
        whole.requires_grad = trainable
        self._elements += whole.numel
        self._stored = dtype
        self._flat.nbytes = self._part * sharding.shards * DTYPE_BYTES[gathered]
        shard = parameter(meter, sharding.local(shape), dtype, trainable=trainable)
        self.weights.append((whole, shard))
        return whole

    def _fetch(self) -> None:
        if self._whole:
            return
        before = self._owned()
        entering = self._entering()
        self._flat.fill()
        self._whole = True
        entering.clear()
        self.shared.meter.owner = before

    def _entering(self) -> list[Tensor]:
        """The shard as it is gathered: cast, where gathering casts, and copied from the host."""
        sharding, meter = self.shared.sharding, self.shared.meter
        low, found = sharding.gathered(self._stored), []
        if low != self._stored:
            found.append(empty(meter, (self._part,), low, Kind.ALL_GATHER))
        if sharding.on_host:
            copied = empty(meter, (self._part,), self._stored, Kind.ALL_GATHER)
            if not found:  # else it has been copied into the cast one
                found.append(copied)
            del copied
        return found

    def _copy_out(self) -> None:
        """Nothing to copy: weights are views."""

    def give_up(self) -> None:
        """Free the gathered weights."""
        self._flat.release()
        self._whole = False

    def reduce(self) -> None:
        """When the backward is over: join the gradients, give the weights up, reduce."""
        self._state = "reduced"
        before = self._owned()
        self._join()
        if self.shared.syncs or self.shared.sharding.reshards:
            self.give_up()
        if self.shared.syncs and self._joined is not None:
            self._scatter(self._joined)
        self.shared.meter.owner = before

    def _join(self) -> None:
        grads = [weight.grad for weight, _ in self.weights if weight.grad is not None]
        if not grads:
            return
        joined = empty(grads[0].meter, (self._elements,), grads[0].dtype, Kind.GRADIENTS)
        grads.clear()
        for weight, _ in self.weights:
            weight.grad = None
        if self._joined is None:
            self._joined = joined

    def _scatter(self, joined: Tensor) -> None:
        sharding, meter = self.shared.sharding, self.shared.meter
        self._joined = None
        dtype, part = sharding.wide or joined.dtype, (self._part,)
        reduced = empty(meter, part, dtype, Kind.REDUCE_SCATTER)
        if dtype != self._stored:
            reduced = empty(meter, part, self._stored, Kind.REDUCE_SCATTER)
        self._keep(reduced)

    def finish(self) -> None:
        """At the end of the whole backward; what went to the host is let go only here."""
        super().finish()
        if self.shared.sharding.on_host and self.shared.syncs:
            self.gradient = None
