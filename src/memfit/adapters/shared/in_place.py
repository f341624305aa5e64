"""What methods share that train the model's own weights: full and freeze."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.adapters import Adapter
from memfit.adapters.shared.apply import apply_rows, store_rows
from memfit.adapters.shared.reference_copy import fill_reference, running_reference
from memfit.adapters.shared.value_model import add_value, fill_value, running_value, value_rows
from memfit.families import read_model
from memfit.records.model import VALUE_MODEL, Model, Weight
from memfit.records.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


class InPlace(Adapter):
    """Weights that are trained where they stand; their reference is a copy, where one is held, and
    the value that is learned beside them another."""

    def apply(self, module: nn.Module, recipe: Recipe) -> nn.Module:
        """See `Adapter.apply`."""
        model = self.adapt(read_model(recipe.model), recipe)
        if recipe.values:
            add_value(module, model)
        return apply_rows(module, model)

    def base_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """See `Adapter.base_parameters`; the head of a value is filled with them."""
        named = module.named_parameters()
        return {name: p for name, p in named if not name.startswith(VALUE_MODEL)}

    def switched_off(self, module: nn.Module) -> AbstractContextManager[object]:
        """See `Adapter.switched_off`: a copy of the starting weights runs, where one is held."""
        return running_reference(module)

    def valuing(self, module: nn.Module) -> AbstractContextManager[object]:
        """See `Adapter.valuing`: the value's own copy of what is trained runs."""
        return running_value(module)

    def reset(self, module: nn.Module, recipe: Recipe) -> None:
        """See `Adapter.reset`: reference and value are what training starts from."""
        if recipe.copies_reference:
            fill_reference(module)
        if recipe.values:
            fill_value(module)


def store_in_place(model: Model, rows: Iterable[Weight], recipe: Recipe) -> Model:
    """The model with these rows and, where a value is learned, those of its own, as stored."""
    own = tuple(rows)
    if recipe.values:
        own += value_rows(own, model.architecture.head_input)
    stored = store_rows(own, recipe.trainable_dtype, recipe.frozen_dtype)
    return replace(model, weights=stored)
