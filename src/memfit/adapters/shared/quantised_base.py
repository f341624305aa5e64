"""A quantised base: which of its weights are stored in 8 or 4 bits, and where that cannot be."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.base_formats import find_base_format, is_quantised, list_base_formats
from memfit.core.errors import InvalidRequest
from memfit.records.model import Model, Weight
from memfit.records.recipe import Recipe

TRANSPOSED = ("gpt2",)  # families whose blocks hold Conv1D: weights are (in, out)


def code_rows(model: Model, recipe: Recipe) -> Model:
    """The adapted model with every frozen projection of its blocks quantised, as the recipe says,
    and with experts, where the format codes them.

    Embeddings, norms, biases, routers and the head stay in `frozen_dtype`. Raises InvalidRequest,
    see `check_base`.
    """
    check_base(model, recipe.base_format, recipe.method)
    coding = recipe.coding
    if not coding:
        return model
    return replace(
        model,
        weights=tuple(
            replace(w, coding=coding)
            if not w.trainable and stores_codes(w, recipe.base_format)
            else w
            for w in model.weights
        ),
    )


def is_projection(weight: Weight) -> bool:
    """Whether every quantised base stores this weight in fewer bits: a matrix of a block.

    Routers and biases of experts are plain parameters, which Hugging Face's classes read.
    """
    matrix = weight.part == "block" and len(weight.shape) == 2
    plain = weight.routed or weight.chooses or ".lora_" in weight.name  # a reward's is frozen, too
    return matrix and not plain


def stores_codes(weight: Weight, base_format: str) -> bool:
    """Whether this base stores the weight in fewer bits: all experts of a layer, too, where it
    codes them."""
    if weight.routed and len(weight.shape) == 3:
        return find_base_format(base_format).codes_experts
    return is_projection(weight)


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
        other = next(f.name for f in list_base_formats() if f.own and f.codes_experts)
        raise InvalidRequest(
            f"{stated}: the experts of `{model.name}` are one 3-D parameter a layer, and"
            f" {declared.library} quantises matrices",
            hint=f"use `base_format: {other}`, which codes them, or bf16",
        )
    largest = max(w.numel for w in model.weights if stores_codes(w, base_format))
    if declared.most_weights and largest > declared.most_weights:
        raise InvalidRequest(
            f"{stated}: the experts of a layer of `{model.name}` are {largest:,} weights, and"
            f" {declared.library} quantises up to {declared.most_weights:,} at once",
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
