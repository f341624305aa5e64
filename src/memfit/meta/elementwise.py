"""Elementwise operations, reductions, casts and norms, with what their derivatives hold.

Each rule names the tensors that torch's derivatives.yaml makes for it, in its order (derivatives
of one operation are written out by the alphabet of its arguments' names: `other` before `self`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.tensor import Shape, Tensor, broadcast, elementwise_strides, empty, workspace
from memfit.meta.workspace import embedding_backward, layer_norm_backward
from memfit.records.ledger import Kind
from memfit.records.model import DTYPE_BYTES

WIDTH = {"complex64": 4, "float64": 3, "float32": 2, "bfloat16": 1, "float16": 1}
Incoming = list[Tensor | None]


def like(*operands: Tensor, dtype: str = "", shape: Shape | None = None) -> Tensor:
    """The result of one elementwise kernel over its operands, without history."""
    first = operands[0]
    full = first.shape if shape is None else shape
    if dtype == "":
        dtype = first.dtype
        for t in operands[1:]:
            if WIDTH.get(t.dtype, 0) > WIDTH.get(dtype, 0):
                dtype = t.dtype
    return empty(first.meter, full, dtype, strides=elementwise_strides(full, operands))


def attach(node: Node | None, result: Tensor) -> Tensor:
    """Give a result its history."""
    return result if node is None else node.attach(result)


def upstream(grads: Incoming) -> Tensor:
    """The gradient of a node with one output."""
    grad = grads[0]
    if grad is None:
        raise RuntimeError("a node with one output ran without its gradient")
    return grad


def cast(x: Tensor, dtype: str) -> Tensor:
    """`x.to(dtype)`: a copy, or x itself when nothing changes."""
    if x.dtype == dtype:
        return x
    node = record(_cast_backward(x.dtype), (x,))
    return attach(node, like(x, dtype=dtype))


def _cast_backward(dtype: str) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        return (grad if grad.dtype == dtype else like(grad, dtype=dtype),)

    return rule


def autocast_lower(x: Tensor) -> Tensor:
    """Return what autocast feeds to matrix products: 16-bit copies, made at each use.

    Those of weights are cached in `Meter.casts`, where it is not None.
    """
    if not (x.meter.autocast and x.dtype == "float32"):
        return x
    casts, weight = x.meter.casts, x.meter.kinds[x.storage.index] is Kind.PARAMETERS
    if casts is None or not (weight and (x.requires_grad or x.meter.casts_frozen)):
        return cast(x, x.meter.low)
    if x.storage.index not in casts:
        casts[x.storage.index] = cast(x, x.meter.low)
    return casts[x.storage.index]


def autocast_upper(x: Tensor) -> Tensor:
    """What autocast feeds to numerically delicate operations on CUDA: fp32."""
    narrow = x.meter.autocast and x.meter.cuda and x.dtype in ("bfloat16", "float16")
    return cast(x, "float32") if narrow else x


def mul(a: Tensor, b: Tensor) -> Tensor:
    """`a * b` with broadcasting."""
    saved = (a if b.requires_grad else None, b if a.requires_grad else None)
    node = record(_mul_backward, (a, b), saved)
    return attach(node, like(a, b, shape=broadcast(a.shape, b.shape)))


def _mul_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    a = node.unpack(0) if node.needs(1) else None
    b = node.unpack(1) if node.needs(0) else None
    other = None if a is None else like(grad, a, shape=grad.shape)
    itself = None if b is None else like(grad, b, shape=grad.shape)
    return itself, other


def scale(x: Tensor) -> Tensor:
    """`x * number`, `number * x`."""
    return attach(record(_scale_backward, (x,)), like(x))


def _scale_backward(node: Node, grads: Incoming) -> Gradients:
    return (like(upstream(grads)),)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension, which saves its result."""
    return _saving_result(_pointwise_backward, x)


def softmax_wide(x: Tensor) -> Tensor:
    """`F.softmax(x, -1, dtype=torch.float32)`; CUDA reads fp16 itself, others want a copy.

    Source: aten/src/ATen/native/SoftMax.cpp, `softmax`.
    """
    if not x.meter.cuda or x.dtype != "float16":
        return softmax(cast(x, "float32"))
    node = record(_softmax_wide_backward, (x,))
    result = attach(node, like(x, dtype="float32"))
    if node is not None:
        node.saved = [x.meter.pack(result)]
    return result


def _softmax_wide_backward(node: Node, grads: Incoming) -> Gradients:
    grad, result = upstream(grads), node.unpack(0)
    return (like(grad, result, dtype="float16"),)


