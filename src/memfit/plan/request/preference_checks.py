"""What a request for preference optimisation decides and excludes."""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.records.objectives import check_adapter, check_second
from memfit.records.recipe import ADAPTED, Method, Preference, Reference
from memfit.records.request import Request


def check_pairs(request: Request) -> None:
    """Raise InvalidRequest for what `objectives` refuses of a recipe, where the request says it."""
    if request.task.objective != "dpo":
        return
    micro, batch = request.micro_batch, request.global_batch
    if batch % 2:
        raise InvalidRequest(
            f"`task.global_batch: {batch}` is odd, and `objective: dpo` takes pairs of sequences",
            hint=f"use `global_batch: {batch + 1}`",
        )
    if micro != "auto" and micro % 2:
        raise InvalidRequest(
            f"`micro_batch: {micro}` is odd, and `objective: dpo` takes pairs of sequences",
            hint=f"use `micro_batch: {micro + 1}`",
        )
    if request.task.packing is True:
        raise InvalidRequest(
            "`task.packing: true` under `objective: dpo`, which compares answers row by row",
            hint="leave `task.packing` on `auto`",
        )


def choose_preference(
    request: Request, method: Method, *, whole: Reference = "precomputed"
) -> Preference:
    """Of a recipe of this method; raises InvalidRequest where it has no such reference.

    whole: the reference of `auto` where all weights are trained; a second model is of the steps
    of others that have one.
    """
    if request.task.objective != "dpo":
        return Preference()
    asked = request.preference
    usual: Reference = "adapter-off" if method in ADAPTED else whole
    reference = usual if asked.reference == "auto" else asked.reference
    if whole == "precomputed":
        check_second(reference)
    if reference == "adapter-off":
        check_adapter(method)
    return Preference(
        beta=asked.beta, label_smoothing=asked.label_smoothing, reference=reference
    )  # fmt: skip
