"""This machine: what it is, and how fast its processor is, measured in about a second."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import date
from functools import partial

import msgspec
import torch

from memfit.core.libraries import installed_versions
from memfit.records.hardware import Calibration, Device
from memfit.train.measure.cuda_allocator import running_settings

SIDES = (128, 256, 512, 1024, 2048)  # of square products
USUAL = 1024  # larger ones change the rate by a few per cent
ENOUGH = 0.05  # seconds of a product: a processor without bf16 of its own takes 3 s for `USUAL`
# a product of eight times the work that has so many times the rate had waited for other processes:
# each of its threads has to be given a turn
RISE = 2
COPY = 2**24  # elements copied to measure bandwidth: beyond most caches, and 64 MiB
REPEATS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def describe_environment(device: torch.device) -> dict[str, str]:
    """What a measured figure depends on besides its recipe."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.machine()
    found = {
        "device": name,
        **installed_versions(("memfit", "peft", "transformers")),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
    }
    if not cuda:
        return found
    return found | {
        "allocator": running_settings(),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "device_memory": str(torch.cuda.get_device_properties(device).total_memory),
        "driver": _driver(),
    }


def _driver() -> str:
    """The driver's version as its own tool says it; `unknown` without that tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return output[0] if output else "unknown"


def measure_machine(device: Device) -> Device:
    """The CPU's row with the FLOP/s of square matrix products and the bandwidth of a copy."""
    flops = {name: _matmul(dtype) for name, dtype in DTYPES.items()}
    return msgspec.structs.replace(
        device,
        flops=flops,
        bandwidth=_bandwidth(),
        calibration=Calibration(date=date.today().isoformat(), versions={}),
        notes=f"measured on this machine with {torch.get_num_threads()} threads",
    )


def _matmul(dtype: torch.dtype) -> float:
    """FLOP/s of the largest product that takes no longer than it must to be timed well."""
    rate = 0.0
    for side in SIDES:
        a = torch.ones(side, side, dtype=dtype)
        seconds = _seconds(partial(torch.matmul, a, a))
        before, rate = rate, 2 * side**3 / seconds
        if (side >= USUAL or seconds > ENOUGH) and rate < RISE * before:
            break
    return rate


def _bandwidth() -> float:
    source = torch.ones(COPY, dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source))


def _seconds(work: Callable[[], object]) -> float:
    """The least of a few timed calls after one warm-up: others wait for other processes."""
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