def add(a: Tensor, b: Tensor) -> Tensor:
    """`a + b` with broadcasting; both inputs receive the very same gradient."""
    node = record(_add_backward, (a, b))
    return attach(node, like(a, b, shape=broadcast(a.shape, b.shape)))


def add_into(a: Tensor, b: Tensor) -> Tensor:
    """`a += b`: a's storage with another history."""
    return attach(record(_add_backward, (a, b)), a.detached())


def _add_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    return (grad if node.needs(0) else None), (grad if node.needs(1) else None)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """`a - b` with broadcasting."""
    node = record(_subtract_backward, (a, b))
    return attach(node, like(a, b, shape=broadcast(a.shape, b.shape)))


def _subtract_backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    other = like(grad) if node.needs(1) else None
    return (grad if node.needs(0) else None), other


def shift(x: Tensor) -> Tensor:
    """`x + number`."""
    return attach(record(_same_backward, (x,)), like(x))


def _same_backward(node: Node, grads: Incoming) -> Gradients:
    return (upstream(grads),)


def negative(x: Tensor) -> Tensor:
    """`-x`."""
    return attach(record(_negative_backward, (x,)), like(x))


def _negative_backward(node: Node, grads: Incoming) -> Gradients:
    return (like(upstream(grads)),)


def power(x: Tensor) -> Tensor:
    """`x.pow(n)`, n > 1; fp32 under CUDA's autocast."""
    wide = autocast_upper(x)
    node = record(_power_backward, (wide,), (wide,))
    return attach(node, like(wide))


def _power_backward(node: Node, grads: Incoming) -> Gradients:
    grad, x = upstream(grads), node.unpack(0)
    lower = like(x)  # C++ keeps every temporary of an expression to its end
    scaled = like(lower)
    return (like(grad, scaled),)


def mean_last(x: Tensor) -> Tensor:
    """`x.mean(-1, keepdim=True)`."""
    node = record(_mean_backward(x.shape), (x,))
    return attach(node, empty(x.meter, (*x.shape[:-1], 1), x.dtype))


def _mean_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        expanded = grad.viewed(shape, (*grad.strides[:-1], 0))
        return (like(expanded),)

    return rule


def rsqrt(x: Tensor) -> Tensor:
    """`torch.rsqrt(x)`, which saves its result."""
    return _saving_result(_rsqrt_backward, autocast_upper(x))


def _saving_result(rule: Rule, x: Tensor) -> Tensor:
    node = record(rule, (x,))
    result = attach(node, like(x))
    if node is not None:
        node.saved = [x.meter.pack(result)]
    return result


def _rsqrt_backward(node: Node, grads: Incoming) -> Gradients:
    grad, result = upstream(grads), node.unpack(0)
    cubed = like(result)
    scaled = like(grad)
    return (like(scaled, cubed),)


