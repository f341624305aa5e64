"""The rates of this machine's device: products, attention, memory, copies, launches, collectives.

Every point is the median of a few timed repeats, each long enough for the clock; on CUDA events on
the device's own stream are the clock. What a device cannot do is left out, never estimated.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from memfit.core.errors import InvalidRequest
from memfit.core.units import MIB
from memfit.records.hardware import Calibration, Curve
from memfit.train.distributed.collective_rates import measure_all_reduce
from memfit.train.model.attention import BACKENDS
from memfit.train.run.machine import describe_environment

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16,
          "fp16": torch.float16}  # fmt: skip
HEADS, HEAD_DIM, TOKENS = 16, 64, 16384
# How torch says that a kernel does not serve on this device.
UNAVAILABLE = ("No available kernel", "No viable backend", "cuDNN Frontend error")
PARTS = ("products", "attention", "copies", "launches", "collectives")
Say = Callable[[str], None]
Work = Literal["memory", "to_device", "to_host"]


class Effort(NamedTuple):
    """How much is measured: sizes, and the seconds that one repeat of a point takes at least."""

    sides: Sequence[int]  # of square products
    lengths: Sequence[int]  # tokens that attention reads
    copies: Sequence[int]  # bytes
    repeats: int
    least: float  # seconds
    longest: float = 10.0  # seconds of one product after which no larger one is measured


CUDA = Effort(
    sides=(128, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384),
    lengths=(512, 1024, 2048, 4096, 8192, 16384),
    copies=tuple(MIB << n for n in range(11)), repeats=5, least=0.05,
)  # fmt: skip
CPU = Effort(
    sides=(64, 128, 256, 512, 1024, 1536, 2048), lengths=(128, 256, 512, 1024),
    copies=tuple(MIB << n for n in range(9)), repeats=7, least=0.2,
)  # fmt: skip
QUICK = Effort(
    sides=(128, 512, 1024), lengths=(128, 256), copies=(MIB, 32 * MIB), repeats=3, least=0.03,
    longest=0.1,
)  # fmt: skip


class Measured(NamedTuple):
    """What was found out about one device."""

    curves: tuple[Curve, ...]
    calibration: Calibration


def find_torch_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one, else the CPU; raises InvalidRequest."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise InvalidRequest(f"`{name}` cannot be calibrated", hint="write cpu, cuda or cuda:1")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidRequest(
            f"torch sees no device `{name}` here",
            hint=f"it sees {torch.cuda.device_count()} CUDA devices; `--device cpu` measures the"
            " processor",
        )
    return device


def measure(
    device: torch.device,
    *,
    quick: bool = False,
    say: Say = lambda _: None,
    parts: Sequence[str] = PARTS,
) -> Measured:
    """Everything that this device can do: about a minute; quick: about five seconds.

    quick: few sizes, each measured briefly, to try it out. parts: only those of `PARTS`. Needs a
    device that does nothing else.
    """
    effort = QUICK if quick else CPU if device.type == "cpu" else CUDA
    curves: list[Curve] = []
    for name, work in (("products", _products), ("attention", _attention), ("copies", _copies)):
        if name in parts:
            curves += work(device, effort, say)
    launch = _launch(device, effort) if "launches" in parts else None
    devices = torch.cuda.device_count() if device.type == "cuda" else 1
    if devices > 1 and "collectives" in parts:
        say(f"all_reduce on {devices} devices")
        curves += measure_all_reduce("nccl", devices, effort.copies[: 4 if quick else None])
    return Measured(
        tuple(curves),
        Calibration(
            date=date.today().isoformat(),
            versions=describe_environment(device),
            devices=devices,
            launch_seconds=launch,
            context=_context(device),  # now that every library is loaded
        ),
    )  # fmt: skip


def _seconds(
    work: Callable[[], object], device: torch.device, effort: Effort
) -> tuple[float, float]:
    """Median seconds of one call, and the slowest repeat over it less one."""
    work()
    count, once = 1, _timed(work, device, 1)
    while once * count < effort.least / 2 and count < 1 << 20:
        count *= 2
        once = _timed(work, device, count) / count
    count = max(1, round(effort.least / max(once, 1e-9)))
    times = [_timed(work, device, count) / count for _ in range(effort.repeats)]
    middle = median(times)
    return middle, max(times) / middle - 1


def _timed(work: Callable[[], object], device: torch.device, count: int) -> float:
    """Seconds of `count` calls, by the device's own clock where it has one."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            work()
        return time.perf_counter() - start
    first, last = _event(), _event()
    stream = torch.cuda.current_stream(device)
    first.record(stream)
    for _ in range(count):
        work()
    last.record(stream)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class _Points:
    """The points of one curve as they are measured."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self._device, self._effort = device, effort
        self.found: list[tuple[float, float]] = []
        self.spread = 0.0

    def add(self, size: float, work: Callable[[], object]) -> float:
        """Measure one size; the seconds of one call."""
        seconds, spread = _seconds(work, self._device, self._effort)
        self.found.append((size, size / seconds))
        self.spread = max(self.spread, spread)
        return seconds

    def curve(self, work: Any, dtype: str = "", kernel: str = "") -> Iterator[Curve]:
        """The curve; none where no size could be measured."""
        if self.found:
            points, spread = tuple(self.found), round(self.spread, 4)
            yield Curve(work=work, dtype=dtype, kernel=kernel, points=points, spread=spread)


def _products(device: torch.device, effort: Effort, say: Say) -> Iterator[Curve]:
    """Square products, 2 n^3 FLOP each; tf32 is fp32 with the tensor cores' shorter mantissa."""
    for name, dtype in DTYPES.items():
        if name in ("tf32", "fp16") and device.type == "cpu":
            continue
        say(f"matrix products in {name}")
        points = _Points(device, effort)
        with _fp32_precision("tf32" if name == "tf32" else "ieee"):
            for side in effort.sides:
                with contextlib.suppress(torch.OutOfMemoryError):
                    a = torch.randn(side, side, device=device).to(dtype)
                    product = partial(torch.mm, a, a, out=torch.empty_like(a))
                    if points.add(2.0 * side**3, product) > effort.longest:
                        break  # a processor without this dtype of its own
        yield from points.curve("matmul", name)


