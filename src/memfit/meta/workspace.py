"""What CUDA kernels allocate inside themselves, in numbers: one table for plan and certificate.

Read from torch's sources, and held against an H100 by `make gpu` (docs/gpu.md). Where versions
differ, or the kernel that is chosen depends on more than the shapes, the larger number stands.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from memfit.core.units import KIB, MIB
from memfit.records import Record
from memfit.records.hardware import Device

FP32, INT64 = 4, 8
EMBEDDING_SORTED_ABOVE = 3072  # indices; up to here one kernel adds rows directly
NORM_CHUNK = 65536  # elements that one block of a multi-tensor kernel reads
EMBEDDING_SUMMED = 10  # gradients of one row that one partial sum takes
LARGE_HEAD_PARTS = 200  # of keys, of all heads of a batch, where dk and dv have accumulators
TILE_LOCK = 16  # bytes of lock and counter before each tile of the efficient kernel's accumulator
LAYER_NORM_ROWS = 64 * 1024  # from more rows on, blocks share the columns of a gradient
LAYER_NORM_GRID = 32 * 1024  # of those blocks there are at most this many
LARGEST_HALF = 80  # half the multiprocessors of the largest devices
Shape = tuple[int, ...]
Pieces = tuple[int, ...]  # bytes of each allocation, in their order
REDUCE_THREADS = 512  # of a block of a reduction
REDUCE_VECTOR = 4  # neighbouring columns that one of its threads adds up
REDUCE_WARP = 32
SMALLEST = 512  # bytes of which the caching allocator gives multiples
REDUCE_LEAST, REDUCE_MOST = 16, 256  # values that one of its threads adds up


class Grid(Record, frozen=True, kw_only=True):
    """What of a device decides how a reduction is cut."""

    multiprocessors: int
    threads: int  # that one multiprocessor holds


# Where a device's count is unknown, the largest of any: more blocks, more partial results.
LARGEST = Grid(multiprocessors=188, threads=2048)
THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
MANY_THREADS = 2048  # of one multiprocessor of the other capabilities


def find_grid(device: Device) -> Grid | None:
    """What decides how a device cuts reductions; None where CUDA's rule is not the one."""
    if device.platform != "cuda":
        return None
    if device.multiprocessors is None or device.capability is None:
        return LARGEST
    threads = THREADS.get(device.capability, MANY_THREADS)
    return Grid(multiprocessors=device.multiprocessors, threads=threads)


