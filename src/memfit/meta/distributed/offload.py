"""Saved tensors that wait in host memory: what `train/step/offload.py` holds on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from memfit.meta.meter import Meter
from memfit.meta.tensor import Shape, Storage, Tensor, empty
from memfit.records.ledger import Kind
from memfit.records.model import DTYPE_BYTES

FLOATING = ("float32", "bfloat16", "float16")


class Parcel:
    """One storage, of which a CPU's host copy is counted as any tensor."""

    __slots__ = ("__weakref__", "device", "dtype", "host", "numel")

    def __init__(self, numel: int, dtype: str, host: Tensor | None) -> None:
        self.numel, self.dtype, self.host = numel, dtype, host
        self.device: Tensor | None = None


class Ticket:
    """A saved tensor of an offloaded block."""

    __slots__ = ("load", "parcel", "shape", "strides")

    def __init__(self, load: Load, parcel: Parcel, shape: Shape, strides: Shape) -> None:
        self.load, self.parcel, self.shape, self.strides = load, parcel, shape, strides

    def fetch(self) -> Tensor:
        """Return the tensor on the device, and prefetch the block below."""
        self.load.arrive()
        found = self.parcel.device
        assert found is not None
        return found.viewed(self.shape, self.strides)


class Load:
    """What one offloaded block saves; a `saver` of the meter."""

    selective = False  # nothing of products, as a selective region does

    def __init__(self, meter: Meter, before: Load | None, others: Iterable[Tensor]) -> None:
        self.meter, self.before = meter, before
        self.others = {id(t.storage) for t in others}
        self.known: dict[int, Parcel] = {}
        self.parcels: list[ref[Parcel]] = []
        self.leaving: list[Storage] = []
        self.loaded = self.arrived = False
        self.nbytes = 0  # on the host

    def pack(self, x: Tensor) -> Any:
        """See `train.offload.Load.pack`."""
        meter, storage = x.meter, x.storage
        weight = meter.kinds[storage.index] is Kind.PARAMETERS
        if weight or id(storage) in self.others or x.dtype not in FLOATING or len(x.shape) < 2:
            return x.detached()
        parcel = self.known.get(id(storage))
        if parcel is None:
            numel = meter.requested[storage.index] // DTYPE_BYTES[x.dtype]
            host = None if meter.cuda else empty(meter, (numel,), x.dtype)
            parcel = self.known[id(storage)] = Parcel(numel, x.dtype, host)
            self.nbytes += numel * DTYPE_BYTES[x.dtype]
            self.parcels.append(ref(parcel))
            self.leaving.append(storage)
        return Ticket(self, parcel, x.shape, x.strides)

    def arrive(self) -> None:
        """Bring the block's saved tensors back at the first use; prefetch the block below."""
        if not self.arrived:
            self.arrived = True
            self.bring_back()
            if self.before is not None:
                self.before.bring_back()

    def bring_back(self) -> None:
        """Every storage that some node still wants."""
        if self.loaded:
            return
        self.loaded = True
        for parcel in [p for r in self.parcels if (p := r()) is not None]:
            parcel.device = empty(self.meter, (parcel.numel,), parcel.dtype)
            parcel.host = None
