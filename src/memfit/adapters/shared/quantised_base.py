"""A quantised base: which of its weights are stored in 8 or 4 bits, and where that cannot be."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.base_formats import find_base_format, is_quantised
from memfit.core.errors import InvalidRequest
from memfit.records.model import Model, Weight
from memfit.records.recipe import Recipe

TRANSPOSED = ("gpt2",)  # families whose blocks hold Conv1D: weights are (in, out)


def code_rows(model: Model, recipe: Recipe) -> Model:
    """The adapted model with every frozen projection of its blocks quantised, as the recipe says.

    Embeddings, norms, biases and the head stay in `frozen_dtype`. Raises InvalidRequest, see
    `check_base`.
    """
    check_base(model, recipe.base_format, recipe.method)
    coding = recipe.coding
    if not coding:
        return model
    return replace(
        model,
        weights=tuple(
            replace(w, coding=coding) if is_projection(w) and not w.trainable else w
            for w in model.weights
        ),
    )


def is_projection(weight: Weight) -> bool:
    """Whether a quantised base stores this weight in fewer bits: a matrix of a block."""
    matrix = weight.part == "block" and len(weight.shape) == 2
    return matrix and ".lora_" not in weight.name  # a reward's adapter is frozen, too


def check_base(model: Model, base_format: str, method: str) -> None:
    """Raise InvalidRequest for a quantised base that cannot be made, or not be trained beside."""
    if not is_quantised(base_format):
        return
    declared = find_base_format(base_format)
    stated = f"`base_format: {base_format}`"
    if method == "dora" and method not in declared.methods:
        raise InvalidRequest(
            f"{stated}: `method: dora` measures the rows of the weights themselves, and would"
            " unpack each of them to do so",
            hint="use `method: lora`, or `base_format: bf16`",
        )
    if method not in ("auto", *declared.methods):
        raise InvalidRequest(
            f"{stated} stores weights that no gradient can change, and `method: {method}` trains"
            " weights of the model",
            hint="use `method: lora`, whose adapters are trained beside it",
        )
    if model.architecture.experts.count and not declared.codes_experts:
        raise InvalidRequest(
            f"{stated}: the experts of `{model.name}` are one 3-D parameter a layer, and"
            f" {declared.library} quantises matrices",
            hint="use `base_format: bf16`",
        )
    odd = [w for w in model.weights if is_projection(w) and w.shape[1] % declared.columns]
    if odd:
        raise InvalidRequest(
            f"{stated} codes {declared.columns} weights of a row together, and `{odd[0].name}` has"
            f" rows of {odd[0].shape[1]}",
            hint="use `base_format: bf16`",
        )
    if model.architecture.family in TRANSPOSED and not declared.codes_transposed:
        raise InvalidRequest(
            f"{stated}: the projections of `{model.name}` are Conv1D, stored transposed, and"
            f" {declared.library} multiplies by (out, in) matrices",
            hint="use `base_format: bf16`",
        )
