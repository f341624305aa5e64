"""Where a model can be trained for rounded weights (`qat: int8 | int4`): for plan and trainer."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.core.errors import InvalidRequest
from memfit.families.capabilities.products import find_beside, find_clash, is_of_block
from memfit.meta.layers.qat import GROUP
from memfit.records.model import Model
from memfit.records.recipe import Recipe
from memfit.records.request import Request

LEAVE = "leave `qat` out"
WIDE = ("fp32", "bf16-mixed", "fp16-mixed")


def check_recipe(model: Model, recipe: Recipe) -> None:
    """Raise InvalidRequest where a recipe's weights cannot be trained rounded."""
    if recipe.qat:
        beside = [f"lean: {', '.join(recipe.lean)}"] if recipe.lean else []
        beside += ["recompute: selective"] if recipe.selective_blocks else []
        _check(model, recipe.qat, recipe.method, recipe.precision, beside)


def check_request(request: Request, model: Model) -> None:
    """The same of a request, before anything is chosen."""
    if request.qat == "none":
        return
    method = "full" if request.method == "auto" else request.method
    precision = "fp32" if request.precision == "auto" else request.precision
    _check(model, request.qat, method, precision, find_beside(request))


def _check(model: Model, qat: str, method: str, precision: str, beside: Iterable[str]) -> None:
    if method != "full":
        refused = f"`method: {method}`, whose base is not trained"
    elif precision not in WIDE:
        refused = f"`precision: {precision}`: what is rounded are weights in fp32"
    else:
        refused = find_clash(model, beside)
    if refused:
        raise InvalidRequest(f"`qat: {qat}` does not go with {refused}", hint=LEAVE)
    odd = [w for w in model.weights if is_of_block(w) and w.shape[1] % GROUP]
    if qat == "int4" and odd:
        raise InvalidRequest(
            f"`qat: int4`: rows of `{odd[0].name}` have {odd[0].shape[1]} weights, and {GROUP} at a"
            " time share a scale",
            hint="use `qat: int8`",
        )
