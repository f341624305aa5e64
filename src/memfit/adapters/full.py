"""Full fine-tuning: every weight is trained."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, final

from msgspec.structs import replace

from memfit.adapters import Adapter, adapters
from memfit.adapters.shared.apply import apply_rows, store_rows
from memfit.adapters.shared.quantised_base import check_base
from memfit.adapters.shared.reference_copy import fill_reference, running_reference
from memfit.families import read_model
from memfit.records.model import Model
from memfit.records.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


@final
class Full(Adapter):
    """Every weight is trainable and stored in `recipe.trainable_dtype`."""

    def adapt(self, model: Model, recipe: Recipe) -> Model:
        """See `Adapter.adapt`."""
        check_base(model, recipe.base_format, recipe.method)
        rows = (replace(row, trainable=True) for row in model.weights)
        stored = store_rows(rows, recipe.trainable_dtype, recipe.frozen_dtype)
        return replace(model, weights=stored)

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


adapters.register("full")(Full())
