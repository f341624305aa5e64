"""How fast this machine's processor is, measured in about a second before a run is planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import msgspec
import torch

from memfit.hardware import Device

SIDE = 1024  # of the square products; larger ones change the rate by a few per cent
COPY = 2**25  # elements copied to measure bandwidth: beyond any cache
REPEATS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def measure_machine(device: Device) -> Device:
    """The CPU's row with the FLOP/s of square matrix products and the bandwidth of a copy."""
    flops = {name: _matmul(dtype) for name, dtype in DTYPES.items()}
    return msgspec.structs.replace(
        device,
        flops=flops,
        bandwidth=_bandwidth(),
        notes=f"measured on this machine with {torch.get_num_threads()} threads",
    )


def _matmul(dtype: torch.dtype) -> float:
    a = torch.ones(SIDE, SIDE, dtype=dtype)
    return 2 * SIDE**3 / _seconds(lambda: a @ a)


def _bandwidth() -> float:
    source = torch.ones(COPY, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _seconds(work: Callable[[], object]) -> float:
    """The median of a few timed calls after one warm-up."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)
