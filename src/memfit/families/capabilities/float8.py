"""Where products of blocks can run in FP8 (`precision: fp8-mixed`): for plan and trainer."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.core.errors import InvalidRequest
from memfit.families.capabilities.limits import choose_packing
from memfit.families.capabilities.products import find_beside, find_clash, is_of_block
from memfit.records.hardware import Device
from memfit.records.model import Model
from memfit.records.request import Request

LEAST_CAPABILITY = (8, 9)
ALIGNED = 16  # `torch._scaled_mm` multiplies sizes that are multiples of it
KEY = "`precision: fp8-mixed`"
USE = "use `precision: bf16-mixed`"


def check_float8(
    model: Model, *, method: str, ranks: int, packing: bool, tokens: int | None = None,
    beside: Iterable[str] = (),
) -> None:  # fmt: skip
    """Raise InvalidRequest where torchao's float8 training cannot be, or would not pay.

    tokens: of a micro-batch, where known; beside: other operations of blocks that are requested.
    """
    if method != "full":
        refused = f"`method: {method}`: torchao makes the gradients of frozen weights too"
    elif ranks > 1:
        refused = f"{ranks} ranks: memfit's sharded step does not gather weights in FP8"
    else:
        refused = find_clash(model, beside)
    if refused:
        raise InvalidRequest(f"{KEY} does not go with {refused}", hint=USE)
    odd = [w for w in model.weights if is_of_block(w) and any(n % ALIGNED for n in w.shape)]
    if odd:
        raise InvalidRequest(
            f"{KEY}: `{odd[0].name}` is {odd[0].shape[0]} x {odd[0].shape[1]}, and FP8 products"
            f" are of multiples of {ALIGNED}",
            hint=USE,
        )
    if not packing:
        raise InvalidRequest(
            f"{KEY} with `task.packing: false`: rows are as long as their longest sample, and FP8"
            f" products are of multiples of {ALIGNED} tokens",
            hint=f"use `packing: true`, or {USE.removeprefix('use ')}",
        )
    if tokens is not None and tokens % ALIGNED:
        raise InvalidRequest(
            f"{KEY}: a micro-batch has {tokens} tokens, no multiple of {ALIGNED}",
            hint=f"use a sequence_length that is a multiple of {ALIGNED}",
        )


def check_device(platform: str, capability: tuple[int, int] | None) -> None:
    """Raise InvalidRequest on a device without FP8 products."""
    if platform == "cuda" and (capability is None or capability >= LEAST_CAPABILITY):
        return
    what = "a CPU" if platform == "cpu" else f"{platform}"
    if platform == "cuda" and capability is not None:
        what = f"CUDA capability {capability[0]}.{capability[1]}"
    raise InvalidRequest(f"{KEY} needs CUDA capability 8.9 or more, and this is {what}", hint=USE)


def check_request(request: Request, model: Model, device: Device, length: int) -> None:
    """The same of a request, before anything is chosen; length: tokens of a row."""
    check_device("cpu" if device.is_cpu else device.platform, device.capability)
    rows = 1 if request.micro_batch == "auto" else request.micro_batch
    check_float8(
        model, method="full" if request.method == "auto" else request.method,
        ranks=request.ranks, packing=choose_packing(request, model.architecture),
        tokens=rows * length, beside=find_beside(request),
    )  # fmt: skip
