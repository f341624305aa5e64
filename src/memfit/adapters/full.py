"""Full fine-tuning: every weight is trained."""

from __future__ import annotations

from typing import final

from msgspec.structs import replace

from memfit.adapters import adapters
from memfit.adapters.shared.in_place import InPlace, store_in_place
from memfit.adapters.shared.quantised_base import check_base
from memfit.records.model import Model
from memfit.records.recipe import Recipe


@final
class Full(InPlace):
    """Every weight is trainable and stored in `recipe.trainable_dtype`."""

    def adapt(self, model: Model, recipe: Recipe) -> Model:
        """See `Adapter.adapt`."""
        check_base(model, recipe.base_format, recipe.method)
        rows = (replace(row, trainable=True) for row in model.weights)
        return store_in_place(model, rows, recipe)


adapters.register("full")(Full())
