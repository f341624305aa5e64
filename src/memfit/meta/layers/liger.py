"""Liger-Kernel's fused operations: what their autograd functions save and allocate.

Read from the functions of github.com/linkedin/Liger-Kernel, `ops/rms_norm.py`, `swiglu.py` and
`rope.py`. All of them write gradients in place, over a saved tensor or the incoming gradient.
Compared with the memory rows of the project's own benchmark on an A100
(`tests/meta/test_liger.py`). Its fused loss is `memfit.meta.losses.fused`.
"""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, cast, like, upstream
from memfit.meta.tensor import Tensor, empty, workspace
from memfit.meta.workspace import Grid, row_sum


def next_power_of_two(n: int) -> int:
    """The least power of two that is not less than n, as Triton's."""
    return 1 << (n - 1).bit_length()


def rms_norm(x: Tensor, weight: Tensor, grid: Grid | None, *, partial_rows: bool = False) -> Tensor:
    """`LigerRMSNorm`: (..., hidden) -> (..., hidden), one fp32 number a row saved beside x.

    grid: the device's multiprocessors, None of one; each has a row of the weight's gradient, or, up
    to version 0.3, each token has one (partial_rows), in the weight's dtype.
    """
    rows = x.numel // x.shape[-1]
    result = like(x)
    inverse = empty(x.meter, (rows,), "float32")
    node = record(_rms_norm_backward(rows, weight, grid, partial_rows), (x, weight), (x, inverse))
    return attach(node, result)


def _rms_norm_backward(rows: int, weight: Tensor, grid: Grid | None, partial_rows: bool) -> Rule:
    columns, dtype = weight.shape[-1], weight.dtype
    each = grid.multiprocessors if grid is not None else 1
    count, summed_dtype = (rows, dtype) if partial_rows else (each, "float32")

    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = row_major_copy(upstream(grads))  # becomes the gradient of x in place
        if not node.needs(1):
            return grad, None
        partial = empty(grad.meter, (count, columns), summed_dtype)
        total = empty(grad.meter, (columns,), summed_dtype)
        workspace(grad.meter, *(row_sum(columns, count, grid) if grid is not None else ()))
        del partial
        return grad, cast(total, dtype)

    return rule


def row_major_copy(x: Tensor) -> Tensor:
    """`x.contiguous()` where nothing is differentiated: x itself where it lies in rows."""
    return x if x.contiguous else empty(x.meter, x.shape, x.dtype)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`LigerSiLUMulFunction`: silu(gate) * up; the gradients overwrite the two saved inputs."""
    node = record(_silu_mul_backward, (gate, up), (gate, up))
    return attach(node, like(gate))


def _silu_mul_backward(node: Node, grads: Incoming) -> Gradients:
    return node.unpack(0).detached(), node.unpack(1).detached()


def rotate(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    """`LigerRopeFunction` over heads that lie (batch, tokens, heads, size): rotated in place."""
    node = record(_rotate_backward, (query, key), (cosines, sines))
    return attach(node, query.detached()), attach(node, key.detached())


def _rotate_backward(node: Node, grads: Incoming) -> Gradients:
    return grads[0], grads[1]
