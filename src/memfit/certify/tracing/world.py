"""One rank of a world that is not here: a process group that communicates with nobody, a mesh of
its size, and the streams of a CUDA device that is not here either.

Torch's own sharding code runs unchanged in it. Each function undoes one place where torch would
notice, and says which; all are undone when the context ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.fsdp._fully_shard._fsdp_param as fsdp_param
import torch.distributed.tensor  # imported here: not under FakeTensorMode
from torch import Tensor

from memfit.certify.tracing.fake_device import set_while
from memfit.core.errors import NotCertified
from memfit.meta.layers.routing import count_received
from memfit.parallelism.collectives import meshes_outside_modes
from memfit.records.recipe import Parallel
from memfit.train.distributed import dealt

OnStream = Callable[[int], None]  # told the number of the stream that becomes current
OnUse = Callable[[Tensor, int], None]  # told a tensor that another stream uses, and which


@contextmanager
def fake_world(
    parallel: Parallel, rank: int, kind: str, on_stream: OnStream, on_use: OnUse
) -> Iterator[None]:
    """Be this rank of `parallel.world`; nothing at all for a world of one.

    kind: torch's name of the device. Enter it outside FakeTensorMode.
    Raises NotCertified when a process group exists already, or this torch cannot imitate one.
    """
    if parallel.world == 1:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(_process_group(parallel.world, rank))
        stack.enter_context(meshes_outside_modes())
        stack.enter_context(_own_chunk_only())
        if parallel.pp > 1:
            stack.enter_context(_shapes_agreed())
        if parallel.ep > 1:
            stack.enter_context(set_while(dealt, "read_sizes", _stated_sizes(parallel)))
        if kind == "cuda":
            stack.enter_context(fake_streams(on_stream))
            stack.enter_context(set_while(torch.Tensor, "record_stream", _recording(on_use)))
            # shards that wait on the host are copied to pinned memory, which no device sees
            stack.enter_context(set_while(torch.Tensor, "is_pinned", lambda tensor: True))
        yield


@contextmanager
def _process_group(world: int, rank: int) -> Iterator[None]:
    if dist.is_initialized():
        raise NotCertified("a process group exists in this process: certify in one of its own")
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError:
        raise NotCertified(
            f"torch {torch.__version__} has no fake process group to trace many ranks with"
        ) from None
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """torch keeps what it worked out for a mesh, and the names of its groups with it, beyond them;
    an equal mesh of the next trace would look for groups that are gone."""
    import torch.distributed.tensor._redistribute as redistribute
    import torch.distributed.tensor.debug as debug

    forget = (
        getattr(debug, "_clear_sharding_prop_cache", None),
        getattr(redistribute, "clear_redistribute_planner_cache", None),
        getattr(getattr(redistribute, "_gen_transform_infos", None), "cache_clear", None),
    )
    for clear in filter(None, forget):  # as far as this version has them
        clear()


class _Chunks:
    """`torch.chunk` of a tensor, of which a rank looks at the first and its own chunk only.

    FSDP2 makes a view for every rank of every parameter: 28 s for 70B on 512 ranks.
    """

    def __init__(self, tensor: Tensor, chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._rows = -(-tensor.size(dim) // chunks)

    def __getitem__(self, index: int) -> Tensor:
        rows = self._tensor.size(self._dim)
        start = min(index * self._rows, rows)
        length = min(self._rows, rows - start)
        if length == 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, length)


@contextmanager
def _own_chunk_only() -> Iterator[None]:
    with set_while(fsdp_param, "_chunk_with_empty", _Chunks):
        yield


@contextmanager
def _shapes_agreed() -> Iterator[None]:
    """Replace the vote of the stages whether all know their shapes: here nobody answers, and all
    do (`train.pipeline`)."""
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining._utils import InferenceMode

    def agree(_: Any, stages: list[Any], *__: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    with ExitStack() as stack:
        stack.enter_context(set_while(schedules._PipelineSchedule, "_warmup_p2p", agree))
        # a broadcast asks which device it is, and only looks at the answer for numbers in 8 bits
        capability = set_while(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        stack.enter_context(capability)
        yield


def _stated_sizes(parallel: Parallel) -> Callable[..., dealt.Sizes]:
    """How many rows go to the experts of each rank and come from each, where nobody routes: all
    receive what the recipe allows for."""

    def split(rows: int) -> list[int]:
        return [rows // parallel.ep + (rank < rows % parallel.ep) for rank in range(parallel.ep)]

    def read_sizes(rows: int, counts: Tensor, arrived: Tensor, ranks: int) -> dealt.Sizes:
        return split(rows), split(count_received(rows, parallel.received))

    return read_sizes


def _recording(on_use: OnUse) -> Callable[[Tensor, Any], None]:
    """`Tensor.record_stream` asks the driver. FSDP2 does without it; collectives may not."""

    def record_stream(tensor: Tensor, stream: Any) -> None:
        on_use(tensor, stream.stream_id)

    return record_stream


class _Stream:
    """A number. Stream 0 is the default one."""

    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        _Stream.made += 1
        self.stream_id = _Stream.made

    def wait_stream(self, stream: Any) -> None:
        """Nothing runs, so nothing waits."""

    def wait_event(self, event: Any) -> None:
        """See `wait_stream`."""

    def synchronize(self) -> None:
        """See `wait_stream`."""

    def record_event(self, event: Any = None) -> Any:
        """See `wait_stream`."""
        return event or _Event()


class _Event:
    """Always over."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@contextmanager
def fake_streams(on_stream: OnStream) -> Iterator[None]:
    """What FSDP2 and offloading use of `torch.cuda`, of a device with streams and no driver."""
    default = _Stream()
    default.stream_id = _Stream.made = 0
    now = [default]

    @contextmanager
    def stream(chosen: _Stream | None) -> Iterator[None]:
        before = now[0]
        now[0] = chosen or before
        on_stream(now[0].stream_id)
        try:
            yield
        finally:
            now[0] = before
            on_stream(before.stream_id)

    answers: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": stream,
        "current_stream": lambda device=None: now[0],
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_initialized": lambda: True,
        "set_device": lambda device: None,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(set_while(torch.cuda, name, answer))
        # FSDP2 waits there for weights that it gathered and no gradient asked for (LoRA)
        stack.enter_context(set_while(torch.accelerator, "current_stream", lambda: now[0]))
        yield
