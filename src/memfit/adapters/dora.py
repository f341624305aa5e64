"""DoRA (Liu et al. 2402.09353): LoRA gives weights a direction, and a trained vector their lengths.

Parameters, file and merge are peft's (`use_dora`). The forward is memfit's: peft's multiplies the
adapter with an identity matrix of (in, in) and keeps two outputs of a projection for backward;
this one needs neither, and adds the same numbers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, final

from memfit.adapters import Adapter, adapters
from memfit.adapters.shared import peft_layers
from memfit.adapters.shared.quantised_base import check_base
from memfit.core.libraries import quiet_import
from memfit.families import read_model
from memfit.parallelism.limits import check_method
from memfit.records.model import DTYPE_BYTES, Model
from memfit.records.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor, nn


@final
class Dora(Adapter):
    """As `lora`, and m (out) of each target is trained: W' = m * (W + s B A) / |W + s B A|.

    Lengths are of rows, and no gradient flows through them (section 4.3).
    """

    def adapt(self, model: Model, recipe: Recipe) -> Model:
        """See `Adapter.adapt`. Raises InvalidRequest on many ranks but in fp32."""
        check_base(model, recipe.base_format, recipe.method)
        check_method(recipe.method, recipe.precision, recipe.parallel.world)
        return peft_layers.adapt(model, recipe, magnitudes=True)

    def apply(self, module: nn.Module, recipe: Recipe) -> nn.Module:
        """See `Adapter.apply`."""
        rows = self.adapt(read_model(recipe.model), recipe)
        applied = peft_layers.apply(module, recipe, rows, magnitudes=True)
        variant = _variant()
        for layer, name in peft_layers.layers(applied):
            layer.lora_variant[name] = variant
        return applied

    def base_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """See `Adapter.base_parameters`."""
        return peft_layers.base_parameters(module)

    def switched_off(self, module: nn.Module) -> AbstractContextManager[object]:
        """See `Adapter.switched_off`."""
        return peft_layers.switched_off(module)

    def reset(self, module: nn.Module, recipe: Recipe) -> None:
        """See `Adapter.reset`: a random A, a zero B, and the lengths that the base has."""

        def measure(layer: Any, name: str) -> None:
            layer.lora_magnitude_vector[name].weight.copy_(row_norms(layer, name))

        peft_layers.reset(module, self.adapt(read_model(recipe.model), recipe), measure)

    def loading(self, model: Model) -> int:
        """See `Adapter.loading`: the largest target's sum with its adapter, and its norms."""
        found = [0]
        for down, up in zip(model.weights, model.weights[1:], strict=False):
            if down.name.endswith(".lora_A.default.weight"):
                each, rank, rows = DTYPE_BYTES[up.dtype], up.shape[1], up.shape[0]
                found.append(each * max(rows * (rank + down.shape[1]), rows * (down.shape[1] + 1)))
        return max(found)


def row_norms(layer: Any, name: str) -> Tensor:
    """Lengths of the rows of W + s B A, (out); one tensor as large as W is alive meanwhile.

    Without autocast, so in the dtype that the adapter is stored in.
    """
    import torch

    weight, factor = layer.get_base_layer().weight, layer.scaling[name]
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        scaled = up * factor
        merged = down.t() @ scaled.t() if layer.fan_in_fan_out else scaled @ down
        del scaled
        merged.add_(weight)
        norms: Tensor = torch.linalg.vector_norm(merged, dim=0 if layer.fan_in_fan_out else 1)
        return norms


def _variant() -> Any:
    """What peft's layer asks for its forward; the rest of it is peft's own."""
    with quiet_import():
        from peft.tuners.lora.variants import DoraLinearVariant

    class Variant(DoraLinearVariant):  # type: ignore[misc]  # peft is untyped
        """Dropout, in training, is of the adapter's input alone, as in LoRA."""

        @staticmethod
        def forward(
            module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any
        ) -> Tensor:
            """result: of the base layer, bias included; with its own m and B = 0 it stays so."""
            magnitude = module.lora_magnitude_vector[active_adapter].weight
            ratio = magnitude / row_norms(module, active_adapter)
            down, up = module.lora_A[active_adapter], module.lora_B[active_adapter]
            added = up(down(module.lora_dropout[active_adapter](x)))
            total = result + added * module.scaling[active_adapter]
            del added
            scaled: Tensor = total * ratio
            bias = module.get_base_layer().bias
            return scaled if bias is None else scaled + (1 - ratio) * bias

    return Variant()


adapters.register("dora")(Dora())
