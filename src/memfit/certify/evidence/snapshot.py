"""A replay in the format of `torch.cuda.memory._snapshot()`, which PyTorch's memory viewer opens.

Keys and their order of events are those of torch 2.13 (`torch/csrc/cuda/Module.cpp` and
`CUDACachingAllocator.cpp`): every allocation and release of storages and segments with its
address, and at the end every segment with its blocks. The clock counts events of the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from memfit.allocator.caching import CachingAllocator, OutOfMemory, follow
from memfit.allocator.segments import Block
from memfit.allocator.settings import INTERVALS, UNLIMITED, Settings
from memfit.allocator.tape import Event, Frame

Frames = Callable[[int], Sequence[Frame]]
FIRST_ADDRESS = 2**46  # near where CUDA's addresses lie; the viewer takes 0 for no address
NO_LIMIT = 2**63 - 1  # how torch writes an unlimited size


def nowhere(tensor: int) -> Sequence[Frame]:
    """Frames of a storage of which nothing is known."""
    del tensor
    return ()


def write_snapshot(
    tape: Sequence[Event],
    settings: Settings,
    *,
    frames: Frames = nowhere,
    marks: Sequence[int] = (),
    phases: Sequence[str] = (),
) -> dict[str, Any]:
    """Replay a tape and write down what the allocator does; pickle it for pytorch.org/memory_viz.

    frames: where a storage of the tape was made, innermost frame first, as torch records it.
    marks, phases: where stretches of the tape begin after the first, and the name of each (one
    more than marks); they become the viewer's annotations. A tape that does not fit ends with the
    event `oom`.
    """
    allocator = RecordingAllocator(settings, frames)
    for allocator.now, event in enumerate(tape):
        try:
            follow(allocator, event)
        except OutOfMemory:
            break
    return {
        "segments": list(allocator.describe_segments()),
        "device_traces": [allocator.entries],
        "allocator_settings": _describe_settings(settings),
        "external_annotations": list(_annotate(marks, phases, len(tape))),
    }


class RecordingAllocator(CachingAllocator):
    """A replay that writes an entry for everything that torch writes one for."""

    def __init__(self, settings: Settings, frames: Frames) -> None:
        super().__init__(settings)
        self.entries: list[dict[str, Any]] = []
        self.now = 0  # index of the event that is followed
        self.next_address = FIRST_ADDRESS
        self._frames = frames
        self._stacks: dict[int, list[dict[str, Any]]] = {}  # shared, so that a pickle is small
        self.tensors: dict[int, int] = {}  # by the identity of the block that holds it

    def allocate(self, tensor: int, nbytes: int, stream: int = 0) -> None:
        """Serve one storage and record it; raises OutOfMemory, which is recorded too."""
        try:
            super().allocate(tensor, nbytes, stream)
        except OutOfMemory:
            free = self._free_on_device()
            entry = self._entry("oom", self.round_size(nbytes), stream, tensor)
            self.entries.append({**entry, "device_free": free})
            raise
        if nbytes:
            block = self.blocks[tensor]
            self.tensors[id(block)] = tensor
            self._write("alloc", block.address, nbytes, stream, tensor)

    def free(self, tensor: int) -> None:
        """Release a storage; its block may be cached only later."""
        if block := self.blocks.get(tensor):
            self._write("free_requested", block.address, block.requested, block.pool.stream, tensor)
        super().free(tensor)

    def cache(self, block: Block) -> None:
        """Put a block into its pool."""
        tensor = self.tensors.pop(id(block))
        self._write("free_completed", block.address, block.requested, block.pool.stream, tensor)
        super().cache(block)

    def log(self, action: str, address: int, nbytes: int, stream: int) -> None:
        """Record a segment (or pages of one) that is allocated or released."""
        self._write(action, address, nbytes, stream, None)

    def describe_segments(self) -> Iterator[dict[str, Any]]:
        """Every segment with its blocks, by address; of expandable ones each mapped stretch."""
        cached = (b for pool in self.pools.values() for _, _, b in pool.free)
        blocks = sorted((*self.blocks.values(), *self.delayed, *cached), key=lambda b: b.address)
        starts = [not (b.previous and b.previous.mapped) for b in blocks]
        number = 0
        numbered = []
        for block, start in zip(blocks, starts, strict=True):
            number += start
            numbered.append((number, block))
        for _, group in groupby(numbered, key=lambda pair: pair[0]):
            yield self._describe_segment([block for _, block in group])

    def _describe_segment(self, blocks: Sequence[Block]) -> dict[str, Any]:
        described = [self._describe_block(block) for block in blocks]
        pool = blocks[0].pool
        active = [b for b in described if b["state"] != "inactive"]
        return {
            "device": 0,
            "address": blocks[0].address,
            "total_size": sum(b["size"] for b in described),
            "allocated_size": sum(b["size"] for b in described if b["state"] == "active_allocated"),
            "active_size": sum(b["size"] for b in active),
            "requested_size": sum(b["requested_size"] for b in active),
            "stream": pool.stream,
            "segment_type": "small" if pool.small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": blocks[0].span is not None,
            "frames": [],
            "blocks": described,
        }

    def _describe_block(self, block: Block) -> dict[str, Any]:
        tensor = self.tensors.get(id(block))
        state = "inactive"
        if block.allocated:
            state = "active_pending_free" if block.waits else "active_allocated"
        return {
            "address": block.address,
            "size": block.size,
            "requested_size": block.requested if block.allocated else 0,
            "state": state,
            "frames": self._stack(tensor),
        }

    def _free_on_device(self) -> int:
        capacity = self.settings.capacity
        return (self.settings.device_memory if capacity is None else capacity) - self.reserved

    def _write(
        self, action: str, address: int, nbytes: int, stream: int, tensor: int | None
    ) -> None:
        self.entries.append({**self._entry(action, nbytes, stream, tensor), "addr": address})

    def _entry(self, action: str, nbytes: int, stream: int, tensor: int | None) -> dict[str, Any]:
        return {
            "action": action,
            "size": nbytes,
            "stream": stream,
            "time_us": self.now,
            "compile_context": "N/A",
            "user_metadata": "",
            "frames": self._stack(tensor),
        }

    def _stack(self, tensor: int | None) -> list[dict[str, Any]]:
        if tensor is None:
            return []
        if tensor not in self._stacks:
            self._stacks[tensor] = [frame._asdict() for frame in self._frames(tensor)]
        return self._stacks[tensor]


def _annotate(marks: Sequence[int], phases: Sequence[str], length: int) -> Iterable[dict[str, Any]]:
    for name, (start, stop) in zip(phases, pairwise((0, *marks, length)), strict=bool(phases)):
        for stage, at in (("START", start), ("END", stop)):
            yield {"stage": stage, "name": name, "device": 0, "time_us": at}


def _describe_settings(settings: Settings) -> dict[str, Any]:
    divisions = settings.roundup_power2_divisions or (0,) * INTERVALS
    limit = settings.max_split_size
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.text,
        "max_split_size": NO_LIMIT if limit == UNLIMITED else limit,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": {str(2**i): n for i, n in enumerate(divisions)},
    }
