"""Memory that CUDA kernels take from the caching allocator inside one operator.

A dispatcher sees an operator's inputs and outputs, not what its kernel allocates in between. Each
rule below names an operator and the row of `sizes.workspace` (one table for plan and certificate)
that states those bytes. `verified` says where it was measured on a GPU; the certificate repeats
among its bounds that most were not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from memfit.base_formats.shared.four_bits import multiply_bytes
from memfit.meta import workspace as table
from memfit.meta.layers import quantised
from memfit.meta.workspace import Grid, Pieces


@dataclass(frozen=True, slots=True)
class Rule:
    """Bytes that one operator's kernel holds while it runs, all freed when it returns."""

    operator: str
    pieces: Callable[[Sequence[Any], Grid | None], Pieces]  # of the operator's arguments
    because: str
    source: str
    verified: str = ""  # where it was measured; empty = read from source only
    before: bool = False  # whether it takes them before its results, not after

    def nbytes(self, args: Sequence[Any], grid: Grid | None) -> int:
        """The sum of all pieces."""
        return sum(self.pieces(args, grid))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _flash_backward(args: Sequence[Any], _: Grid | None) -> Pieces:
    """grad_out, query, key, value, out, …: (batch, heads, tokens, head_dim)."""
    query, key, width = args[1], args[2], args[1].element_size()
    copies = [table.copied_by_token(_shape(x), x.stride(), width) for x in (args[0], args[4])]
    return (*copies, *table.flash_backward(_shape(query), _shape(key), width))


def _varlen_backward(args: Sequence[Any], _: Grid | None) -> Pieces:
    """grad_out, query, key, value, out, lse, starts of the queries' documents, …"""
    query, key, documents = args[1], args[2], args[6].numel() - 1
    return table.varlen_backward(_shape(query), _shape(key), documents, query.element_size())


def _cudnn_backward(args: Sequence[Any], _: Grid | None) -> Pieces:
    """grad_out, query, key, …"""
    return table.cudnn_backward(_shape(args[1]), _shape(args[2]))


def _efficient_forward(args: Sequence[Any], _: Grid | None) -> Pieces:
    """query, key, value, …"""
    query, value = args[0], args[2]
    return table.efficient_forward(_shape(query), _shape(value)[-1], query.element_size())


def _efficient_backward(args: Sequence[Any], _: Grid | None) -> Pieces:
    """grad_out, query, key, value, …"""
    grad, query, value = args[0], args[1], args[3]
    width, size = query.element_size(), _shape(value)[-1]
    return table.efficient_backward(_shape(query), size, prod(_shape(grad)), width)


def _embedding_backward(args: Sequence[Any], _: Grid | None) -> Pieces:
    """grad (…, hidden), indices, rows of the weight. A gradient that is expanded is copied."""
    grad, indices, rows = args[:3]
    copied = 0 if grad.is_contiguous() else grad.numel() * grad.element_size()
    return (copied, *table.embedding_backward(prod(_shape(indices)), rows, _shape(grad)[-1]))


