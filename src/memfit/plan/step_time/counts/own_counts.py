"""What is counted of memfit's own step: operations of a block, and bytes that eager ones move.

Published steps, which constants were fitted on, fuse their loss and the norms of queries and keys.
Bytes are those of the tensors that torch's operations read and write
(tests/plan/step_time/test_own_counts.py), but for soft-max's: of a row that no multiprocessor holds
its kernels read the logits three times forward (largest, sum, result), and twice what they read
backward (aten/native/cuda/SoftMax.cu).
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.base_formats import find_coding
from memfit.plan.frameworks import find_framework
from memfit.plan.step_time.arrays import change
from memfit.plan.step_time.counts.linear_attention import with_linear
from memfit.plan.step_time.counts.operations import Way, find_operations
from memfit.plan.step_time.work import Layout, Shape
from memfit.records.model import DTYPE_BYTES, Architecture
from memfit.records.recipe import Recipe

FP32, CAST = 4, 2 + 4  # bytes of a logit; of one cast from 16 bits, or to them
SOFTMAX, SOFTMAX_BACK = 3 * FP32 + FP32, 2 * (FP32 + FP32) + FP32
IN_PLACE = FP32 + FP32
# exp of the log-probabilities, their product, and its sum: the entropy that policies are shown by
ENTROPY = IN_PLACE + 3 * FP32 + FP32
# smoothed labels and what the softmax divides by: subtracted, scaled, averaged
REGULARISED = IN_PLACE + 3 * FP32 + FP32
# of a number of a query or key, forward and backward, where each head is normed by itself
NORM = {"cast": 134.0, "half": 110.0, "fp32": 104.0}

# More a projection in codes, in operations of torch's: what bitsandbytes launches, and its Python.
# int8 by its source: magnitudes, outliers found, counted and cut out, codes, product, scales, the
# outliers' own columns dense and multiplied. Four bits as the `fit` rows of
# measurements/decoding say: one kernel; scales, weight and product; scales that have scales.
EIGHT, EIGHT_PLAIN = 20, 9
FUSED, UNPACKED, DOUBLED = 3, 8, 3


class LogitBytes(NamedTuple):
    """Of one logit; 0: as fitted."""

    both: float  # forward and backward
    alone: float  # of a forward without a gradient


def count_logits(recipe: Recipe) -> LogitBytes:
    """Of a recipe's loss; a fused one has a kernel of its own, as published steps do."""
    if recipe.loss == "fused":
        return LogitBytes(0.0, 0.0)
    plain = recipe.loss == "plain"
    cast = 0 if recipe.compute_dtype == "float32" else CAST
    forward = cast + SOFTMAX
    if recipe.samples:
        forward += ENTROPY + SOFTMAX * plain
    if plain and not recipe.regularisation.bends:
        back = FP32 + SOFTMAX_BACK + cast
    else:  # from the log-probabilities in place
        back = 2 * IN_PLACE + cast + REGULARISED * recipe.regularisation.bends
    return LogitBytes(1.0 * (forward + back), 1.0 * forward)


def count_norms(shape: Shape, way: Way) -> float:
    """Of a token and block whose queries and keys are normed, forward and backward."""
    numbers: float = shape.key * (shape.heads + shape.kv_heads)
    return NORM[way] * numbers


def stored_width(recipe: Recipe) -> int:
    """Bytes of an element of a weight that has no codes."""
    return DTYPE_BYTES[recipe.frozen_dtype if recipe.adapted else recipe.trainable_dtype]


def way_of(recipe: Recipe) -> Way:
    """How blocks' weights are stored and multiplied, which casts depend on."""
    if recipe.compute_dtype == "float32":
        return "fp32"
    return "cast" if recipe.autocast and stored_width(recipe) == 4 else "half"


def count_quantised(recipe: Recipe, *, fused: bool = False) -> int:
    """Operations more of one product by a weight in codes; fused: with few rows, by its codes."""
    declared, double = find_coding(recipe.coding)
    if declared.product == "int8":
        return EIGHT if recipe.quantisation.outlier_threshold else EIGHT_PLAIN
    return (FUSED if fused else UNPACKED) + (DOUBLED if double else 0)


def with_counts(
    layout: Layout, recipe: Recipe, a: Architecture, shape: Shape, matrices: int
) -> Layout:
    """The layout of memfit's own step with what is counted of it; matrices: of all blocks.

    What a frozen base leaves out of a block trained whole is `adapters.with_adapters`'.
    """
    if not find_framework(recipe.framework).time.measured_launches:
        return layout
    way: Way = "cast" if recipe.adapted and recipe.autocast else way_of(recipe)
    logits, quantised = count_logits(recipe), count_quantised(recipe) if recipe.coding else 0
    found = change(
        layout, operations=float(find_operations(a.family, way).step),
        quantised=1.0 * quantised * matrices / max(a.layers, 1),
        waits=float(layout.numbers.eight > 0 and recipe.quantisation.outlier_threshold > 0),
        normed=(1 - shape.linear) * count_norms(shape, way) if a.qk_norm else 0.0,
        logit=logits.both, scored=logits.alone,
    )  # fmt: skip
    return with_linear(found, a.linear, shape, a.family, way) if a.recurrent else found
