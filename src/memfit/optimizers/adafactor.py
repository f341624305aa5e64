"""Adafactor (Shazeer and Stern 1804.04235) as torch.optim has it: squares as row x column.

A matrix of n x m keeps n + m numbers, no first moment. The learning rate is relative to the size of
a weight (`eps2`), updates are clipped to a root mean square of 1, and beta2 grows with the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

from memfit.meta.meter import Meter
from memfit.meta.tensor import Shape, Tensor, empty
from memfit.optimizers import Counted, OptimizerFamily, optimizers
from memfit.optimizers.adamw import STEP
from memfit.optimizers.shared.loops import bytes_made, rise_of
from memfit.records.ledger import Kind
from memfit.records.model import TensorSpec
from memfit.records.recipe import Optimizer

if TYPE_CHECKING:
    import torch


@final
class Adafactor(OptimizerFamily):
    """Row and column sums of squares of the gradient's dtype; vectors keep their squares whole."""

    implementations = ("loop",)
    unsharded_only = ("loop",)  # DTensor cannot square its norms in place, and reads shards' norms

    def state(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.state`."""
        if len(local.shape) < 2:
            return (STEP, local)
        rows, columns = factors(local.shape)
        return (
            STEP,
            TensorSpec(shape=rows, dtype=local.dtype),
            TensorSpec(shape=columns, dtype=local.dtype),
        )

    def host_state(self, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.host_state`."""
        return (STEP,)

    def step_temporaries(
        self, parameters: Sequence[TensorSpec], settings: Optimizer, counted: Counted = "live"
    ) -> int:
        """See `OptimizerFamily.step_temporaries`.

        Two estimates of squares: this one's and the one before, which variables still name.
        """
        return rise_of(partial(_loop, parameters), counted)

    def update_alone(self, parameter: TensorSpec, settings: Optimizer, meter: Meter) -> None:
        """See `OptimizerFamily.update_alone`."""
        _loop([parameter], meter)

    def moved(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """See `OptimizerFamily.moved`.

        Weight read for its norm and updated, gradient read for rows, columns and the update; the
        estimate is divided, clamped, inverted, multiplied, measured and added.
        """
        decay = 2 if settings.weight_decay else 0
        return (6 + decay) * parameter.nbytes + 5 * bytes_made([partial(_loop, [parameter])])

    def build(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: Optimizer,
        ends: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> torch.optim.Optimizer:
        """See `OptimizerFamily.build`."""
        import torch

        return torch.optim.Adafactor(
            parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay, foreach=False
        )


def factors(shape: Shape) -> tuple[Shape, Shape]:
    """Shapes of a matrix's two factors; of several matrices in one tensor, of each."""
    return (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])


def _loop(parameters: Sequence[TensorSpec], meter: Meter) -> None:
    """The local variables of torch/optim/_adafactor.py, `_single_tensor_adafactor`."""
    row_mean: Tensor | None = None
    column_mean: Tensor | None = None
    squares: Tensor | None = None
    estimate: Tensor | None = None
    update: Tensor | None = None

    for spec in parameters:
        make = partial(empty, meter, dtype=spec.dtype, kind=Kind.TEMPORARY)
        make(())  # the weight's norm, read at once
        if len(spec.shape) > 1:
            rows, columns = factors(spec.shape)
            row_mean = make(rows)
            column_mean = make(columns)
            estimate = make(spec.shape)
            make((*spec.shape[:-2], 1, 1))  # the mean of rows
        else:
            squares = make(spec.shape)
            estimate = make(spec.shape)
        update = estimate
        make(())  # the update's norm
    del row_mean, column_mean, squares, estimate, update


optimizers.register("adafactor")(Adafactor())
