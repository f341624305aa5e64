"""What methods share that train the model's own weights: full and freeze."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from memfit.adapters import Adapter
from memfit.adapters.shared.apply import apply_rows
from memfit.adapters.shared.reference_copy import fill_reference, running_reference
from memfit.families import read_model
from memfit.records.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


class InPlace(Adapter):
    """Weights that are trained where they stand; their reference is a copy, where one is held."""

    def apply(self, module: nn.Module, recipe: Recipe) -> nn.Module:
        """See `Adapter.apply`."""
        return apply_rows(module, self.adapt(read_model(recipe.model), recipe))

    def switched_off(self, module: nn.Module) -> AbstractContextManager[object]:
        """See `Adapter.switched_off`: a copy of the starting weights runs, where one is held."""
        return running_reference(module)

    def reset(self, module: nn.Module, recipe: Recipe) -> None:
        """See `Adapter.reset`: the reference is what training starts from."""
        if recipe.copies_reference:
            fill_reference(module)
