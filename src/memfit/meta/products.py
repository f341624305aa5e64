"""Matrix products."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, Rule, must_save, record
from memfit.meta.elementwise import Incoming, add, attach, autocast_lower, like, upstream
from memfit.meta.tensor import Tensor, empty
from memfit.meta.views import reshape, transpose, view


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: (..., columns) x (rows, columns) -> (..., rows).

    The arguments stay bound while it runs, as the caller's references do in torch.
    """
    low_bias = None if bias is None else autocast_lower(bias)  # C++ evaluates the last first
    low_weight = autocast_lower(weight)
    low = autocast_lower(x)
    flat = len(x.shape) == 2
    if low_bias is not None:
        rows = low if flat else reshape(low, -1, x.shape[-1])
        product = add_multiply(low_bias, rows, transpose(low_weight, 0, 1))
    else:
        turned = transpose(low_weight, 0, 1)
        product = multiply(low if flat else reshape(low, -1, x.shape[-1]), turned)
    return product if flat else view(product, *x.shape[:-1], weight.shape[0])


def linear_by_columns(x: Tensor, weight: Tensor, rows: int, bias: Tensor | None = None) -> Tensor:
    """`linear` without a gradient by a weight that lies by columns; rows: as many results are made,
    of which the weight's own are read."""
    made = empty(x.meter, (*x.shape[:-1], rows), x.dtype)
    del bias  # is added in place
    return made.viewed((*x.shape[:-1], weight.shape[0]), made.strides)


def multiply_turned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`: as `linear`, with a tensor of its own for the product."""
    turned = transpose(weight, 0, 1)
    low_weight = autocast_lower(turned)  # C++ evaluates the last first
    low = autocast_lower(x)
    flat = len(x.shape) == 2
    rows = multiply(low if flat else reshape(low, -1, x.shape[-1]), low_weight)
    product = rows if flat else view(rows, *x.shape[:-1], weight.shape[0])
    return product if bias is None else add(product, bias)


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """GPT-2's Conv1D: `torch.addmm(bias, x, weight)` with weight (columns, rows)."""
    rows = view(x, -1, x.shape[-1])
    low_weight, low = autocast_lower(weight), autocast_lower(rows)
    product = add_multiply(autocast_lower(bias), low, low_weight)
    return view(product, *x.shape[:-1], weight.shape[1])


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """`torch.mm(a, b)`: (m, k) x (k, n) -> (m, n)."""
    saved = (a if b.requires_grad else None, b if a.requires_grad else None)
    node = record(_multiply_backward(_by_column(b)), (a, b), saved)
    (product,) = must_save(a.meter, lambda: (_product(a, b),))
    return attach(node, product)


def _multiply_backward(by_column: bool) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        a = node.unpack(0) if node.needs(1) else None
        b = node.unpack(1) if node.needs(0) else None
        second = None if a is None else _second_factor(grad, a, by_column)
        first = None if b is None else _product(grad, _flip(b))
        return first, second

    return rule


def add_multiply(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`torch.addmm(bias, a, b)`: (n) + (m, k) x (k, n) -> (m, n)."""
    saved = (a if b.requires_grad else None, b if a.requires_grad else None)
    node = record(_add_multiply_backward(_by_column(b)), (bias, a, b), saved)
    (product,) = must_save(a.meter, lambda: (_product(a, b),))
    return attach(node, product)


def _add_multiply_backward(by_column: bool) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        a = node.unpack(0) if node.needs(2) else None
        b = node.unpack(1) if node.needs(1) else None
        first = None if b is None else _product(grad, _flip(b))
        second = None if a is None else _second_factor(grad, a, by_column)
        return (grad if node.needs(0) else None), first, second

    return rule


def multiply_batched(a: Tensor, b: Tensor) -> Tensor:
    """`torch.bmm(a, b)`: (n, m, k) x (n, k, p) -> (n, m, p)."""
    saved = (b if a.requires_grad else None, a if b.requires_grad else None)
    node = record(_multiply_batched_backward, (a, b), saved)
    return attach(node, _batched_product(a, b))


def _multiply_batched_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    b = node.unpack(0) if node.needs(0) else None
    a = node.unpack(1) if node.needs(1) else None
    second = None if a is None else _batched_product(_swap(a), grad)
    first = None if b is None else _batched_product(grad, _swap(b))
    return first, second


def add_multiply_batched(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`torch.baddbmm(c, a, b, alpha=number)`; c has no gradient and is broadcast."""
    low_b = autocast_lower(b)  # C++ evaluates the last first
    low_a = autocast_lower(a)
    low_c = autocast_lower(c)
    node = record(_add_multiply_batched_backward, (low_a, low_b), (low_a, low_b))
    result = attach(node, _batched_product(low_a, low_b))
    del low_c
    return result


def _add_multiply_batched_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    b = node.unpack(1) if node.needs(0) else None
    a = node.unpack(0) if node.needs(1) else None
    first = None if b is None else like(_batched_product(grad, _swap(b)))  # times the number
    second = None if a is None else like(_batched_product(_swap(a), grad))
    return first, second


def multiply_heads(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul` of (batch, heads, m, k) and (batch, heads, k, n)."""
    low_b = autocast_lower(b)  # C++ evaluates the last first
    low_a = autocast_lower(a)
    rows, heads = a.shape[:2]
    flat_a = reshape(low_a, rows * heads, *a.shape[2:])
    flat_b = reshape(low_b, rows * heads, *b.shape[2:])
    return view(multiply_batched(flat_a, flat_b), rows, heads, a.shape[2], b.shape[3])


def _batched_product(a: Tensor, b: Tensor) -> Tensor:
    a.meter.begin_product()
    return empty(a.meter, (*a.shape[:2], b.shape[2]), a.dtype)


def _swap(x: Tensor) -> Tensor:
    n, m, k = x.shape
    return x.viewed((n, k, m), (x.strides[0], x.strides[2], x.strides[1]))


def _product(a: Tensor, b: Tensor) -> Tensor:
    a.meter.begin_product()
    return empty(a.meter, (a.shape[0], b.shape[1]), a.dtype)


def _by_column(b: Tensor) -> bool:
    """Whether a matrix lies column after column, as a transposed weight does."""
    return b.strides == (1, b.shape[0])


def _second_factor(grad: Tensor, a: Tensor, by_column: bool) -> Tensor:
    """The gradient of (k, n), laid out as the factor is (ATen's `mm_mat2_backward`)."""
    if by_column:
        return _flip(_product(_flip(grad), a))
    return _product(_flip(a), grad)


def _flip(x: Tensor) -> Tensor:
    return x.viewed((x.shape[1], x.shape[0]), (x.strides[1], x.strides[0]))
