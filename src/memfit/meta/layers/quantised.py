"""Products of memfit's own step with weights that are stored in 8 or 4 bits, in bytes.

What train/model/quantised.py calls, and what bitsandbytes 0.50 does there: autograd/_functions.py
(MatMul4Bit), backends/cuda/ops.py (what its kernels allocate inside themselves).
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from memfit.base_formats import find_coding
from memfit.meta.autograd import Gradients, Node, Rule, record
from memfit.meta.elementwise import Incoming, attach, autocast_lower, like, upstream
from memfit.meta.meter import Meter
from memfit.meta.tensor import Tensor, empty, workspace
from memfit.meta.views import reshape, view
from memfit.records.model import DTYPE_BYTES
from memfit.records.recipe import Recipe

FP32, FP16, INT32, INT8 = 4, 2, 4, 1


class Quantised(NamedTuple):
    """How the weights are stored, and how many columns of an input may hold outliers."""

    coding: str = ""
    outliers: bool = False  # whether such columns are looked for
    share: float = 0.0  # of the columns

    @classmethod
    def of(cls, recipe: Recipe) -> Quantised:
        """As the recipe says."""
        own = recipe.quantisation
        return cls(recipe.coding, own.outlier_threshold > 0, own.outlier_share)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(..., columns) x (rows, columns) -> (..., rows), in the dtype of matrix products."""
        low = autocast_lower(x)
        flat = len(x.shape) == 2
        rows = low if flat else reshape(low, -1, x.shape[-1])
        eight = find_coding(self.coding)[0].product == "int8"
        product = self._eight(rows, weight) if eight else self._unpacked(rows, weight)
        return product if flat else view(product, *x.shape[:-1], weight.shape[0])

    def multiply_grouped(self, x: Tensor, weight: Tensor, columns: int, ends: Tensor) -> Tensor:
        """Rows of experts, (rows, in) -> (rows, columns): all experts of a layer become dense, in
        the forward and in the backward. Saves `ends`.
        """
        low = autocast_lower(x)
        node = record(self._grouped_backward(weight.shape, low), (low,), (ends,))
        dense = self._make_dense(x.meter, weight.shape, low.dtype)
        result = empty(x.meter, (low.shape[0], columns), low.dtype)
        del dense
        return attach(node, result)

    def _grouped_backward(self, shape: tuple[int, ...], x: Tensor) -> Rule:
        columns, dtype = x.shape[1], x.dtype

        def rule(node: Node, grads: Incoming) -> Gradients:
            grad, _ = upstream(grads), node.unpack(0)
            dense = self._make_dense(grad.meter, shape, dtype)
            made = empty(grad.meter, (grad.shape[0], columns), dtype)
            del dense
            return (made,)

        return rule

    def _unpacked(self, x: Tensor, weight: Tensor) -> Tensor:
        """A product with a weight that becomes dense: in a kernel of CUDA, or before it."""
        meter, shape = x.meter, weight.shape
        declared, double = find_coding(self.coding)
        node = record(self._dense_backward(shape, x.dtype), (x,))
        if meter.cuda and declared.multiplies:
            width = DTYPE_BYTES[x.dtype]
            count = declared.kernel_bytes(shape, x.shape[0], width, double=double)
            dense = workspace(meter, count)
        else:
            dense = [self._make_dense(meter, shape, x.dtype)]
        result = empty(meter, (x.shape[0], shape[0]), x.dtype)
        del dense
        return attach(node, result)

    def _eight(self, x: Tensor, weight: Tensor) -> Tensor:
        """LLM.int8: rows of the input in int8, columns with outliers in 16 bits."""
        meter, tokens, (rows, columns) = x.meter, x.shape[0], weight.shape
        node = record(self._dense_backward(weight.shape, x.dtype), (x,))
        outliers = outlier_columns(columns, self.share) if self.outliers else 0
        half = x if x.dtype == "float16" else like(x, dtype="float16")
        found = tokens * columns * finding_bytes(self.outliers) if meter.cuda else 0
        codes = empty(meter, x.shape, "int8")
        scales = empty(meter, (tokens,), "float32")
        which = empty(meter, (outliers,), "int64") if self.outliers else None
        inside = workspace(meter, found)
        del inside, half
        width = DTYPE_BYTES[x.dtype]
        needed = product_bytes(tokens, rows, columns, outliers, width) if meter.cuda else 0
        inside = workspace(meter, needed)
        result = empty(meter, (tokens, rows), x.dtype)
        dense = empty(meter, (tokens, outliers), x.dtype) if self.outliers else None
        del inside, codes, scales, which, dense
        return attach(node, result)

    def _dense_backward(self, shape: tuple[int, ...], dtype: str) -> Rule:
        """The weight is made dense; nothing of the input is needed, so nothing is saved."""

        def rule(node: Node, grads: Incoming) -> Gradients:
            grad = upstream(grads)
            dense = self._make_dense(grad.meter, shape, dtype)
            grad.meter.begin_product()
            made = empty(grad.meter, (grad.shape[0], shape[1]), dtype)
            del dense
            return (made,)

        return rule

    def _make_dense(self, meter: Meter, shape: tuple[int, ...], dtype: str) -> Tensor:
        declared, double = find_coding(self.coding)
        beside = declared.unpacking(shape, double=double)
        alive = [empty(meter, *spec) for spec in beside.before]
        dense = empty(meter, shape, dtype)
        alive += [empty(meter, *spec) for spec in beside.after]
        del alive
        return dense


def outlier_columns(columns: int, share: float) -> int:
    """Columns of one projection that a certificate allows to hold outliers."""
    return ceil(columns * share)


def finding_bytes(outliers: bool) -> int:
    """Inside `int8_vectorwise_quant` on CUDA, for each number: its magnitude, whether it is one."""
    return FP16 + 1 if outliers else 0


def product_bytes(tokens: int, rows: int, columns: int, outliers: int, width: int) -> int:
    """Inside `int8_mixed_scaled_mm` on CUDA, beside its results.

    The int32 product and, unless the result is fp16, its fp16 values; then, with outliers, the
    result that they are added to. Their columns of the weight are dense meanwhile.
    """
    made = tokens * rows
    products = (INT32 + FP16) * made  # where fp16 is asked for, its values are the result: 2 more
    if columns % 4:  # cuBLASLt cannot: products in fp32, and copies of both factors
        products += FP32 * (tokens * columns + rows * columns + made) + INT32 * made
    if not outliers:
        return products
    dense = width * rows * outliers
    unpacking = rows * outliers * (INT8 + 2 * FP32)
    return max(unpacking, dense + max(products, width * made))


def quantising_bytes(
    coding: str, shape: tuple[int, ...], dtype: str, *, cut: bool = False
) -> list[list[int]]:
    """Sizes of what is alive at the instants of quantising one dense weight (rows, columns), in the
    order of their births.

    cut: ranks keep a part each of what is stored, which is whole meanwhile.
    """
    declared, double = find_coding(coding)
    own = declared.tensors(shape, double=double) if cut else ()
    beside = [prod(t.shape) * DTYPE_BYTES[t.dtype] for t in own]
    width = DTYPE_BYTES[dtype]
    instants = declared.quantising(shape, dtype, width, double=double)
    return [[dense, *beside, *made] for dense, *made in instants]
