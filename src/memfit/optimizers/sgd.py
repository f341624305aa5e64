"""Stochastic gradient descent with momentum (Sutskever et al. 2013) as torch.optim has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from memfit.meta.meter import Meter
from memfit.meta.tensor import empty
from memfit.optimizers import Counted, OptimizerFamily, counted_size, optimizers
from memfit.records.ledger import Kind
from memfit.records.model import TensorSpec
from memfit.records.recipe import Optimizer

if TYPE_CHECKING:
    import torch


@final
class Sgd(OptimizerFamily):
    """One momentum buffer of the parameter's own dtype; nothing at all without momentum."""

    updates_parts = True
    updates_stages = True
    updates_on_host = True
    implementations = ("fused", "foreach", "loop")
    state_while_updating = ("loop",)
    unsharded_only = ("fused",)

    def state(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.state`."""
        return (local,) if settings.momentum else ()

    def step_temporaries(
        self, parameters: Sequence[TensorSpec], settings: Optimizer, counted: Counted = "live"
    ) -> int:
        """See `OptimizerFamily.step_temporaries`.

        Weight decay is added to a copy of the gradient: of all parameters at once in `foreach`,
        of one in `loop`.
        """
        if settings.implementation == "fused" or not settings.weight_decay:
            return 0
        sizes = [counted_size(p.nbytes, counted) for p in parameters]
        if settings.implementation == "foreach":
            return sum(sizes)
        return max(sizes, default=0)

    def update_alone(self, parameter: TensorSpec, settings: Optimizer, meter: Meter) -> None:
        """See `OptimizerFamily.update_alone`: the gradient with its weight's decay added."""
        if settings.implementation != "fused" and settings.weight_decay:
            empty(meter, parameter.shape, parameter.dtype, Kind.TEMPORARY)

    def moved(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """See `OptimizerFamily.moved`: weight and momentum, which are written, and the gradient."""
        momentum = 2 if settings.momentum else 0
        if settings.implementation == "fused":
            return (3 + momentum) * parameter.nbytes
        decay = 3 if settings.weight_decay else 0
        return (
            3 + 2.5 * momentum + decay
        ) * parameter.nbytes  # the momentum is scaled, then added to

    def build(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: Optimizer,
        ends: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> torch.optim.Optimizer:
        """See `OptimizerFamily.build`."""
        import torch

        if settings.implementation == "fused":
            _let_fused_be_traced()
        return torch.optim.SGD(
            parameters,
            lr=settings.learning_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            foreach=settings.implementation == "foreach",
            fused=settings.implementation == "fused",
        )


_libraries: list[object] = []  # a registration lasts as long as its library object


def _let_fused_be_traced() -> None:
    """Register a meta kernel for `_fused_sgd_`, which torch (2.13) does not have.

    Without one a trace on fake tensors would fill real ones with zeros and run the kernel.
    """
    import torch

    name = "aten::_fused_sgd_"
    if not _libraries and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        library.impl("_fused_sgd_", _nothing, "Meta")  # type: ignore[no-untyped-call]
        _libraries.append(library)


def _nothing(*_: object, **__: object) -> None:
    """Updates in place; allocates nothing."""


optimizers.register("sgd")(Sgd())
