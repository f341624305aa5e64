"""A simulated step that updates each weight within backward, as train/step/in_backward.py does."""

from __future__ import annotations

from memfit.meta.meter import Meter
from memfit.meta.tensor import Tensor, empty
from memfit.optimizers import find_optimizer
from memfit.records.ledger import Kind
from memfit.records.model import TensorSpec
from memfit.records.recipe import Optimizer


class Updates:
    """A callback for `Meter.on_gradient`: each weight's state appears once, its gradient goes."""

    def __init__(self, meter: Meter, settings: Optimizer) -> None:
        self.meter, self.settings = meter, settings
        self.family = find_optimizer(settings)
        self._states: dict[Tensor, list[Tensor]] = {}
        self.shared: list[Tensor] = []

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
        family, settings = self.family, self.settings
        held = (family.on_device if self.meter.cuda else family.state)(spec, settings)
        if not self.shared and family.shares(spec, settings):
            self.shared = [self._hold(s) for s in family.shared_state(settings)]
        return [self._hold(s) for s in held]

    def _hold(self, spec: TensorSpec) -> Tensor:
        return empty(self.meter, spec.shape, spec.dtype, Kind.OPTIMIZER_STATE)
