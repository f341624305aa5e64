"""Which precisions to try, and which storage of frozen weights goes with each."""

from __future__ import annotations

from memfit.coding import CODED_FORMATS
from memfit.hardware import Device
from memfit.recipe import Format, Precision
from memfit.request import Request

# The 16-bit format of each; frozen weights are stored in it unless another is asked for.
HALF: dict[str, Format] = {
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "fp16-mixed": "fp16",
    "fp8-mixed": "bf16",
}


def find_conflict(base_format: str, precision: str) -> str:
    """Why frozen weights of this format cannot be computed with; empty when they can."""
    if "auto" in (precision, base_format):
        return ""
    if base_format in CODED_FORMATS:  # the rest is stored as the precision computes
        return ""
    if base_format == "fp32":
        return "stores everything in bf16" if precision == "bf16" else ""
    if precision == "fp32":
        return "casts nothing"
    return "" if base_format == HALF[precision] else "computes in another format"


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