def _blocks(n: int, of: int) -> int:
    return -(-n // of)


def _round_up(n: int, to: int) -> int:
    return _blocks(n, to) * to


def flash_backward(query: Shape, key: Shape, width: int) -> Pieces:
    """softmax_d, the fp32 accumulator of dq and, with grouped heads, dk and dv of all heads.

    query, key: (batch, heads, tokens, head_dim); width: bytes of an element. Deterministic
    algorithms would take an accumulator for each part of the key; memfit does not ask for them.
    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.
    """
    batch, heads, tokens, head = query
    rounded_tokens = _round_up(tokens, 128)
    rounded_head = _round_up(head, 32 if head <= 128 else 64)
    rows = batch * heads * rounded_tokens * FP32
    accumulator = batch * rounded_tokens * heads * rounded_head * FP32
    grouped = key[1] != heads
    expanded = batch * key[2] * heads * head * width
    return (rows, accumulator, *((expanded, expanded) if grouped else ()))


def copied_by_token(shape: Shape, strides: Shape, width: int) -> int:
    """Bytes of the copy that flash's backward makes of a tensor which does not lie token by token.

    shape, strides: of (batch, heads, tokens, head_dim); width: bytes of an element. The gradient
    and the result lie as the query does: after a concatenation within heads, head by head.
    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu, _flash_attention_backward.
    """
    batch, heads, tokens, head = shape
    dense = (tokens * heads * head, head, heads * head, 1)
    lies = all(n == 1 or s == d for n, s, d in zip(shape, strides, dense, strict=True))
    return 0 if lies else batch * heads * tokens * head * width


def varlen_backward(query: Shape, key: Shape, documents: int, width: int) -> Pieces:
    """As flash's, over documents end to end, each of which takes 128 rows more.

    query, key: (tokens of all documents, heads, head_dim).
    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_bwd.
    """
    tokens, heads, head = query
    rounded_head = _round_up(head, 32 if head <= 128 else 64)
    apart = tokens + 128 * documents
    rows, accumulator = apart * heads * FP32, apart * heads * rounded_head * FP32
    expanded = key[0] * heads * head * width
    return (rows, accumulator, *((expanded, expanded) if key[1] != heads else ()))


def cudnn_backward(query: Shape, key: Shape) -> Pieces:
    """Unknown: cuDNN decides. Taken to be what flash needs; with as many keys' heads as queries'
    an H100 took that (bench/results/gpu/rows.jsonl). Fewer were not measured there.

    Source: aten/src/ATen/native/cudnn/MHA.cpp, run_cudnn_SDP_bprop, allocates what the graph's
    get_workspace_size says.
    """
    return (sum(flash_backward(query, key, 2)),)


def efficient_backward(query: Shape, value: int, gradient_numel: int, width: int) -> Pieces:
    """Row sums of grad * out, and fp32 accumulators: of dq always, of dk and dv for large heads.

    value: elements of a value's head. fp32 inputs: first the products of the row sums. 16-bit heads
    above 128 elements do not fit into registers: each part of the keys then has one block of dk
    and one of dv, and there are as many parts as blocks, but at most 200 of all heads. Block sizes
    are those of the largest tiles.
    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu,
    _efficient_attention_backward; mem_eff_attention/kernel_backward.h, workspace_size.
    """
    batch, heads, tokens, head = query
    rows = batch * heads * tokens * FP32
    height = 128 if width == 2 else 64
    breadth = 128 if width == 2 and 64 < max(head, value) <= height else 64
    tile = height * breadth * FP32 + TILE_LOCK
    accumulators = _blocks(tokens, height) * _blocks(head, breadth) * tile
    if width == 2 and max(head, value) > height:
        parts = max(1, min(_blocks(tokens, breadth), LARGE_HEAD_PARTS // (batch * heads)))
        columns = _round_up(head, height) + _round_up(value, height)
        accumulators += parts * breadth * columns * FP32
    inside = batch * heads * accumulators
    return rows, inside if width == 2 else max(inside, rows + gradient_numel * FP32)


def efficient_forward(query: Shape, value: int, width: int) -> Pieces:
    """The fp32 accumulator of the result, which 16-bit heads above 128 elements need.

    value: elements of a value's head; width: bytes of an element.
    Source: mem_eff_attention/kernel_forward.h, kNeedsOutputAccumulatorBuffer.
    """
    batch, heads, tokens, _ = query
    return (batch * heads * tokens * value * FP32,) if width == 2 and value > 128 else ()


def embedding_backward(indices: int, rows: int, hidden: int) -> Pieces:
    """fp32 sums of up to 10 gradients each, six index arrays and two counts, above 3072 indices.

    rows: of the weight. There are no more sums than all different indices need and one more for
    every 10 indices; how many are used depends on values, all are allocated.
    Source: aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda;
    EmbeddingBackwardKernel.cu, embedding_backward_cuda_kernel.
    """
    if indices <= EMBEDDING_SORTED_ABOVE:
        return ()
    different = min(indices, rows)
    sums = indices // EMBEDDING_SUMMED + different
    arrays = (3 * indices + 2 * different + sums) * INT64
    return arrays + 2 * SMALLEST, sums * hidden * FP32


def layer_norm_backward(
    rows: int, columns: int, width: int, gradients: int, grid: Grid | None
) -> Pieces:
    """Partial gradients of weight and bias, where many rows meet few columns, and their sum's own.

    width: bytes of an element of the weight; gradients: how many of weight and bias have one; grid:
    of the device, where the rule of its sums is known.
    Whether columns are few depends on the device's multiprocessors; the largest ones count here.
    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel.
    """
    across = _blocks(columns, 32)
    if rows <= LAYER_NORM_ROWS or columns // 32 >= LARGEST_HALF:
        return ()
    parts = min(LAYER_NORM_GRID // across, _blocks(rows, 32))
    added = row_sum(columns, parts, grid) if grid is not None and gradients else ()
    return (*(parts * columns * width,) * gradients, *added)


def foreach_norm(numels: list[int]) -> int:
    """fp32 partial results: one a chunk of the largest tensor for every tensor.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu, _foreach_tensor_norm_cuda_impl.
    """
    chunks = max((_blocks(n, NORM_CHUNK) for n in numels), default=0)
    return len(numels) * chunks * FP32


def find_rows(shape: Shape, strides: Shape, summed: Collection[int]) -> tuple[int, int] | None:
    """What a sum over some dimensions comes down to: (columns, rows) of a row-major matrix.

    None where it is no sum over rows. Sums sort dimensions by their strides first and join those
    that lie one in the other, so that heads and tokens may lie in either order.
    Source: aten/src/ATen/TensorIterator.cpp, reorder_dimensions and coalesce_dimensions.
    """
    order = sorted((d for d, n in enumerate(shape) if n != 1), key=lambda d: strides[d])
    numel = 1
    for d in order:
        if strides[d] != numel:
            return None
        numel *= shape[d]
    others = [d for d in order if d not in summed]
    columns = prod(shape[d] for d in others)
    return (columns, numel // columns) if others and order[: len(others)] == others else None


def row_sum(columns: int, rows: int, grid: Grid) -> Pieces:
    """Partial results of a sum over the rows of a row-major (rows, columns): fp32, or none.

    With them come the semaphores of its blocks, an allocation of their own.

    Where one block would add up too many values for each thread and blocks are fewer than the
    device runs at once, several blocks share a column.
    Source: aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig and global_memory_size. The rows
    of Liger-Kernel's benchmark on an A100 show it to the KiB (tests/meta/test_liger.py).
    """
    vector = REDUCE_VECTOR
    while vector > 1 and columns % vector:
        vector //= 2
    most = REDUCE_THREADS // vector
    across, down = _power(columns // vector, most), _power(rows, most)
    width = min(across, REDUCE_WARP)
    height = min(down, most // width)
    width = min(across, most // height)
    if rows < min(height * REDUCE_LEAST, REDUCE_MOST):
        return ()
    values = _blocks(rows, height)
    blocks = _blocks(columns // vector, width)
    wanted = grid.multiprocessors * (grid.threads // (width * height))
    if values < REDUCE_MOST or blocks > wanted:
        return ()
    shared = max(
        min(_blocks(wanted, blocks), _blocks(values, REDUCE_LEAST)), _blocks(values, REDUCE_MOST)
    )
    semaphores = _round_up(FP32 * blocks, SMALLEST)
    return (FP32 * columns * shared * width * vector, semaphores) if shared > 1 else ()


def _power(n: int, most: int) -> int:
    """The largest power of two up to n, and at most `most`, which is one."""
    found = 1
    while found < most and n >= 2 * found:
        found *= 2
    return found


def bias_workspace(device: Device, torch_version: str) -> int:
    """Return what cuBLASLt holds for itself from the first product with a bias on: torch 2.11.

    Measured on an H100 (docs/gpu.md). A plan, which needs no torch, leaves this MiB out.
    Source: pytorch/pytorch pull requests 168175 and 173002, which share the workspace.
    """
    older = tuple(map(int, torch_version.split(".")[:2])) < (2, 12)
    return MIB if device.platform == "cuda" and older else 0


def product_workspace(device: Device) -> int:
    """Return the bytes of one cuBLAS (hipBLAS) workspace, held from a thread's first product on.

    One for each thread and stream: the forward's and autograd's. cuBLASLt shares it from torch 2.12
    on (`bias_workspace`).
    Source: aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    if device.platform == "rocm":
        large = (device.compute_capability or "").startswith(("gfx94", "gfx95"))
        return (128 if large else 32) * MIB
    if device.capability is None or device.capability >= (9, 0):
        return 32 * MIB  # Hopper and Blackwell; the larger one when the device is unknown
    return 8 * MIB + 128 * KIB
