"""Storages: what is known of one, tensors that only hold others, and resizing in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memfit.core import units
from memfit.records.ledger import Kind


class Block:
    """One storage from its allocation to its release."""

    __slots__ = (
        "dtype", "kind", "module", "nbytes", "op", "outlived", "released", "shape", "source",
        "stream", "vocab",
    )  # fmt: skip

    def __init__(self, nbytes: int, op: str, module: str, source: str, vocab: bool) -> None:
        self.nbytes = nbytes
        self.op = op
        self.module = module  # path of the module, or of the parameter; "" outside all of them
        self.source = source  # the line that asked for it; of a backward, its forward's
        self.vocab = vocab  # whether the last dimension is the vocabulary
        self.shape: Sequence[int] = ()  # of the first tensor on it; () inside a kernel
        self.dtype: torch.dtype | None = None
        self.kind: Kind | None = None  # what it was registered as
        self.outlived = False  # whether it outlived the call of the module that made it
        self.released = False
        self.stream = 0  # the stream current when it was allocated

    def renamed(self, module: str) -> Block:
        """The same in another module."""
        made = Block(self.nbytes, self.op, module, self.source, self.vocab)
        made.shape, made.dtype, made.kind = self.shape, self.dtype, self.kind
        made.outlived, made.released, made.stream = self.outlived, self.released, self.stream
        return made


@cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class hold others instead of a storage (low-bit states, DTensor)."""
    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FakeTensor)


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors that a tensor consists of, by dotted name; itself under "" when plain."""
    if not is_wrapper(type(tensor)):
        return {"": tensor}
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    found = {}
    for name in names:
        part = getattr(tensor, name)
        if not isinstance(part, Tensor):
            continue  # DTensor's mesh
        for rest, inner in inner_tensors(part).items():
            found[f"{name}.{rest}".rstrip(".")] = inner
    return found


@contextmanager
def resizes(then: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `then` after each `UntypedStorage.resize_`, with which FSDP2 frees gathered weights.

    It is a method of the storage: no operator is dispatched.
    """
    plain = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
        out = plain(storage, nbytes)
        then(storage)
        return out

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


def describe(group: list[Block]) -> str:
    """A group of blocks in words: how many, and the largest."""
    largest = max(group, key=lambda block: block.nbytes)
    place = f" of {largest.module}" if largest.module else ""
    count = "1 tensor" if len(group) == 1 else f"{len(group)} tensors"
    return f"{count}, largest {units.show_bytes(largest.nbytes)}{place} ({largest.op})"
