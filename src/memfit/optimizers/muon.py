"""Muon (Jordan et al. 2024; Liu et al. 2502.16982): momentum made orthogonal by products.

torch.optim.Muon updates matrices alone. As its documentation says, embeddings, the head, vectors
and tensors of several matrices (experts) are AdamW's, here torch's fused one. One learning rate
serves both: Muon's update is scaled to the root mean square of AdamW's (2502.16982, section 2.2).

Ranks that have parts of a matrix put its update together, make it orthogonal each for itself, and
take their parts of the result: torch's own, on DTensors, would gather in each of its products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, final

from memfit.core.errors import InvalidRequest
from memfit.meta.meter import Meter
from memfit.meta.tensor import Tensor, empty
from memfit.optimizers import Counted, OptimizerFamily, optimizers
from memfit.optimizers.adamw import STEP
from memfit.optimizers.shared.gathered import cut_matrix, gather_matrix
from memfit.optimizers.shared.loops import bytes_made, rise_of
from memfit.records.ledger import Kind
from memfit.records.model import TensorSpec
from memfit.records.recipe import Optimizer

if TYPE_CHECKING:
    import torch

STEPS = 5  # of Newton-Schulz, torch's default


@final
class Muon(OptimizerFamily):
    """A matrix keeps one momentum of its own dtype; what AdamW updates, two moments."""

    implementations = ("loop",)
    updates_parts = True
    updates_stages = True
    gathers = True

    def state(self, local: TensorSpec, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.state`."""
        plain = TensorSpec(shape=local.shape, dtype=local.dtype)
        return (plain,) if is_orthogonal(local) else (STEP, plain, plain)

    def host_state(self, settings: Optimizer) -> tuple[TensorSpec, ...]:
        """See `OptimizerFamily.host_state`: fused AdamW keeps its counters on the device."""
        return ()

    def step_temporaries(
        self, parameters: Sequence[TensorSpec], settings: Optimizer, counted: Counted = "live"
    ) -> int:
        """See `OptimizerFamily.step_temporaries`; of AdamW's part none."""
        return rise_of(partial(_loop, parameters), counted)

    def update_alone(self, parameter: TensorSpec, settings: Optimizer, meter: Meter) -> None:
        """See `OptimizerFamily.update_alone`."""
        _loop([parameter], meter)

    def moved(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """See `OptimizerFamily.moved`: each product reads two matrices and adds to a third."""
        if not is_orthogonal(parameter):
            return 7 * parameter.nbytes
        return 7 * parameter.nbytes + 4 * bytes_made([partial(_loop, [parameter])])

    def flop(self, parameter: TensorSpec, settings: Optimizer) -> float:
        """See `OptimizerFamily.flop`: X X^T, its square, and their product with X, 5 times."""
        if not is_orthogonal(parameter):
            return 0.0
        short, long = sorted(parameter.whole or parameter.shape)
        return float(STEPS * (4 * short * short * long + 2 * short**3))

    def build(
        self,
        parameters: Iterable[torch.nn.Parameter],
        settings: Optimizer,
        ends: frozenset[torch.nn.Parameter] = frozenset(),
    ) -> torch.optim.Optimizer:
        """See `OptimizerFamily.build`. Raises InvalidRequest where torch has no Muon."""
        import torch

        if not hasattr(torch.optim, "Muon"):
            raise InvalidRequest(
                f"torch {torch.__version__} has no Muon", hint="install torch 2.11 or later"
            )
        known = list(parameters)
        matrices = [p for p in known if p.dim() == 2 and p not in ends]
        others = [p for p in known if p.dim() != 2 or p in ends]
        made: torch.optim.Optimizer = _torch_class()(matrices, others, settings)
        return made


def is_orthogonal(spec: TensorSpec) -> bool:
    """Whether Muon updates it: a matrix inside the model."""
    return len(spec.shape) == 2 and not spec.end


@cache
def _torch_class() -> Callable[..., Any]:
    import torch

    class MuonAndAdamW(torch.optim.Optimizer):
        """torch's two optimizers over one list of groups and one state.

        AdamW's groups come first, so that all states exist when Muon's products need room.
        """

        def __init__(self, matrices: list[Any], others: list[Any], settings: Optimizer) -> None:
            adamw: Callable[..., torch.optim.Optimizer] = partial(
                torch.optim.AdamW, lr=settings.learning_rate, eps=settings.eps, fused=True,
                betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay,
            )  # fmt: skip
            muon: Callable[..., torch.optim.Optimizer] = partial(
                torch.optim.Muon, lr=settings.learning_rate, momentum=settings.momentum,
                weight_decay=settings.weight_decay, ns_steps=STEPS,
                adjust_lr_fn="match_rms_adamw",
            )  # fmt: skip
            ways = {"adamw": (adamw, others), "muon": (muon, matrices)}
            self.inner = {name: make(own) for name, (make, own) in ways.items() if own}
            groups = [
                {**group, "by": name} for name, o in self.inner.items() for group in o.param_groups
            ]
            super().__init__(groups, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Each group's own optimizer, over what the group holds now."""
            del closure
            for group in self.param_groups:
                if group["by"] == "muon" and hasattr(group["params"][0], "device_mesh"):
                    _step_shards(group, self.state)
                    continue
                own = self.inner[group["by"]]
                own.param_groups, own.state = [group], self.state
                own.step()

    return MuonAndAdamW


def _step_shards(group: dict[str, Any], states: dict[Any, dict[str, Any]]) -> None:
    """As torch/optim/_muon.py, `_single_tensor_muon`, of matrices that ranks cut."""
    import torch
    from torch.optim._muon import (  # the very steps of one process
        _adjust_lr,
        _zeropower_via_newtonschulz,
    )

    learned = [p for p in group["params"] if p.grad is not None]
    for p in learned:
        if "momentum_buffer" not in states[p]:
            states[p]["momentum_buffer"] = torch.zeros_like(p.grad)
    rate, decayed = group["lr"], 1 - group["lr"] * group["weight_decay"]
    for p in learned:
        gradient, momentum = p.grad.to_local(), states[p]["momentum_buffer"].to_local()
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = gather_matrix(update, p)
        update = _zeropower_via_newtonschulz(
            update, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        own = p.to_local().mul_(decayed)
        own.add_(cut_matrix(update, p), alpha=-_adjust_lr(rate, group["adjust_lr_fn"], p.shape))


def _loop(parameters: Sequence[TensorSpec], meter: Meter) -> None:
    """The local variables of torch/optim/_muon.py, `_single_tensor_muon`, and of `_step_shards`."""
    update: Tensor | None = None
    for spec in parameters:
        if is_orthogonal(spec):
            update = empty(meter, spec.shape, spec.dtype, Kind.TEMPORARY)  # Nesterov's
            made = update
            for shape in spec.gathers:
                made = empty(meter, shape, spec.dtype, Kind.TEMPORARY)
            update = made
            del made
            update = _orthogonalise(update, spec.whole or spec.shape, meter)
    del update


def _orthogonalise(gradient: Tensor, shape: tuple[int, ...], meter: Meter) -> Tensor:
    """`_zeropower_via_newtonschulz`, in bf16; (rows, columns) -> the same."""
    make = partial(empty, meter, dtype="bfloat16", kind=Kind.TEMPORARY)
    short = min(shape)
    result = gradient if gradient.dtype == "bfloat16" else make(shape)
    norm = make(())
    least = make(())
    del norm, least
    gram: Tensor | None = None
    combined: Tensor | None = None
    for _ in range(STEPS):
        gram = make((short, short))
        combined = make((short, short))
        result = make(shape)
    del gram, combined
    return result


optimizers.register("muon")(Muon())
