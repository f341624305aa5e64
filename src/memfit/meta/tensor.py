"""A tensor without data: shape, strides, dtype, and a storage that counts its bytes."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from memfit.meta.meter import Meter
from memfit.records.ledger import Kind
from memfit.records.model import DTYPE_BYTES

if TYPE_CHECKING:
    from memfit.meta.autograd import Node
    from memfit.meta.layers.lean import Made

Shape = tuple[int, ...]
SHAPES = 2**14  # remembered


class Storage:
    """Bytes on the device, alive as long as a tensor refers to them."""

    __slots__ = ("call", "index", "meter")

    def __init__(self, meter: Meter, nbytes: int, kind: Kind | None, last: int) -> None:
        self.meter = meter
        self.index, self.call = meter.allocate(nbytes, kind, last)

    def __del__(self) -> None:
        self.meter.free(self.index, self.call)


class Tensor:
    """A view of a storage, with the autograd node that made it."""

    __slots__ = (
        "_contiguous", "accumulator", "dtype", "grad", "grad_fn", "made", "meter", "output",
        "requires_grad", "shape", "storage", "strides",
    )  # fmt: skip

    def __init__(
        self, meter: Meter, shape: Shape, dtype: str, strides: Shape, storage: Storage
    ) -> None:
        self.meter = meter
        self.shape = shape
        self.dtype = dtype
        self.strides = strides
        self.storage = storage
        self.requires_grad = False
        self.grad_fn: Node | None = None
        self.output = 0  # which output of grad_fn
        self.grad: Tensor | None = None
        self.accumulator: Node | None = None
        self.made: Made | None = None  # of what, where a lean operation made it
        self._contiguous: bool | None = None  # not asked yet

    def detached(self) -> Tensor:
        """The same storage without history."""
        return Tensor(self.meter, self.shape, self.dtype, self.strides, self.storage)

    def viewed(self, shape: Shape, strides: Shape, dtype: str = "") -> Tensor:
        """The same storage, seen otherwise; without history."""
        return Tensor(self.meter, shape, dtype or self.dtype, strides, self.storage)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return count_bytes(self.shape, self.dtype)

    @property
    def contiguous(self) -> bool:
        """Whether elements lie in row-major order, dimensions of size 1 aside."""
        if self._contiguous is None:
            self._contiguous = _is_row_major(self.shape, self.strides)
        return self._contiguous


# shapes repeat: what follows from them alone is worked out once
@lru_cache(maxsize=SHAPES)
def count_bytes(shape: Shape, dtype: str) -> int:
    """Return the bytes of a tensor of this shape and dtype."""
    return prod(shape) * DTYPE_BYTES[dtype]


@lru_cache(maxsize=SHAPES)
def _is_row_major(shape: Shape, strides: Shape) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def empty(
    meter: Meter, shape: Shape, dtype: str, kind: Kind | None = None, strides: Shape | None = None
) -> Tensor:
    """Return a new tensor on the device, row-major by default."""
    storage = Storage(meter, count_bytes(shape, dtype), kind, shape[-1] if shape else 1)
    tensor = Tensor(meter, shape, dtype, strides or row_major(shape), storage)
    if strides is None:
        tensor._contiguous = True
    return tensor


def workspace(meter: Meter, *pieces: int) -> list[Tensor]:
    """Bytes that a kernel takes from the allocator, held for as long as the caller keeps them.

    A kernel that takes them behind its results gives them back at once: its caller keeps nothing.
    """
    return [empty(meter, (n,), "uint8", Kind.WORKSPACE) for n in pieces if n]


def parameter(meter: Meter, shape: Shape, dtype: str, *, trainable: bool) -> Tensor:
    """A registered parameter; trainable ones receive a gradient."""
    tensor = empty(meter, shape, dtype, Kind.PARAMETERS)
    tensor.requires_grad = trainable
    return tensor


@lru_cache(maxsize=SHAPES)
def row_major(shape: Shape) -> Shape:
    """Strides of a contiguous tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=SHAPES)
