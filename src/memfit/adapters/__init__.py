"""What is trained: full, freeze, lora, dora. One file a method; nothing else knows about LoRA.

A method is declared once as `Model -> Model` and applied to a torch module by those same rows, so
that the planner's dtypes and the trainer's are one fact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from memfit.core.errors import InvalidRequest
from memfit.core.registry import Registry
from memfit.records.model import Model
from memfit.records.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn


class Adapter(ABC):
    """A method of training; instances are registered in `adapters` under the method's name."""

    @abstractmethod
    def adapt(self, model: Model, recipe: Recipe) -> Model:
        """The model as it is stored: dtypes, trainable flags, the method's own rows and names.

        Raises InvalidRequest when nothing would be trained, or a name matches nothing.
        """

    @abstractmethod
    def apply(self, module: nn.Module, recipe: Recipe) -> nn.Module:
        """The same on a torch module, whose tensors may be on the meta device.

        Returns the module to train, whose parameters are exactly `adapt`'s rows.
        """

    def base_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of the base model in an applied module, under Hugging Face's names."""
        return dict(module.named_parameters())

    def switched_off(self, module: nn.Module) -> AbstractContextManager[object]:
        """The base model alone runs meanwhile, on the same weights.

        Raises InvalidRequest where what is trained is the base model itself.
        """
        raise InvalidRequest(
            "the method has no adapter that could be switched off",
            hint="use `preference.reference: precomputed`, or `method: lora`",
        )

    def valuing(self, module: nn.Module) -> AbstractContextManager[object]:
        """What learns a value runs meanwhile, in place of the policy: an adapter or a copy.

        Raises InvalidRequest where the method has neither.
        """
        raise InvalidRequest(
            "the method has nothing that could learn a value beside the policy",
            hint="use `method: lora`, or `full`",
        )

    def judging(self, module: nn.Module) -> AbstractContextManager[object]:
        """The reward model's adapter of the base runs meanwhile, in place of the policy's.

        Raises InvalidRequest where the method has no adapters.
        """
        raise InvalidRequest(
            "the method has no adapter beside which a reward model's could stand",
            hint="use `method: lora`",
        )

    def reset(self, module: nn.Module, recipe: Recipe) -> None:  # noqa: B027 - most methods add no parameters
        """Start values of the method's own parameters; with them the base model is unchanged."""

    def loading(self, model: Model) -> int:
        """Bytes that `reset` needs for a moment beside the model, whose rows `adapt` made."""
        del model
        return 0


adapters: Registry[Adapter] = Registry("method", "memfit.adapters")


def find_adapter(recipe: Recipe) -> Adapter:
    """The adapter of a recipe's method."""
    return adapters.find(recipe.method)
