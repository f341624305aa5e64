"""AdamW (Loshchilov and Hutter 1711.05101) as torch.optim implements it."""

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

STEP = TensorSpec(shape=())  # a float32 counter a parameter


@final
class AdamW(OptimizerFamily):
    """Two moments of the parameter's own dtype, and a counter that only `fused` keeps on device."""

    updates_parts = True
    updates_stages = True
    updates_on_host = True
    offloaded = ("fused",)
    second_moments = True
    low_bit_form = "adamw8bit"
    implementations = ("fused", "foreach", "loop")

    def state(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.state`."""
        return (STEP, local, local)

    def host_state(self, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.host_state`."""
        return () if settings.implementation == "fused" else (STEP,)

    def step_temporaries(
        self, parameters: Sequence[TensorSpec], settings: Optimizer, counted: Counted = "live"
    ) -> int:
        """See `OptimizerFamily.step_temporaries`.

        The denominator sqrt(v) / sqrt(1 - beta2^t) + eps is the only copy. `foreach` holds it of
        every parameter at once; `loop` of one, beside its square root while it is divided and
        beside the denominator of the parameter before, which the loop's variable still names.
        """
        if settings.implementation == "fused":
            return 0
        sizes = [counted_size(p.nbytes, counted) for p in parameters]
        if settings.implementation == "foreach":
            return sum(sizes)
        before = [0, *sizes]
        return max((b + 2 * s for b, s in zip(before, sizes, strict=False)), default=0)

    def update_alone(self, parameter: TensorSpec, settings: Optimizer, meter: Meter) -> None:
        """See `OptimizerFamily.update_alone`: `loop` divides the root into a second copy."""
        copies = {"fused": 0, "foreach": 1, "loop": 2}[settings.implementation]
        copied = []
        for _ in range(copies):
            copied.append(empty(meter, parameter.shape, parameter.dtype, Kind.TEMPORARY))

    def moved(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """See `OptimizerFamily.moved`.

        `fused`: weight, gradient and both moments read, all but the gradient written. The others
        go through memory operator by operator: decay 2, first moment 3, second 2 + 3, root 2,
        quotient 2, epsilon 2, step 4 (torch/optim/adam.py, `_multi_tensor_adam`).
        """
        return (7 if settings.implementation == "fused" else 20) * parameter.nbytes

    def build(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: Optimizer,
        ends: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> torch.optim.Optimizer:
        """See `OptimizerFamily.build`."""
        import torch

        return torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            foreach=settings.implementation == "foreach",
            fused=settings.implementation == "fused",
        )


optimizers.register("adamw")(AdamW())
