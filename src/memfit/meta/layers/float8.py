"""torchao's `Float8Linear` with a scale a tensor, without a compiler: what it saves and allocates.

Read from torchao/float8: float8_linear.py (`matmul_with_hp_or_float8_args`), float8_utils.py
(`tensor_to_scale`, `to_fp8_saturated`), float8_training_tensor.py (`_ToFloat8ConstrFunc`) and
float8_ops.py (`preprocess_addmm`), local variables and all.
"""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import Incoming, add, attach, cast, like, upstream
from memfit.meta.tensor import Tensor, empty
from memfit.meta.views import reshape, transpose

CODES = "float8_e4m3fn"  # as many bytes as e5m2


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., in) x (out, in) -> (..., out) in the dtype of autocast; keeps x as it is cast."""
    if x.meter.autocast:
        x = cast(x, x.meter.low)
    turned = transpose(weight, 0, 1)
    node = record(_backward, (x, turned), (x, turned))
    result = attach(node, _forward(x, turned))
    return result if bias is None else add(result, cast(bias, result.dtype))


def _forward(x: Tensor, turned: Tensor) -> Tensor:
    rows = _code(x.detached())
    columns = _code(turned.detached())
    flat = reshape(rows[0], -1, x.shape[-1])
    product = _multiply(flat, columns[0], x.dtype)
    return reshape(product, *x.shape[:-1], turned.shape[1])


def _backward(node: Node, grads: Incoming) -> Gradients:
    grad = upstream(grads)
    x, turned = node.unpack(0), node.unpack(1)
    flat = reshape(grad, -1, grad.shape[-1])
    first = _code(flat)
    columns = _code(turned)
    d_x = _multiply(first[0], transpose(columns[0], 0, 1), grad.dtype)
    d_x = reshape(d_x, *grad.shape[:-1], d_x.shape[-1])
    rows = reshape(x, -1, x.shape[-1])
    second = _code(flat)
    first = _code(rows)
    d_weight = _multiply(transpose(second[0], 0, 1), first[0], grad.dtype)
    return d_x, d_weight.viewed((d_weight.shape[1], d_weight.shape[0]), (1, d_weight.shape[1]))


def _code(x: Tensor) -> tuple[Tensor, Tensor]:
    """One byte an element, and their scale: the largest magnitude, then scaled, clamped, cast."""
    magnitudes = like(x)
    del magnitudes
    scale = empty(x.meter, (), "float32")
    wide = x if x.dtype == "float32" else like(x, dtype="float32")
    scaled = like(wide)
    del wide
    clamped = like(scaled)
    codes = like(clamped, dtype=CODES)
    del scaled
    return codes, scale


def _multiply(a: Tensor, b: Tensor, dtype: str) -> Tensor:
    """`torch._scaled_mm`, which wants a by rows and b by columns: copies where they are not."""
    (m, k), n = a.shape, b.shape[1]
    if not _by_rows(a):
        a = empty(a.meter, a.shape, a.dtype)
    if _by_rows(b):
        b = empty(b.meter, b.shape, b.dtype, strides=(1, k))
    inverse = empty(a.meter, (), "float32"), empty(a.meter, (), "float32")  # of the scales
    a.meter.begin_product()
    product = empty(a.meter, (m, n), dtype)
    del inverse
    return product


def _by_rows(x: Tensor) -> bool:
    return x.strides[0] > x.strides[1] and x.strides[1] == 1
