"""Lion (Chen et al. 2302.06675, algorithm 2): the sign of an interpolated momentum, and no squares.

torch has no Lion, so that the class is memfit's: a momentum of the parameter's own dtype is all
that it keeps. Each element moves by the learning rate, whatever its gradient: the paper takes 3 to
10 times less than for AdamW, with as much more weight decay, and `beta2: 0.99`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, final

from memfit.meta.meter import Meter
from memfit.meta.tensor import empty
from memfit.optimizers import Counted, OptimizerFamily, counted_size, optimizers
from memfit.records.ledger import Kind
from memfit.records.model import TensorSpec
from memfit.records.recipe import Optimizer

if TYPE_CHECKING:
    import torch


@final
class Lion(OptimizerFamily):
    """One momentum of the parameter's own dtype, from zeros on."""

    updates_parts = True
    updates_stages = True
    implementations = ("foreach", "loop")
    rate_of_adamws = 1 / 3

    def state(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.state`."""
        return (local,)

    def step_temporaries(
        self, parameters: Sequence[TensorSpec], settings: Optimizer, counted: Counted = "live"
    ) -> int:
        """See `OptimizerFamily.step_temporaries`.

        The interpolation, whose sign is taken in place: of all parameters at once in `foreach`.
        """
        sizes = [counted_size(p.nbytes, counted) for p in parameters]
        return sum(sizes) if settings.implementation == "foreach" else max(sizes, default=0)

    def update_alone(self, parameter: TensorSpec, settings: Optimizer, meter: Meter) -> None:
        """See `OptimizerFamily.update_alone`."""
        empty(meter, parameter.shape, parameter.dtype, Kind.TEMPORARY)

    def moved(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """See `OptimizerFamily.moved`.

        Interpolation 3, sign 2, step 3, momentum 3, and the weight's decay 2.
        """
        return (11 + (2 if settings.weight_decay else 0)) * parameter.nbytes

    def build(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: Optimizer,
        ends: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> torch.optim.Optimizer:
        """See `OptimizerFamily.build`."""
        made: torch.optim.Optimizer = _torch_class()(
            parameters,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            foreach=settings.implementation == "foreach",
        )
        return made


@cache
def _torch_class() -> Callable[..., Any]:
    import torch

    class TorchLion(torch.optim.Optimizer):
        """Weights decay first, as AdamW's do; all else follows the paper's algorithm 2."""

        def __init__(self, parameters: Any, **defaults: Any) -> None:
            super().__init__(parameters, defaults)

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """One update of every parameter that has a gradient."""
            del closure
            for group in self.param_groups:
                found = [p for p in group["params"] if p.grad is not None]
                for p in found:
                    if not self.state[p]:
                        self.state[p]["exp_avg"] = torch.zeros_like(p)
                means = [self.state[p]["exp_avg"] for p in found]
                grads = [p.grad for p in found]
                if group["foreach"] and found:
                    update_all(found, grads, means, group)
                else:
                    for one in zip(found, grads, means, strict=True):
                        update_one(*one, group)

    def update_one(p: Any, grad: Any, mean: Any, group: dict[str, Any]) -> None:
        rate, (beta1, beta2) = group["lr"], group["betas"]
        if group["weight_decay"]:
            p.mul_(1 - rate * group["weight_decay"])
        p.add_(mean.lerp(grad, 1 - beta1).sign_(), alpha=-rate)
        mean.lerp_(grad, 1 - beta2)

    def update_all(found: Any, grads: Any, means: Any, group: dict[str, Any]) -> None:
        rate, (beta1, beta2) = group["lr"], group["betas"]
        if group["weight_decay"]:
            torch._foreach_mul_(found, 1 - rate * group["weight_decay"])
        directions = torch._foreach_lerp(means, grads, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(found, directions, alpha=-rate)
        torch._foreach_lerp_(means, grads, 1 - beta2)

    return TorchLion


optimizers.register("lion")(Lion())