def _layer_norm_backward(args: Sequence[Any], grid: Grid | None) -> Pieces:
    """grad, input, normalized_shape, mean, rstd, weight, bias, which gradients are wanted."""
    numel, columns, weight, wanted = prod(_shape(args[1])), prod(args[2]), args[5], args[7]
    width = 4 if weight is None else weight.element_size()
    gradients = sum(wanted[1:])
    return table.layer_norm_backward(numel // columns, columns, width, gradients, grid)


def _foreach_norm(args: Sequence[Any], _: Grid | None) -> Pieces:
    """A list of tensors."""
    return (table.foreach_norm([t.numel() for t in args[0]]),)


def _sum(args: Sequence[Any], grid: Grid | None) -> Pieces:
    """self, the dimensions summed over; only sums over all rows take something."""
    x, dims = args[0], args[1]
    if grid is None or not dims or not x.numel():
        return ()
    found = table.find_rows(_shape(x), x.stride(), {d % x.dim() for d in dims})
    return table.row_sum(*found, grid) if found else ()


def _multiply_four(args: Sequence[Any], _: Grid | None) -> Pieces:
    """x (tokens, columns), codes, shape of the weight, absmax, block, type; bias, nested scales."""
    x, shape = args[0], tuple(args[2])
    double = len(args) > 7 and args[7] is not None
    return (multiply_bytes(shape, x.numel() // shape[1], x.element_size(), double=double),)


def _find_outliers(args: Sequence[Any], _: Grid | None) -> Pieces:
    """x (tokens, columns), the threshold."""
    return (int(args[0].numel()) * quantised.finding_bytes(len(args) > 1 and args[1] > 0),)


def _multiply_mixed(args: Sequence[Any], _: Grid | None) -> Pieces:
    """x, its codes, the weight's codes, scales of both, columns with outliers, bias."""
    (tokens, columns), rows, outliers = _shape(args[0]), args[2].shape[0], len(args[5])
    return (quantised.product_bytes(tokens, rows, columns, outliers, args[0].element_size()),)


def _multiply_eight(args: Sequence[Any], _: Grid | None) -> Pieces:
    """Codes of both, scales of both, bias, dtype."""
    (tokens, columns), rows = _shape(args[0]), args[1].shape[0]
    return (quantised.product_bytes(tokens, rows, columns, 0, 0),)


MEASURED = "an H100, torch 2.11 (bench/results/gpu/rows.jsonl)"
RULES = {
    rule.operator: rule
    for rule in (
        Rule(
            "aten._scaled_dot_product_flash_attention_backward.default",
            _flash_backward,
            "softmax_d, the fp32 dq accumulator and, with grouped heads, dk and dv of all heads;"
            " copies of the gradient and the result where the query lies head by head",
            "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_bwd;"
            " cuda/attention_backward.cu: _flash_attention_backward",
            MEASURED,
        ),
        Rule(
            "torch_attn._varlen_attn_backward.default",
            _varlen_backward,
            "as flash's, over documents end to end, each of which takes 128 rows more",
            "aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_varlen_bwd",
        ),
        Rule(
            "aten._scaled_dot_product_cudnn_attention_backward.default",
            _cudnn_backward,
            "cuDNN's workspace, which it alone decides: taken to be flash's; with grouped heads not"
            " yet measured",
            "aten/src/ATen/native/cudnn/MHA.cpp: run_cudnn_SDP_bprop",
            f"{MEASURED}, within 512 bytes",
        ),
        Rule(
            "aten._scaled_dot_product_efficient_attention.default",
            _efficient_forward,
            "the fp32 accumulator of the result, of 16-bit heads above 128 elements",
            "aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h:"
            " kNeedsOutputAccumulatorBuffer",
            MEASURED,
        ),
        Rule(
            "aten._scaled_dot_product_efficient_attention_backward.default",
            _efficient_backward,
            "row sums of grad * out, the fp32 accumulator of dq, of dk and dv above 128 elements",
            "aten/src/ATen/native/transformers/cuda/attention_backward.cu:"
            " _efficient_attention_backward; mem_eff_attention/kernel_backward.h: workspace_size",
            MEASURED,
        ),
        Rule(
            "aten.embedding_dense_backward.default",
            _embedding_backward,
            "fp32 sums of up to 10 rows each, at least one an index, and six index arrays, above"
            " 3072 indices; a copy of an expanded gradient",
            "aten/src/ATen/native/cuda/Embedding.cu: embedding_dense_backward_cuda;"
            " EmbeddingBackwardKernel.cu: embedding_backward_cuda_kernel",
            MEASURED,
        ),
        Rule(
            "aten.native_layer_norm_backward.default",
            _layer_norm_backward,
            "partial gradients of weight and bias, from more than 65536 rows on, and of their sum",
            "aten/src/ATen/native/cuda/layer_norm_kernel.cu: LaunchGammaBetaBackwardCUDAKernel",
            f"{MEASURED}, within 512 bytes",
        ),
        Rule(
            "aten.sum.dim_IntList",
            _sum,
            "sums over rows: partial results where several blocks share a column",
            "aten/src/ATen/native/cuda/Reduce.cuh: setReduceConfig, gpu_reduce_kernel",
            f"{MEASURED}; six peaks of Liger-Kernel's benchmark on an A100"
            " (tests/meta/test_liger.py)",
        ),
        Rule(
            "bitsandbytes.gemm_4bit.default",
            _multiply_four,
            "the dense weight, and its scales in fp32 where they were quantised",
            "bitsandbytes/backends/cuda/ops.py: _dequant_linear_fallback",
            before=True,
        ),
        Rule(
            "bitsandbytes.int8_vectorwise_quant.default",
            _find_outliers,
            "magnitudes of the input, and which of them are outliers",
            "bitsandbytes/backends/cuda/ops.py: int8_vectorwise_quant",
        ),
        Rule(
            "bitsandbytes.int8_mixed_scaled_mm.default",
            _multiply_mixed,
            "the int32 product and its fp16 values; the weight's columns of outliers, dense",
            "bitsandbytes/backends/default/ops.py: int8_mixed_scaled_mm;"
            " backends/cuda/ops.py: int8_mm_dequant",
            before=True,
        ),
        Rule(
            "bitsandbytes.int8_scaled_mm.default",
            _multiply_eight,
            "the int32 product and its fp16 values",
            "bitsandbytes/backends/default/ops.py: int8_scaled_mm",
            before=True,
        ),
        Rule(
            "aten._foreach_norm.Scalar",
            _foreach_norm,
            "partial norms of the multi-tensor kernel",
            "aten/src/ATen/native/cuda/ForeachReduceOp.cu: _foreach_tensor_norm_cuda_impl",
            MEASURED,
        ),
    )
}

PRODUCTS = frozenset(
    {
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten.baddbmm.default",
        "aten._scaled_mm.default",
    }
)  # the operators that run on cuBLAS

# What is known to be there and is not counted, and why: for docs/workspaces.md.
NOT_COUNTED = (
    (
        "sums over rows on ROCm",
        "partial results as on CUDA, by another rule",
        "aten/src/ATen/native/cuda/Reduce.cuh: setReduceConfig",
    ),
    (
        "sorting what chose which expert",
        "24 bytes for each token and expert of it; gone before the tokens are copied, which takes"
        " a hundred times that",
        "aten/src/ATen/native/cuda/Sort.cpp: sort_cuda_kernel",
    ),
    (
        "drawing tokens by `rollout.top_p`, or by a `rollout.top_k` above 4,096",
        "some 40 bytes for each token of the vocabulary and row while scores are sorted; `plan` and"
        " `certify` say `at_risk`",
        "aten/src/ATen/native/cuda/TensorTopK.cpp: topk_out_cuda; SortStable.cu:"
        " segmented_sort_pairs_by_full_sort",
    ),
    (
        "grouped products of experts",
        "60 bytes an expert, and what CUTLASS keeps for each multiprocessor",
        "aten/src/ATen/native/cuda/GroupMM.cu: bf16bf16_grouped_gemm_impl_sm90_sm100",
    ),
    (
        "hipBLASLt on ROCm",
        "76 MiB a thread where it serves a product instead of hipBLAS",
        "aten/src/ATen/cuda/CublasHandlePool.cpp: parseCUDABlasLtWorkspaceSize",
    ),
    (
        "compiled updates of low-bit optimizers",
        "what the compiler does not keep in registers",
        "torchao/optim/adam.py: single_param_adam, through torch.compile",
    ),
)
