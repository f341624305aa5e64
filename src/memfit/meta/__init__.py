"""Autograd with sizes only: what a forward and a backward hold, without torch and without data.

A family's forward is written over these operations with the local variables of the real module's
code; storages die by reference counting, so the log of a `Meter` is the trace of the real step.
"""

from memfit.meta.attending.attention import (
    attention,
    bias_of,
    by_document,
    capped,
    make_band,
    without_padding,
)
from memfit.meta.attending.varlen import end_to_end, make_starts
from memfit.meta.autograd import backward, checkpoint
from memfit.meta.complex_numbers import turn, view_as_complex, view_as_real
from memfit.meta.elementwise import (
    add,
    add_into,
    cast,
    clamp,
    dropout,
    fill_masked,
    gather_rows,
    gelu,
    layer_norm,
    mean_last,
    mul,
    negative,
    own_function,
    power,
    relu,
    rsqrt,
    scale,
    shift,
    silu,
    softmax,
    softmax_wide,
    subtract,
    tanh,
)
from memfit.meta.meter import Meter
from memfit.meta.pieces import expand, fill_part
from memfit.meta.products import (
    add_multiply_batched,
    conv1d,
    linear,
    linear_by_columns,
    multiply,
    multiply_batched,
    multiply_heads,
    multiply_turned,
)
from memfit.meta.reentrant import checkpoint_reentrant, want_gradient
from memfit.meta.tensor import Shape, Storage, Tensor, empty, parameter
from memfit.meta.views import (
    concatenate,
    contiguous,
    every_other,
    expand_heads,
    narrow,
    pad_last,
    repeat_heads,
    reshape,
    select,
    split,
    transpose,
    unsqueeze,
    view,
)

__all__ = [
    "Meter", "Shape", "Storage", "Tensor", "add", "add_into", "add_multiply_batched", "attention",
    "backward", "bias_of", "by_document", "capped", "cast", "checkpoint", "checkpoint_reentrant",
    "clamp",
    "concatenate", "contiguous", "conv1d", "dropout", "empty", "end_to_end", "every_other",
    "expand", "expand_heads", "fill_masked", "fill_part", "gather_rows", "gelu", "layer_norm",
    "linear", "linear_by_columns", "make_band", "make_starts", "mean_last", "mul", "multiply",
    "multiply_batched", "multiply_heads", "multiply_turned", "narrow", "negative", "own_function",
    "pad_last",
    "parameter", "power", "relu", "repeat_heads", "reshape", "rsqrt", "scale", "select", "shift",
    "silu", "softmax", "softmax_wide", "split", "subtract", "tanh", "transpose", "turn",
    "unsqueeze", "view", "view_as_complex", "view_as_real", "want_gradient",
    "without_padding",
]  # fmt: skip
