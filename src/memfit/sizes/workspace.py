"""What CUDA kernels allocate inside themselves, in numbers: one table for plan and certificate.

Read from torch's sources; none of it has been measured on a GPU yet.
"""

from __future__ import annotations

from memfit.units import KIB, MIB

FP32, INT64 = 4, 8
EMBEDDING_SORTED_ABOVE = 3072  # indices; up to here one kernel adds rows directly
NORM_CHUNK = 65536  # elements that one block of a multi-tensor kernel reads


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def flash_backward(query: tuple[int, ...], key: tuple[int, ...], width: int) -> int:
    """softmax_d, the fp32 accumulator of dq and, with grouped heads, dk and dv of all heads.

    query, key: (batch, heads, tokens, head_dim); width: bytes of an element.
    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.
    """
    batch, heads, tokens, head = query
    rounded_tokens = _round_up(tokens, 128)
    rounded_head = _round_up(head, 32) if head <= 192 else 256
    rows = batch * heads * rounded_tokens * FP32
    accumulator = batch * rounded_tokens * heads * rounded_head * FP32
    grouped = key[1] != heads
    expanded = 2 * batch * key[2] * heads * head * width if grouped else 0
    return rows + accumulator + expanded


def cudnn_backward(query: tuple[int, ...]) -> int:
    """Unknown: cuDNN decides. Taken to be what flash needs, an fp32 gradient of the query and rows.

    Source: aten/src/ATen/native/cudnn/MHA.cpp, run_cudnn_SDP_bprop, allocates what the graph's
    get_workspace_size says.
    """
    return flash_backward(query, query, 2)


def efficient_backward(query: tuple[int, ...], gradient_numel: int, width: int) -> int:
    """Row sums of grad * out; fp32 inputs: with their products.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu,
    _efficient_attention_backward; accumulators of split keys are left out.
    """
    rows = query[0] * query[1] * query[2] * FP32
    return rows if width == 2 else rows * 2 + gradient_numel * FP32


def embedding_backward(indices: int, hidden: int) -> int:
    """One fp32 row an index and six index arrays, above 3072 indices.

    Source: aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel.
    """
    if indices <= EMBEDDING_SORTED_ABOVE:
        return 0
    return indices * hidden * FP32 + 6 * indices * INT64


def foreach_norm(numels: list[int]) -> int:
    """One fp32 partial result for each chunk of the largest tensor, for every tensor.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu, foreach_tensor_norm_cuda.
    """
    chunks = max((-(-n // NORM_CHUNK) for n in numels), default=0)
    return len(numels) * chunks * FP32


def cublas_workspace(capability: tuple[int, int] | None) -> int:
    """Bytes of one cuBLAS workspace, kept from a thread's first product on.

    One for each thread and stream: the forward's and autograd's. cuBLASLt shares it.
    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    if capability is None or capability >= (9, 0):
        return 32 * MIB  # Hopper and Blackwell; the larger one when the device is unknown
    return 8 * MIB + 128 * KIB
