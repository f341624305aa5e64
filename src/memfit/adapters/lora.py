"""LoRA (Hu et al. 2106.09685) through peft: two small matrices beside each target projection."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, final

from memfit.adapters import Adapter, adapters
from memfit.adapters.shared import peft_layers
from memfit.adapters.shared.quantised_base import code_rows
from memfit.families import read_model
from memfit.records.model import Model
from memfit.records.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


@final
class Lora(Adapter):
    """The base is frozen; A (rank, in) and B (out, rank) of each target are trained."""

    def adapt(self, model: Model, recipe: Recipe) -> Model:
        """See `Adapter.adapt`."""
        return code_rows(peft_layers.adapt(model, recipe), recipe)

    def apply(self, module: nn.Module, recipe: Recipe) -> nn.Module:
        """See `Adapter.apply`."""
        return peft_layers.apply(module, recipe, self.adapt(read_model(recipe.model), recipe))

    def base_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """See `Adapter.base_parameters`."""
        return peft_layers.base_parameters(module)

    def switched_off(self, module: nn.Module) -> AbstractContextManager[object]:
        """See `Adapter.switched_off`."""
        return peft_layers.switched_off(module)

    def valuing(self, module: nn.Module) -> AbstractContextManager[object]:
        """See `Adapter.valuing`."""
        return peft_layers.switched_to(module, peft_layers.VALUE)

    def judging(self, module: nn.Module) -> AbstractContextManager[object]:
        """See `Adapter.judging`."""
        return peft_layers.switched_to(module, peft_layers.REWARD)

    def reset(self, module: nn.Module, recipe: Recipe) -> None:
        """See `Adapter.reset`: a random A and a zero B."""
        peft_layers.reset(module, self.adapt(read_model(recipe.model), recipe))


adapters.register("lora")(Lora())
