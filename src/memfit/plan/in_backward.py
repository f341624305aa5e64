"""A simulated step that updates each weight within backward, as train/in_backward.py does."""

from __future__ import annotations

from memfit.ledger import Kind
from memfit.model import TensorSpec
from memfit.optimizers import find_optimizer
from memfit.recipe import Optimizer
from memfit.sizes.meter import Meter
from memfit.sizes.tensor import Tensor, empty


class Updates:
    """What `Meter.on_gradient` is told: each weight's state appears once, its gradient goes."""

    def __init__(self, meter: Meter, settings: Optimizer) -> None:
        self.meter, self.settings = meter, settings
        self.family = find_optimizer(settings)
        self._states: dict[Tensor, list[Tensor]] = {}

    def update(self, weight: Tensor) -> None:
        """The optimizer's step over one weight, whose `.grad` is whole."""
        meter, before = self.meter, self.meter.owner
        end = meter.owners[weight.storage.index] in ("embedding", "head")
        spec = TensorSpec(shape=weight.shape, dtype=weight.dtype, end=end)
        with meter.standing_for(1):
            meter.owner = "optimizer"
            if weight not in self._states:
                self._states[weight] = self._make_state(spec)
            self.family.update_alone(spec, self.settings, meter)
        meter.owner = before
        weight.grad = None

    def _make_state(self, spec: TensorSpec) -> list[Tensor]:
        held = list(self.family.state(spec, self.settings))
        for elsewhere in self.family.host_state(self.settings) if self.meter.cuda else ():
            held.remove(elsewhere)
        return [empty(self.meter, s.shape, s.dtype, Kind.OPTIMIZER_STATE) for s in held]