def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape of an elementwise result."""
    if a == b:
        return a
    n = max(len(a), len(b))
    padded = zip((1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b, strict=True)
    return tuple(y if x == 1 else x for x, y in padded)


def elementwise_strides(shape: Shape, operands: tuple[Tensor, ...]) -> Shape:
    """Strides of an elementwise result: the operands' order of dimensions, made dense.

    As ATen's TensorIterator: the first operand that tells two dimensions apart decides.
    """
    for t in operands:
        # most are known to be contiguous, which is read without a call
        if t.shape != shape or not (t._contiguous or t.contiguous):
            break
    else:
        return row_major(shape)
    return _dense(shape, tuple(_broadcast_strides(shape, t.shape, t.strides) for t in operands))


@lru_cache(maxsize=SHAPES)
def _dense(shape: Shape, padded: tuple[Shape, ...]) -> Shape:
    """Strides without gaps in the order of dimensions of the padded strides."""
    result = [0] * len(shape)
    step = 1
    for dim in _fastest_first(shape, padded):
        result[dim] = step
        step *= shape[dim]
    return tuple(result)


@lru_cache(maxsize=SHAPES)
def _broadcast_strides(shape: Shape, own: Shape, strides: Shape) -> Shape:
    """An operand's strides over the result's dimensions, 0 where it is broadcast."""
    lead = len(shape) - len(own)
    pairs = zip(own, strides, shape[lead:], strict=True)
    return (0,) * lead + tuple(0 if s == 1 and n != 1 else stride for s, stride, n in pairs)


def _fastest_first(shape: Shape, padded: tuple[Shape, ...]) -> list[int]:
    """Return the dimensions, innermost in memory first; insertion sort, as ties are not total."""
    order = list(range(len(shape) - 1, -1, -1))
    for i in range(1, len(order)):
        at = i
        for j in range(i - 1, -1, -1):
            comparison = _compare(shape, padded, order[j], order[at])
            if comparison > 0:
                order[j], order[at] = order[at], order[j]
                at = j
            elif comparison < 0:
                break
    return order


def _compare(shape: Shape, padded: tuple[Shape, ...], low: int, high: int) -> int:
    """1: `low` has the larger steps and must move out; -1: it stays; 0: nobody knows."""
    for strides in padded:
        a, b = strides[low], strides[high]
        if a == 0 or b == 0:
            continue
        if a != b:
            return 1 if a > b else -1
        if shape[low] > shape[high]:
            return 1
    return 0


@lru_cache(maxsize=SHAPES)
def view_strides(shape: Shape, strides: Shape, new: Shape) -> Shape | None:
    """Strides of a view with another shape; None when only a copy can have it (ATen's rule)."""
    if prod(shape) == 0:
        return row_major(new)
    result = [0] * len(new)
    at = len(new) - 1
    chunk_base = strides[-1] if strides else 1
    tensor_numel = view_numel = 1
    for dim in range(len(shape) - 1, -1, -1):
        tensor_numel *= shape[dim]
        last = dim == 0
        if last or (shape[dim - 1] != 1 and strides[dim - 1] != tensor_numel * chunk_base):
            while at >= 0 and (view_numel < tensor_numel or new[at] == 1):
                result[at] = view_numel * chunk_base
                view_numel *= new[at]
                at -= 1
            if view_numel != tensor_numel:
                return None
            if not last:
                chunk_base = strides[dim - 1]
                tensor_numel = view_numel = 1
    return tuple(result) if at == -1 else None


def channels_last(x: Tensor) -> bool:
    """Whether ATen takes strides for those of images whose channels lie last
    (c10/core/MemoryFormat.h, is_channels_last_strides_2d)."""
    if len(x.shape) != 4:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if x.strides[dim] < least or (dim == 0 and least == x.strides[1]):
            return False
        least = x.strides[dim] * max(x.shape[dim], 1)
    return x.strides[1] != 0


@lru_cache(maxsize=SHAPES)
def channels_last_strides(shape: Shape) -> Shape:
    """Strides of a new tensor of four dimensions, whose second lies last."""
    n, c, h, w = row_major((shape[0], shape[2], shape[3], shape[1]))
    return n, w, c, h
