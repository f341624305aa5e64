"""What a mixture of experts runs: choosing experts, ordering tokens by them, grouped products.

As `elementwise`: each rule names the tensors that torch's derivatives.yaml makes for it.
"""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, must_save, record
from memfit.meta.elementwise import Incoming, attach, autocast_lower, cast, like, upstream
from memfit.meta.tensor import Shape, Tensor, empty
from memfit.meta.views import transpose


def softmax_in_float(x: Tensor) -> Tensor:
    """`softmax(x, dim=-1, dtype=torch.float)`, which saves its result.

    Only CUDA's kernel for fp16 reads another dtype than it writes (aten SoftMax.cpp).
    """
    wide = x if x.meter.cuda and x.dtype == "float16" else cast(x, "float32")
    node = record(_saved_result_backward(x.dtype), (wide,))
    result = attach(node, like(wide, dtype="float32"))
    if node is not None:
        node.saved = [x.meter.pack(result)]
    return result


def _saved_result_backward(dtype: str) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad, result = upstream(grads), node.unpack(0)
        return (like(grad, result, dtype=dtype if dtype == "float16" else ""),)

    return rule


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`torch.topk(x, k)`: values and int64 indices, (..., k) each; saves the indices."""
    shape = (*x.shape[:-1], k)
    node = record(_scatter_backward(x.shape), (x,))
    values, indices = empty(x.meter, shape, x.dtype), empty(x.meter, shape, "int64")
    if node is not None:
        node.saved = [x.meter.pack(indices)]
    return attach(node, values), indices


def gather_last(x: Tensor, indices: Tensor) -> Tensor:
    """`x.gather(-1, indices)`: saves the indices."""
    node = record(_scatter_backward(x.shape), (x,), (indices,))
    return attach(node, empty(x.meter, indices.shape, x.dtype))


def _scatter_backward(shape: Shape) -> Rule:
    """Zeros of the whole, and a copy with the gradient in it.

    Where nothing watches tensors torch writes into the zeros (FunctionsManual.cpp, "composite
    compliance"): a trace and this hold them for an instant more than a plain run, of the router's
    few columns.
    """

    def rule(node: Node, grads: Incoming) -> Gradients:
        grad, _ = upstream(grads), node.unpack(0)
        zeros = empty(grad.meter, shape, grad.dtype)
        return (like(zeros),)

    return rule


def total(x: Tensor, dim: int, *, keep: bool = False) -> Tensor:
    """`x.sum(dim, keepdim=keep, dtype=x.dtype)`."""
    at = dim % len(x.shape)
    shape = (*x.shape[:at], *((1,) if keep else ()), *x.shape[at + 1 :])
    node = record(_total_backward(x.shape, at, keep), (x,))
    return attach(node, empty(x.meter, shape, x.dtype))


def _total_backward(shape: Shape, dim: int, keep: bool) -> Rule:
    """The gradient expanded along `dim`, as a view."""

    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        after = grad.strides[dim + keep :]
        return (grad.viewed(shape, (*grad.strides[:dim], 0, *after)),)

    return rule


def divide_in_place(x: Tensor, by: Tensor) -> Tensor:
    """`x /= by`, where `by` came from x: x has to be copied for its derivative."""
    copy = like(x) if x.requires_grad else None
    node = record(_divide_backward, (x, by), (copy, by))
    return attach(node, x.detached())


def _divide_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    x, by = node.unpack(0), node.unpack(1)
    other = _of_divisor(grad, x, by)
    return like(grad, by, shape=grad.shape), other


def _of_divisor(grad: Tensor, x: Tensor, by: Tensor) -> Tensor:
    negated = like(grad)
    once = like(x, by, shape=x.shape)
    twice = like(once, by, shape=x.shape)
    return like(negated, twice)


def correct(x: Tensor) -> Tensor:
    """`x + buffer`, an fp32 one of one row."""
    return attach(record(_same_backward, (x,)), like(x, dtype="float32"))


def _same_backward(node: Node, grads: Incoming) -> Gradients:
    return (upstream(grads),)


def total_in_float(x: Tensor) -> Tensor:
    """`x.sum(-1, keepdim=True)`, which CUDA's autocast does in fp32."""
    wide = x.meter.autocast and x.meter.cuda
    node = record(_total_backward(x.shape, len(x.shape) - 1, True), (x,))
    return attach(node, empty(x.meter, (*x.shape[:-1], 1), "float32" if wide else x.dtype))


def inverted(x: Tensor) -> Tensor:
    """`~x.bool()`."""
    yes = like(x, dtype="bool")
    return like(yes)


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """`x[rows]`: (count, columns) -> (rows, columns); saves `rows`.

    Its gradient is zeros of the whole, and a copy into which the rows are added; see
    `_scatter_backward` of when torch does without the copy.
    """
    node = record(_scatter_backward(x.shape), (x,), (rows,))
    return attach(node, empty(x.meter, (rows.shape[0], x.shape[1]), x.dtype))


def sort(x: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.sort(x)` of integers: them in order, and where they were (int64)."""
    return like(x), like(x, dtype="int64")


def integers(x: Tensor, count: int, dtype: str = "int64") -> Tensor:
    """As many numbers on x's device."""
    return empty(x.meter, (count,), dtype)


def spread(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Each token once for each of its experts: (tokens, hidden) -> (rows, hidden); saves `back`.

    `_Spread` of train/model/experts.py.
    """
    node = record(_spread_backward(x.shape), (x,), (back,))
    rows = like(order)  # which token each row is
    result = empty(x.meter, (*rows.shape, *x.shape[1:]), x.dtype)
    return attach(node, result)


def _spread_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad, _ = upstream(grads), node.unpack(0)
        rows = empty(grad.meter, grad.shape, grad.dtype)
        result = empty(grad.meter, shape, grad.dtype)
        del rows  # alive until here
        return (result,)

    return rule


def restore(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Return the rows in the order of the tokens; saves `order`. As train/model/experts.py."""
    node = record(_restore_backward, (x,), (order,))
    return attach(node, empty(x.meter, (*back.shape, *x.shape[1:]), x.dtype))


def _restore_backward(node: Node, grads: Incoming) -> Gradients:
    grad, _ = upstream(grads), node.unpack(0)
    return (empty(grad.meter, grad.shape, grad.dtype),)


def add_dimension(x: Tensor) -> Tensor:
    """`x.unsqueeze(-1)`, with its gradient."""
    node = record(_remove_dimension, (x,))
    return attach(node, x.viewed((*x.shape, 1), (*x.strides, 1)))


def _remove_dimension(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    return (grad.viewed(grad.shape[:-1], grad.strides[:-1]),)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows with its own matrix: (rows, columns) x (groups, n, columns) -> (rows, n).

    `torch.nn.functional.grouped_mm` with the weights transposed, autocast as train/model/experts.py
    does it. Empty groups, and one that holds every row, cost the same.
    """
    return grouped_product(x, transpose(weight, 1, 2), ends)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The same with weights (groups, columns, n)."""
    low = autocast_lower(x)
    return grouped_multiply(low, autocast_lower(weight), ends)


def grouped_multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm(x, weight, offs=ends)`: (rows, k) x (groups, k, n) -> (rows, n).

    CUTLASS runs it, so that it takes no workspace of cuBLAS's.
    """
    saved = (weight if x.requires_grad else None, ends, x if weight.requires_grad else None)
    by_column = weight.strides[1] < weight.strides[2]
    node = record(_grouped_backward(by_column), (x, weight), saved)
    (product,) = must_save(x.meter, lambda: (_grouped_rows(x, weight),))
    return attach(node, product)


def _grouped_backward(by_column: bool) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        weight = node.unpack(0) if node.needs(0) else None
        ends = node.unpack(1)  # alive to the end, as every unpacked tensor
        x = node.unpack(2) if node.needs(1) else None
        other = None if x is None else _grouped_weights(grad, x, ends.shape[0], by_column)
        return (None if weight is None else _grouped_rows(grad, transpose(weight, 1, 2))), other

    return rule


def _grouped_rows(x: Tensor, weight: Tensor) -> Tensor:
    return empty(x.meter, (x.shape[0], weight.shape[2]), x.dtype)


def _grouped_weights(grad: Tensor, x: Tensor, groups: int, by_column: bool) -> Tensor:
    """(groups, k, n), column after column where the weights are: transposed ones."""
    n, k = grad.shape[1], x.shape[1]
    if not by_column:
        return empty(grad.meter, (groups, k, n), grad.dtype)
    product = empty(grad.meter, (groups, n, k), grad.dtype)
    return product.viewed((groups, k, n), (n * k, 1, k))


def count_received(rows: int, imbalance: float) -> int:
    """Rows that a rank is taken to receive for its experts, where each rank sends `rows`.

    imbalance: over what an even routing brings, which is as many; in hundredths.
    """
    return rows if imbalance == 1 else rows * round(100 * imbalance) // 100


def exchange(x: Tensor, rows: int) -> Tensor:
    """(sent, width) -> (rows, width), of other ranks: `exchange` of train/distributed/dealt.py."""
    node = record(_exchange_backward(x.shape), (x,))
    return attach(node, empty(x.meter, (rows, *x.shape[1:]), x.dtype))


def _exchange_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (empty(grad.meter, shape, grad.dtype),)

    return rule
