"""Pairs of elements as complex numbers, which some rotary embeddings are written with."""

from __future__ import annotations

from memfit.meta.autograd import Gradients, Node, record
from memfit.meta.elementwise import Incoming, attach, like, upstream
from memfit.meta.tensor import Tensor, broadcast, empty
from memfit.meta.views import contiguous

COMPLEX, REAL = "complex64", "float32"


def view_as_complex(x: Tensor) -> Tensor:
    """`torch.view_as_complex(x)`: fp32 (..., 2) -> (...)."""
    return attach(record(_as_complex_backward, (x,)), _as_complex(x))


def _as_complex(x: Tensor) -> Tensor:
    return x.viewed(x.shape[:-1], tuple(s // 2 for s in x.strides[:-1]), COMPLEX)


def _as_complex_backward(node: Node, grads: Incoming) -> Gradients:
    return (_as_real(contiguous(upstream(grads))),)


def view_as_real(x: Tensor) -> Tensor:
    """`torch.view_as_real(x)`: (...) -> fp32 (..., 2)."""
    return attach(record(_as_real_backward, (x,)), _as_real(x))


def _as_real(x: Tensor) -> Tensor:
    return x.viewed((*x.shape, 2), (*(2 * s for s in x.strides), 1), REAL)


def _as_real_backward(node: Node, grads: Incoming) -> Gradients:
    return (_as_complex(contiguous(upstream(grads))),)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """`x * angles`, complex; the angles have no gradient, and backward makes their conjugate."""
    node = record(_turn_backward, (x,), (angles,))
    return attach(node, like(x, angles, shape=broadcast(x.shape, angles.shape)))


def _turn_backward(node: Node, grads: Incoming) -> Gradients:
    grad, angles = upstream(grads), node.unpack(0)
    conjugate = empty(angles.meter, angles.shape, COMPLEX)
    return (like(grad, conjugate),)