def _attention(device: torch.device, effort: Effort, say: Say) -> Iterator[Curve]:
    """Time causal attention, forward and backward, with each kernel that this device has."""
    for kernel, backend in BACKENDS.items():
        for name in ("fp32", "bf16"):
            points = _Points(device, effort)
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.simplefilter("ignore")  # torch says in several why a kernel is not there
                for length in effort.lengths:
                    rows = max(1, TOKENS // length) if device.type == "cuda" else 1
                    shape = (rows, HEADS, length, HEAD_DIM)
                    try:
                        points.add(_count(shape), _attend(shape, DTYPES[name], device))
                    except torch.OutOfMemoryError:
                        torch.cuda.empty_cache()
                        break
                    except RuntimeError as error:
                        if not any(text in str(error) for text in UNAVAILABLE):
                            raise
                        break
            if points.found:
                say(f"{kernel} attention in {name}")
            yield from points.curve("attention", name, kernel)


def _count(shape: tuple[int, int, int, int]) -> float:
    """FLOP of (sequences, heads, length, size): two products forward and four backward, of the
    half that causality leaves. What a kernel recomputes is not counted."""
    rows, heads, length, size = shape
    return 6.0 * rows * heads * length**2 * size


def _attend(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """One forward and backward over (sequences, heads, length, size)."""
    q, k, v, grad = (torch.randn(shape, dtype=dtype, device=device) for _ in range(4))
    for leaf in (q, k, v):
        leaf.requires_grad_()

    def attend() -> object:
        made = scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(made, (q, k, v), grad)

    return attend


def _copies(device: torch.device, effort: Effort, say: Say) -> Iterator[Curve]:
    """Copies within the device's memory (bytes read and written), and to and from the host."""
    say("memory")
    yield from _copied("memory", device, device, device, effort)
    if device.type == "cuda":
        say("copies to and from the host")
        host = torch.device("cpu")
        yield from _copied("to_device", host, device, device, effort)
        yield from _copied("to_host", device, host, device, effort)


def _copied(
    work: Work, source: torch.device, target: torch.device, clock: torch.device, effort: Effort
) -> Iterator[Curve]:
    """Copies of every size; host memory is pinned, as data loaders and offloading pin theirs."""
    points = _Points(clock, effort)
    ways = 2.0 if source == target else 1.0  # within one memory all is read and written
    for nbytes in effort.copies:
        with contextlib.suppress(torch.OutOfMemoryError):
            pinned = source != target
            target_tensor, taken = (
                torch.zeros(nbytes, dtype=torch.uint8, device=d, pin_memory=pinned and d != clock)
                for d in (source, target)
            )
            points.add(ways * nbytes, partial(taken.copy_, target_tensor, non_blocking=pinned))
    yield from points.curve(work)


def _launch(device: torch.device, effort: Effort) -> float:
    """Seconds from one tiny kernel to the next where each is issued eagerly from Python."""
    one = torch.zeros(1, device=device)
    return _seconds(lambda: one.add_(1.0), device, effort)[0]


def _context(device: torch.device) -> int | None:
    """Bytes of the device outside torch's allocator, of all its processes; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


@contextlib.contextmanager
def _fp32_precision(precision: Literal["ieee", "tf32"]) -> Iterator[None]:
    """How fp32 products are computed meanwhile."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before
