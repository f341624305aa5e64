"""Which precisions to try, and which storage of frozen weights goes with each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memfit.base_formats import is_quantised
from memfit.core.errors import InvalidRequest
from memfit.optimizers.low_bit import can_round, implementations
from memfit.records.hardware import Device
from memfit.records.recipe import ADAPTED, Method, Precision
from memfit.records.request import Request

EIGHT_BITS = "adamw8bit"  # whose states do not stall, and whose updates can be rounded by chance

# The 16-bit format of each; frozen weights are stored in it unless another is asked for.
HALF: dict[str, str] = {
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "fp16-mixed": "fp16",
    "fp8-mixed": "bf16",
}


def find_conflict(base_format: str, precision: str) -> str:
    """Why frozen weights of this format cannot be computed with; empty when they can."""
    if "auto" in (precision, base_format):
        return ""
    if is_quantised(base_format):  # the rest is stored as the precision computes
        return ""
    if base_format == "fp32":
        return "stores everything in bf16" if precision == "bf16" else ""
    if precision == "fp32":
        return "casts nothing"
    return "" if base_format == HALF[precision] else "computes in another format"


def is_computed(precision: str, device: Device) -> bool:
    """Whether the device has products in a precision's 16-bit format; any has them in fp32."""
    half = "fp16" if precision.startswith("fp16") else "bf16"
    return precision == "fp32" or not device.flops or bool(device.flops.get(half))


def choose_precision(described: Sequence[str], framework: str, device: Device) -> str:
    """The first of a framework's precisions that the device computes; raises InvalidRequest."""
    for precision in described:
        if is_computed(precision, device):
            return precision
    raise InvalidRequest(
        f"`framework: {framework}` is described in {', '.join(described)}, and `{device.id}`"
        " computes none of these",
        hint="name a newer device, or another `framework`; memfit's own step has fp16 and fp32",
    )


def precisions(request: Request, device: Device) -> list[Precision]:
    """Those to try, in order. fp16 skips steps that overflow: only where there is no bf16."""
    if request.precision != "auto":
        return [request.precision]
    if request.base_format == "fp16":
        return ["fp16-mixed"]
    if device.is_cpu:
        return ["fp32", "bf16-mixed", "bf16"]
    if device.flops.get("bf16"):
        return ["bf16-mixed", "bf16"]
    return ["fp32", "fp16-mixed"] if device.flops.get("fp16") else ["fp32"]


class Storage(NamedTuple):
    """How trained weights and their states are stored."""

    precision: Precision
    optimizer: str = ""  # the one to take where the request leaves it open; "": the usual one


def list_storage(request: Request, device: Device, method: Method) -> list[Storage]:
    """What can be tried for a method, in order, of what learns as fp32 states do.

    Pure bf16 (weights and states without an fp32 copy) is not among them unless it is stated:
    AdamW's second moments in bf16 stall at beta2 0.999, where a change is less than half of the
    last digit, and updates below 1/256 of a weight are lost. Rounding by chance and states in 8
    bits have neither fault, and take less memory.
    """
    optimizer = request.optimizer
    tried = precisions(request, device)
    if request.precision != "auto":
        return [Storage(precision) for precision in tried]
    found = [Storage(precision) for precision in tried if precision != "bf16"]
    if "bf16" not in tried or optimizer.stochastic_rounding is False:
        return found
    if optimizer.name != "auto":
        return [*found, Storage("bf16")] if can_round(optimizer.name) else found
    known = optimizer.implementation in ("auto", *implementations(EIGHT_BITS))
    if method in ADAPTED or device.is_cpu or not known:  # a CPU takes seconds for each
        return found
    return [*found, Storage("bf16", EIGHT_BITS)]


def list_last_storage(request: Request, device: Device) -> list[Storage]:
    """What is tried where nothing of `list_storage` fits: pure bf16, which the plan warns of."""
    if request.precision != "auto" or "bf16" not in precisions(request, device):
        return []
    if request.optimizer.stochastic_rounding is True:
        return []
    return [Storage("bf16")]
