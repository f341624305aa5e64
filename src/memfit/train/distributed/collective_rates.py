"""The bus bandwidth of all_reduce among this machine's devices, one process each."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from memfit.records.hardware import Curve

REPEATS, CALLS = 5, 10


def measure_all_reduce(backend: str, world: int, sizes: Sequence[int]) -> list[Curve]:
    """One curve over bytes; bus bandwidth is 2 (n - 1) / n x bytes / seconds, as NCCL's tests say.

    backend: nccl on GPUs, gloo on a CPU.
    """
    with tempfile.TemporaryDirectory(prefix="memfit-") as folder:
        arguments = (backend, world, list(sizes), folder)
        spawn(_rank, arguments, nprocs=world)  # type: ignore[no-untyped-call]
        points, spread = json.loads((Path(folder) / "points.json").read_text())
    pairs = tuple((float(size), float(rate)) for size, rate in points)
    return [Curve(work="all_reduce", points=pairs, spread=round(spread, 4))]


def _rank(rank: int, backend: str, world: int, sizes: list[int], folder: str) -> None:
    """One process of the group; the first one writes what the slowest took."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    points, spread = [], 0.0
    try:
        for size in sizes:
            tensor = torch.zeros(size // 4, device=device)
            times = [_seconds(tensor, device) for _ in range(REPEATS + 1)][1:]
            middle = median(times)
            points.append((size, 2 * (world - 1) / world * size / middle))
            spread = max(spread, max(times) / middle - 1)
        if rank == 0:
            (Path(folder) / "points.json").write_text(json.dumps([points, spread]))
    finally:
        distributed.destroy_process_group()


def _seconds(tensor: torch.Tensor, device: torch.device) -> float:
    """Seconds of one call of the slowest rank."""
    distributed.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        distributed.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = torch.tensor((time.perf_counter() - start) / CALLS, device=device)
    distributed.all_reduce(taken, op=distributed.ReduceOp.MAX)
    return float(taken)