def fill_masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x.masked_fill(mask, number)`: keeps the mask."""
    return attach(record(_fill_masked_backward, (x,), (mask,)), like(x))


def fill_masked_in_place(x: Tensor, mask: Tensor) -> Tensor:
    """`x.masked_fill_(mask, number)`: x's storage with another history."""
    return attach(record(_fill_masked_backward, (x,), (mask,)), x.detached())


def clamp(x: Tensor, bounds: int) -> Tensor:
    """`x.clamp(…)` with one or two bounds: saves its input."""
    return attach(record(_clamp_backward(bounds), (x,), (x,)), like(x))


def _clamp_backward(bounds: int) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad, x = upstream(grads), node.unpack(0)
        inside = like(x, dtype="bool")
        other = like(x, dtype="bool") if bounds == 2 else None
        result = like(inside, grad, dtype=grad.dtype)
        del other  # alive until here
        return (result,)

    return rule


def _fill_masked_backward(node: Node, grads: Incoming) -> Gradients:
    grad, _ = upstream(grads), node.unpack(0)
    return (like(grad),)


def own_function(
    forward: Callable[[Tensor], Tensor], slope: Callable[[Tensor, Tensor], Tensor], x: Tensor
) -> Tensor:
    """A `torch.autograd.Function` of x that saves x alone; `slope` takes x and the gradient."""

    def rule(node: Node, grads: Incoming) -> Gradients:
        return (slope(node.unpack(0), upstream(grads)),)

    node = record(rule, (x,))
    result = attach(node, forward(x.detached()))
    if node is not None:
        node.saved = [x.meter.pack(x)]
    return result


def tanh(x: Tensor) -> Tensor:
    """`torch.tanh(x)`, which saves its result."""
    return _saving_result(_pointwise_backward, x)


def relu(x: Tensor) -> Tensor:
    """`F.relu(x)`, which saves its result."""
    return _saving_result(_pointwise_backward, x)


def exp(x: Tensor) -> Tensor:
    """`torch.exp(x)`, which saves its result."""
    return _saving_result(_pointwise_backward, x)


def sigmoid(x: Tensor) -> Tensor:
    """`torch.sigmoid(x)`, which saves its result."""
    return _saving_result(_pointwise_backward, x)


def silu(x: Tensor) -> Tensor:
    """`F.silu(x)`: saves its input."""
    return attach(record(_pointwise_backward, (x,), (x,)), like(x))


def gelu(x: Tensor) -> Tensor:
    """`F.gelu(x)`, exact or with tanh in one kernel: saves its input."""
    return attach(record(_pointwise_backward, (x,), (x,)), like(x))


def softplus(x: Tensor) -> Tensor:
    """`F.softplus(x)`: saves its input."""
    return attach(record(_pointwise_backward, (x,), (x,)), like(x))


def _pointwise_backward(node: Node, grads: Incoming) -> Gradients:
    """The derivative in one kernel, of the gradient and what was saved."""
    grad, saved = upstream(grads), node.unpack(0)
    return (like(grad, saved),)


def dropout(x: Tensor) -> Tensor:
    """`F.dropout` in training: CUDA keeps a mask of booleans, a CPU the noise in x's dtype."""
    if not x.meter.cuda:
        return mul(x, like(x))
    node = record(_dropout_backward, (x,))
    result = attach(node, like(x))
    mask = like(x, dtype="bool")
    if node is not None:
        node.saved = [x.meter.pack(mask)]
    return result


def _dropout_backward(node: Node, grads: Incoming) -> Gradients:
    grad, _ = upstream(grads), node.unpack(0)
    return (like(grad),)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.layer_norm` over the last dimension; fp32 under CUDA's autocast."""
    meter = x.meter
    low_bias = None if bias is None else autocast_upper(bias)  # C++ evaluates the last first
    low_weight = autocast_upper(weight)
    inputs = (autocast_upper(x), low_weight, low_bias)
    node = record(_layer_norm_backward, inputs, inputs)
    result = attach(node, like(inputs[0]))
    row = (*x.shape[:-1], 1)
    statistics = "float32" if meter.cuda else inputs[0].dtype
    mean, rstd = empty(meter, row, statistics), empty(meter, row, statistics)
    if node is not None:
        node.saved = [*node.saved, meter.pack(mean), meter.pack(rstd)]
    return result


def _layer_norm_backward(node: Node, grads: Incoming) -> Gradients:
    upstream(grads)
    unpacked = [None if saved is None else node.unpack(i) for i, saved in enumerate(node.saved)]
    return layer_norm_slopes(node, unpacked[:3])


def layer_norm_slopes(node: Node, inputs: Sequence[Tensor | None]) -> Gradients:
    """The gradients of x, weight and bias, where the node wants them."""
    x, weight, bias = inputs
    result: list[Tensor | None] = []
    for i, t in enumerate((x, weight, bias)):
        wanted = t is not None and node.needs(i)
        result.append(like(t) if t is not None and wanted else None)
    if x is not None and x.meter.cuda:
        _layer_norm_workspace(node, x, weight)
    return result


def _layer_norm_workspace(node: Node, x: Tensor, weight: Tensor | None) -> None:
    columns = x.shape[-1]
    width = DTYPE_BYTES[x.dtype if weight is None else weight.dtype]
    wanted = node.needs(1) + node.needs(2)
    pieces = layer_norm_backward(x.numel // columns, columns, width, wanted, x.meter.grid)
    workspace(x.meter, *pieces)


def gather_rows(weight: Tensor, indices: Tensor) -> Tensor:
    """`F.embedding`: rows of `weight` in the shape of the indices; a dense gradient."""
    node = record(_gather_backward(weight.shape), (weight,), (indices,))
    result = empty(weight.meter, (*indices.shape, weight.shape[-1]), weight.dtype)
    return attach(node, result)


def _gather_backward(shape: Shape) -> Rule:
    def rule(node: Node, grads: Incoming) -> Gradients:
        grad = upstream(grads)
        indices = node.unpack(0)
        made = empty(grad.meter, shape, grad.dtype)
        if grad.meter.cuda:
            workspace(grad.meter, *embedding_backward(indices.numel, *shape))
        return (made,)

    return rule
