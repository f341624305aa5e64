"""Memory that CUDA kernels take from the caching allocator inside one operator.

A dispatcher sees an operator's inputs and outputs, not what its kernel allocates in between. Each
rule below states those bytes for one operator, with the source it was read from. None has been
measured on a GPU yet: `verified` says so, and the certificate repeats it among its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from memfit.units import KIB, MIB

FP32 = 4
INT64 = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """Bytes that one operator's kernel holds while it runs, all freed when it returns."""

    operator: str
    nbytes: Callable[[Sequence[Any]], int]  # of the operator's arguments
    because: str
    source: str
    verified: str = ""  # where it was measured; empty = read from source only


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _flash_backward(args: Sequence[Any]) -> int:
    """grad_out, query, key, …: (batch, heads, tokens, head_dim)."""
    query, key = args[1], args[2]
    batch, heads, tokens, head = _sizes(query)
    rounded_tokens = _round_up(tokens, 128)
    rounded_head = _round_up(head, 32) if head <= 192 else 256
    softmax_d = batch * heads * rounded_tokens * FP32
    dq = batch * rounded_tokens * heads * rounded_head * FP32
    grouped = key.shape[1] != heads
    expanded = 2 * batch * _sizes(key)[2] * heads * head * query.element_size() if grouped else 0
    return softmax_d + dq + expanded


def _efficient_backward(args: Sequence[Any]) -> int:
    """grad_out, query, …: in fp32 two products' worth; in 16 bit the row sums alone."""
    grad, query = args[0], args[1]
    rows = prod(_sizes(query)[:3]) * FP32
    half: bool = query.element_size() == 2
    return rows if half else rows * 2 + prod(_sizes(grad)) * FP32


EMBEDDING_SORTED_ABOVE = 3072  # indices; up to here one kernel adds rows directly


def _embedding_backward(args: Sequence[Any]) -> int:
    """grad (…, hidden), indices: partial sums in fp32, one row an index, and the sort's arrays."""
    grad, indices = args[0], args[1]
    n = prod(_sizes(indices))
    if n <= EMBEDDING_SORTED_ABOVE:
        return 0
    return n * _sizes(grad)[-1] * FP32 + 6 * n * INT64


CHUNK = 65536  # elements that one block of a multi-tensor kernel reads


def _foreach_norm(args: Sequence[Any]) -> int:
    """One fp32 partial result for each chunk of the largest tensor, for every tensor."""
    tensors: list[Tensor] = args[0]
    chunks = max((-(-t.numel() // CHUNK) for t in tensors), default=0)
    return len(tensors) * chunks * FP32


RULES = {
    rule.operator: rule
    for rule in (
        Rule(
            "aten._scaled_dot_product_flash_attention_backward.default",
            _flash_backward,
            "softmax_d, the fp32 dq accumulator and, with grouped heads, dk and dv of all heads",
            "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd",
        ),
        Rule(
            "aten._scaled_dot_product_efficient_attention_backward.default",
            _efficient_backward,
            "the row sums of grad * out (fp32 inputs: with their products)",
            "aten/src/ATen/native/transformers/cuda/attention_backward.cu:"
            " _efficient_attention_backward; accumulators of split keys are left out",
        ),
        Rule(
            "aten.embedding_dense_backward.default",
            _embedding_backward,
            "one fp32 row an index and six index arrays, above 3072 indices",
            "aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu: embedding_backward_cuda_kernel",
        ),
        Rule(
            "aten._foreach_norm.Scalar",
            _foreach_norm,
            "partial norms of the multi-tensor kernel",
            "aten/src/ATen/native/cuda/ForeachReduceOp.cu: foreach_tensor_norm_cuda",
        ),
    )
}

PRODUCTS = frozenset(
    {"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"}
)  # the operators that run on cuBLAS
CUBLAS_SOURCE = "aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize"


def cublas_workspace(capability: tuple[int, int] | None) -> int:
    """Bytes of one cuBLAS workspace, kept from a thread's first product on.

    There is one for each thread and stream: the forward's and autograd's. cuBLASLt shares it.
    """
    if capability is None or capability >= (9, 0):
        return 32 * MIB  # Hopper and Blackwell; the larger one when the device is unknown
    return 8 * MIB + 128 * KIB
