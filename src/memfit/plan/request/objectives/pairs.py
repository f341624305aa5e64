"""What a request for preference optimisation decides and excludes."""

from __future__ import annotations

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.objectives import Objective, find_objective
from memfit.records.objectives import (
    check_adapter,
    check_baseline,
    check_no_reference,
    check_second,
)
from memfit.records.recipe import ADAPTED, Method, Preference, Reference
from memfit.records.request import Request

USUAL_ROWS = 8  # `per_device_train_batch_size` of transformers.TrainingArguments, TRL's as well


def check_pairs(request: Request) -> None:
    """Raise InvalidRequest for what `objectives` refuses of a recipe, where the request says it."""
    objective = request.task.objective
    found = find_objective(objective)
    if not found.compares:
        return
    micro, batch = request.micro_batch, request.global_batch
    if found.rated:
        if _has_baseline(request) and micro != "auto":
            check_baseline(objective, micro)
    elif batch % 2:
        raise InvalidRequest(
            f"`task.global_batch: {batch}` is odd, and `objective: {objective}` takes pairs of"
            " sequences",
            hint=f"use `global_batch: {batch + 1}`",
        )
    if found.pairs and micro != "auto" and micro % 2:
        raise InvalidRequest(
            f"`micro_batch: {micro}` is odd, and `objective: {objective}` takes pairs of sequences",
            hint=f"use `micro_batch: {micro + 1}`",
        )
    if request.task.packing is True:
        raise InvalidRequest(
            f"`task.packing: true` under `objective: {objective}`, which compares answers row by"
            " row",
            hint="leave `task.packing` on `auto`",
        )


def settle_baseline(request: Request) -> Request:
    """The request with the micro-batch that its baseline is a mean over, where none is stated.

    KTO's baseline z0 is a mean over a micro-batch: another one learns something else, so that no
    search may choose it. It is the batch of a device that users of TRL and Hugging Face's Trainer
    get where they state none, or the largest part of a smaller global batch.
    """
    if request.micro_batch != "auto" or not _has_baseline(request):
        return request
    parts = [rows for rows in range(2, USUAL_ROWS + 1) if not request.global_batch % rows]
    if not parts:
        raise InvalidRequest(
            f"`task.global_batch: {request.global_batch}` under `objective:"
            f" {request.task.objective}`, whose baseline z0 is a mean over a micro-batch: no part"
            f" of it has 2 to {USUAL_ROWS} rows",
            hint="use `task.global_batch: 16`, or state `micro_batch`",
        )
    return replace(request, micro_batch=parts[-1])


def describe_baseline(request: Request, settled: Request) -> str:
    """What `settle_baseline` has chosen; "" where nothing."""
    if settled.micro_batch == request.micro_batch:
        return ""
    objective = request.task.objective
    rows = settled.micro_batch
    return f"{objective}'s baseline a mean over `micro_batch: {rows}` (not asked for)"


def _has_baseline(request: Request) -> bool:
    objective, stated = find_objective(request.task.objective), request.preference.loss_type
    if not objective.rated:
        return False
    return objective.find_loss("" if stated == "auto" else stated).mismatches


def check_described(request: Request) -> None:
    """Raise InvalidRequest for a loss of pairs that is described of memfit's own step alone."""
    objective, loss = find_objective(request.task.objective), request.preference.loss_type
    if not objective.compares or request.is_own:
        return
    usual = find_objective("dpo").usual_loss
    if objective.name != "dpo" or loss not in ("auto", usual):
        stated = "" if loss == "auto" else f" with `preference.loss_type: {loss}`"
        raise InvalidRequest(
            f"`objective: {objective.name}`{stated} under `framework: {request.framework}`: memfit"
            f" describes how it computes `objective: dpo` with `loss_type: {usual}` alone",
            hint="use `framework: memfit`",
        )


def choose_preference(
    request: Request, method: Method, *, whole: Reference = "precomputed"
) -> Preference:
    """Of a recipe of this method; raises InvalidRequest where it has no such reference.

    whole: the reference of `auto` where all weights are trained; a second model is of the steps
    of others that have one.
    """
    objective = find_objective(request.task.objective)
    if not objective.compares:
        return Preference()
    requested = request.preference
    loss = objective.usual_loss if requested.loss_type == "auto" else requested.loss_type
    made = Preference(
        beta=_choose_beta(requested.beta, objective), loss_type=loss,
        label_smoothing=requested.label_smoothing,
        gamma=_choose("gamma", requested.gamma, 0.5, loss, "simpo"),
        tau=_choose("tau", requested.tau, 0.05, loss, "discopop"),
        cross_entropy=_weigh(requested.cross_entropy, usual=bool(objective.learns)),
        desirable=_weigh(requested.desirable, usual=objective.rated),
        undesirable=_weigh(requested.undesirable, usual=objective.rated),
        center=requested.center,
    )  # fmt: skip
    objective.check(made)
    if not objective.refers:
        if requested.reference != "auto":
            check_no_reference(objective.name, requested.reference)
        return made
    usual: Reference = "adapter-off" if method in ADAPTED else whole
    reference = usual if requested.reference == "auto" else requested.reference
    if whole == "precomputed":
        check_second(reference)
    if reference == "adapter-off":
        check_adapter(method)
    return replace(made, reference=reference)


def _choose_beta(requested: float | str, objective: Objective) -> float:
    """A score is a reward as it is; a log-probability is multiplied by a tenth unless stated."""
    usual = 1.0 if objective.scores else 0.1
    return usual if isinstance(requested, str) else requested


def _weigh(requested: float | str, *, usual: bool) -> float:
    """A weight, which is 1 where the objective has such a part and states no other."""
    return float(usual) if isinstance(requested, str) else requested


def _choose(name: str, requested: float | str, usual: float, loss: str, owner: str) -> float:
    """A setting that one loss has; raises InvalidRequest where it is stated for another."""
    if loss == owner:
        return usual if isinstance(requested, str) else requested
    if not isinstance(requested, str) and requested:
        raise InvalidRequest(
            f"`preference.{name}: {requested:g}` with `loss_type: {loss}`, which has none",
            hint=f"it is of `loss_type: {owner}`",
        )
    return 0.0
