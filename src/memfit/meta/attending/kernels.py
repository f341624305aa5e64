"""Which attention kernels serve which inputs on which device: torch's own conditions, as a table.

Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `can_use_flash_attention`,
`can_use_mem_efficient_attention`, `can_use_cudnn_attention` and the checks that they list. One
table for plan, trainer and certificate. What depends on the version of cuDNN is taken at its
narrowest: heads of 192 and 256 elements, which new ones take on 9.0 and 10.x, are refused.

Which of those that serve is taken first: `priority_order` and `check_prefer_cudnn_attention` of the
same file. With cuDNN 9.15.1 or newer torch 2.11 tries its kernel before flash on 9.x and 10.x. On
an H100 it made 370 TFLOP/s where flash made 239 (bench/results/gpu/rows.jsonl).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from memfit.records.model import Architecture

Platform = Literal["cpu", "cuda", "rocm"]
Capability = tuple[int, int]  # of an NVIDIA device


class Heads(NamedTuple):
    """What a kernel must know of a model's attention."""

    size: int  # elements of a query's or key's head
    value: int = 0  # elements of a value's, where they are others; 0 = as many
    sinks: bool = False  # see `Architecture.sinks`
    windowed: bool = False  # rows are longer than the model's sliding window, which takes a mask


def heads_of(a: Architecture, tokens: int) -> Heads:
    """Of one model; tokens: of a row."""
    return Heads(a.head_dim, a.latent.value, a.sinks, a.windowed(tokens))


BY_PREFERENCE = ("cudnn", "flash", "efficient", "math")  # torch's order
# Where torch tries cuDNN's kernel by itself; elsewhere it is only taken where it is named. Builds
# for CUDA 12 leave out other minor numbers.
CUDNN_FIRST: tuple[Capability, ...] = ((9, 0), (10, 0), (10, 3))
OLDEST_CUDNN = (9, 15, 1)  # older ones reach beyond rows of no multiple of 128 (pytorch#169849)
HALF = ("bfloat16", "float16")
NEWEST: Capability = (12, 1)  # the newest device that the fused kernels are allowed on
FLASH_HEAD, CUDNN_HEAD = 256, 128  # elements of the largest heads
FLASH_ALIGNMENT = CUDNN_ALIGNMENT = 8  # elements; torch pads a head to it for flash
MASK_ALIGNMENT = 8  # elements between rows of a mask; torch copies others for the efficient kernel


def refusal(
    kernel: str,
    dtype: str,
    heads: Heads,
    *,
    platform: Platform = "cuda",
    capability: Capability | None = None,
) -> str:
    """Why a kernel does not serve such heads in this dtype in training; empty when it does.

    Values narrower than keys are widened for flash and varlen (train/model/attention.py); the
    efficient kernel takes them as they are. capability: None when unknown, which counts as 8.0
    with no
    exception of its own.
    """
    if kernel == "math":
        return ""
    if heads.sinks:
        return "does not know attention sinks, which the model has"
    if heads.windowed and platform != "cpu" and kernel in ("flash", "cudnn"):
        return "takes no mask here, and the sequence is longer than the model's sliding window"
    if platform == "cpu":
        return "" if kernel == "flash" else "exists on CUDA only, and the device is a CPU"
    at = capability or (8, 0)
    if kernel == "flash":
        return _flash(dtype, heads.size, at)
    if kernel in ("cudnn", "varlen") and platform == "rocm":
        return "exists on NVIDIA's devices only"
    if kernel == "cudnn":
        return _cudnn(dtype, heads, at)
    if kernel == "varlen":
        return _varlen(dtype, heads.size, at)
    return _efficient(dtype, heads.size, at) or _efficient(dtype, heads.value, at)


def usable(
    dtype: str, heads: Heads, *, platform: Platform, capability: Capability | None
) -> tuple[str, ...]:
    """The kernels that serve these inputs, in torch's order; cuDNN's where that puts it first."""

    def serves(kernel: str) -> bool:
        if kernel == "cudnn" and capability not in CUDNN_FIRST:
            return False
        return not refusal(kernel, dtype, heads, platform=platform, capability=capability)

    return tuple(kernel for kernel in BY_PREFERENCE if serves(kernel))


def _show(at: Capability) -> str:
    return f"{at[0]}.{at[1]}"


def _flash(dtype: str, head: int, at: Capability) -> str:
    if dtype not in HALF:
        return f"computes in 16 bits, not in {dtype}"
    if not (8, 0) <= at <= NEWEST:
        return f"needs compute capability 8.0 to {_show(NEWEST)}, and the device has {_show(at)}"
    if head > FLASH_HEAD:
        return f"takes heads of up to {FLASH_HEAD} elements, and the model's have {head}"
    small = (8, 6) <= at <= (8, 9) or (12, 0) <= at <= (12, 1)  # shared memory, in backward
    if small and 192 < head <= 224:
        return f"does not train heads of {head} elements on compute capability {_show(at)}"
    return ""


def _varlen(dtype: str, head: int, at: Capability) -> str:
    """FlashAttention's kernel, without heads that torch would pad."""
    if head % FLASH_ALIGNMENT:
        return (
            f"takes heads of a multiple of {FLASH_ALIGNMENT} elements, and the model's have {head}"
        )
    return _flash(dtype, head, at)


def _efficient(dtype: str, head: int, at: Capability) -> str:
    if not (5, 0) <= at <= NEWEST:
        return f"needs compute capability 5.0 to {_show(NEWEST)}, and the device has {_show(at)}"
    if dtype not in ("float32", "float16") and (dtype != "bfloat16" or at < (8, 0)):
        return f"does not compute in {dtype} on compute capability {_show(at)}"
    multiple = efficient_alignment(dtype, at)
    if head % multiple:
        return f"takes heads of a multiple of {multiple} elements, and the model's have {head}"
    return ""


def efficient_alignment(dtype: str, at: Capability) -> int:
    """Elements that a head is a multiple of: what a tensor core reads at once."""
    half = dtype in HALF
    if at >= (8, 0):
        return 8 if half else 4
    return 8 if half and at >= (7, 0) else 1


def _cudnn(dtype: str, heads: Heads, at: Capability) -> str:
    head = heads.size
    if dtype not in HALF:
        return f"computes in 16 bits, not in {dtype}"
    if not (8, 0) <= at <= NEWEST:
        return f"needs compute capability 8.0 to {_show(NEWEST)}, and the device has {_show(at)}"
    if head > CUDNN_HEAD or head % CUDNN_ALIGNMENT:
        return (
            f"takes heads of a multiple of {CUDNN_ALIGNMENT} up to {CUDNN_HEAD} elements, and the"
            f" model's have {head}"
        )
    if heads.value not in (0, head):
        return f"is only run with values as wide as keys: the model's have {heads.value} and {head}"
    return ""
