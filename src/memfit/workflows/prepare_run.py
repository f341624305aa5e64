"""What a run needs before its first step: a plan, and a certificate of it that holds here and now.

A certificate holds for one recipe, under the library versions that it was made with, for data
within its bounds. One that does not is replaced, and the reason is printed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from memfit.base_formats import is_quantised
from memfit.core.errors import DoesNotFit, InvalidRequest, NotCertified
from memfit.files.run_folder import check_folder, read_plan, state
from memfit.plan.memory.verdict import describe_shortfall, needs
from memfit.plan.request import problem as problems
from memfit.plan.search import search
from memfit.records import Record, read_json, write_json
from memfit.records.habits.continued import check_continues
from memfit.records.hardware import Device
from memfit.records.request import Request
from memfit.records.results import Certificate, Plan, Run
from memfit.records.shapes import RowBounds
from memfit.workflows.certify_request import certify

REPLANS = 3  # a plan that its certificate refutes is made again with the difference taken off
ANYWAY = "`--anyway` trains all the same, this once"
STALE = "certificate.stale.json"
Say = Callable[[str], None]
# what a run's imports take in bytes, None where unknown; True: of packages that its step calls
Imports = Callable[[bool], int | None]


class Prepared(Record, frozen=True, kw_only=True):
    """What a run needs before its first step; each part is also a file of the run folder."""

    request: Request
    plan: Plan
    certificate: Certificate | None  # None: it could not be made, and the user trains all the same


def unmeasured(lean: bool) -> None:
    """`Imports` of a process that measures none: they are measured where the step is certified."""
    del lean


def may_quantise(request: Request) -> bool:
    """Whether a plan of the request may hold its base in a quantised format."""
    if request.method == "full":  # trains the base
        return False
    return request.base_format == "auto" or is_quantised(request.base_format)


def prepare(
    request: Request,
    folder: Path,
    *,
    say: Say = lambda _: None,
    override: bool = False,
    continues: bool = False,
    imports: Imports = unmeasured,
) -> Prepared:
    """Plan and certify, or take both from the folder when they hold for this request.

    continues: the folder's run may have had other steps and another schedule.
    imports: what a run on this CPU holds before its first tensor, where that was measured.

    A plan of the folder is certified anew where its certificate is stale: of another recipe, of
    other library versions, or of other data.
    Raises DoesNotFit and NotCertified unless overridden, InvalidRequest (another request's folder).
    """
    requests = [request, request := find_lengths(request, say)]
    check_folder(folder, requests, continues=continues)
    made = _plan_of(folder, request)
    if made is not None:
        prepared = _reuse(request, made, folder, say, override=override, imports=imports)
        if prepared is not None:
            return _write(prepared, folder)
    prepared = _prepare_anew(request, say, override=override, imports=imports)
    if continues and (folder / "run.json").exists():  # nothing is written where it cannot go on
        _check_goes_on(read_json(folder / "run.json", Run), prepared, folder)
    return _write(prepared, folder)


def _check_goes_on(run: Run, prepared: Prepared, folder: Path) -> None:
    """Raise InvalidRequest where the folder's run cannot: another recipe, other data, or an end by
    `run.patience` that still holds."""
    from memfit.train.checkpoint.files import check_digest
    from memfit.train.data.prepare import read_data
    from memfit.train.habits.stopping import judge, read_evaluations
    from memfit.train.run.logs import read_log

    request, recipe = prepared.request, prepared.plan.recipe
    check_continues(run.recipe, recipe, run.steps_done)
    data = read_data(request, recipe.model).training
    check_digest("data", run.environment.get("data", data.digest), data.digest, folder)
    if request.run.patience:
        evaluations = read_evaluations(read_log(folder), request.run.best_by)
        if judge(evaluations, request.run).stops:
            raise InvalidRequest(
                f"the run would end where it is, after step {run.steps_done}: `run.patience:"
                f" {request.run.patience}` evaluations in turn were no better",
                hint="`--set run.patience=0`, or a larger one, goes on",
            )


def prepare_moved(
    request: Request,
    folder: Path,
    *,
    say: Say = lambda _: None,
    override: bool = False,
    imports: Imports = unmeasured,
) -> Prepared:
    """Plan and certify a run on other ranks; request.json stays the user's."""
    made = _prepare_anew(request, say, override=override, imports=imports)
    return write_prepared(made, folder)


def read_prepared(folder: Path) -> Prepared:
    """Return what a run folder holds. Raises InvalidRequest for a file that cannot be read."""
    proof = folder / "certificate.json"
    return Prepared(
        request=read_json(folder / "request.json", Request),
        plan=read_plan(folder / "plan.json"),
        certificate=read_json(proof, Certificate) if proof.exists() else None,
    )


def find_lengths(request: Request, say: Say = lambda _: None) -> Request:
    """The request with its epochs counted in steps, which needs its data tokenised (once)."""
    from memfit.train.data import prepare as preparing

    start = problems.read_own_problem(request)
    length = problems.sequence_length(request, start.model)
    memory = request.limits.memory_bytes if start.device.is_cpu else None
    return preparing.find_lengths(request, start.reference, length, memory=memory, say=say)


def find_machine(request: Request, imports: int | None = None) -> Device:
    """The request's device; a processor's speed is measured here where the user never did.

    imports: measured bytes that a run on this CPU holds before its first tensor.
    """
    from memfit.train.run.machine import measure_machine

    device = problems.find_device(request.hardware.device)
    unknown = device.is_cpu and device.calibration is None
    device = measure_machine(device) if unknown else device
    return device if imports is None else device.with_context(imports)


def why_stale(
    certificate: Certificate, plan: Plan, data: tuple[RowBounds, RowBounds | None]
) -> str:
    """The reason why a certificate does not hold, naming both sides; "" when it does."""
    from memfit.train.run.certified import find_excess, find_other_version

    if certificate.recipe_digest != plan.recipe_digest:
        return f"it is of recipe {certificate.recipe_digest}, the plan of {plan.recipe_digest}"
    if other := find_other_version(certificate):
        return other
    if certificate.data is None:
        return "it does not say for which training data it holds"
    return find_excess(plan.recipe, certificate, *data)


def _plan_of(folder: Path, request: Request) -> Plan | None:
    """The plan of an earlier start, or of `memfit plan`, when it is this request's."""
    if not (folder / "plan.json").exists():
        return None
    made = read_plan(folder / "plan.json")
    # its length may not have been known when it was made
    return made if request.planned in (made.request.planned, state(made).planned) else None


def _reuse(
    request: Request, made: Plan, folder: Path, say: Say, *, override: bool, imports: Imports
) -> Prepared | None:
    """Return the folder's plan under its certificate, or under a new one; None where it has not
    begun and a new certificate refutes it."""
    from memfit.train.data.prepare import find_bounds
    from memfit.train.model.weights import check_weights

    file = folder / "certificate.json"
    proof = _read_certificate(file, say)
    if proof is not None:
        stale = why_stale(proof, made, find_bounds(request, made.recipe, say=say))
        if not stale:
            return _judged(Prepared(request=request, plan=made, certificate=proof), override)
        say(f"`{file}` does not hold: {stale}; certifying again")
    elif not file.exists() and made.memory.verdict == "does_not_fit" and not override:
        return None
    check_weights(made.recipe)
    new = _certify(request, made, say, override=override, imports=imports)
    prepared = Prepared(request=request, plan=made, certificate=new)
    if override or new is None:
        return prepared
    if new.memory.verdict == "does_not_fit" and not (folder / "run.json").exists():
        say("the plan's new certificate says that it does not fit: planning again")
        return None
    return _judged(prepared, override)


def _read_certificate(file: Path, say: Say) -> Certificate | None:
    """The folder's certificate; None where there is none, or none that can be read."""
    if not file.exists():
        return None
    try:
        return read_json(file, Certificate)
    except InvalidRequest as error:
        say(f"{error.message}; certifying again")
        return None


def _certify(
    request: Request, made: Plan, say: Say, *, override: bool, imports: Imports
) -> Certificate | None:
    """The plan's certificate. Where none can be made: NotCertified, or None when overridden."""
    try:
        return certify(
            made.recipe, usable=made.memory.usable, request=request,
            imports=imports(not made.recipe.coding), say=say, stages=True,
        )  # fmt: skip
    except NotCertified as error:
        if not override:
            hint = f"{error.hint}; {ANYWAY}" if error.hint else ANYWAY
            raise NotCertified(error.message, hint=hint) from None
        say(f"warning: training without a certificate: {error.message}")
        return None


def _judged(prepared: Prepared, override: bool) -> Prepared:
    """Raise DoesNotFit for a certificate that says so, unless overridden."""
    if prepared.certificate is None:
        return prepared
    memory = prepared.certificate.memory
    if memory.verdict == "does_not_fit" and not override:
        shortfall = describe_shortfall(memory, prepared.plan.recipe.device)
        raise DoesNotFit(
            f"certified: {shortfall}",
            hint=f"raise `limits.memory`, or see `memfit certify`; {ANYWAY}",
        )
    return prepared


def _prepare_anew(request: Request, say: Say, *, override: bool, imports: Imports) -> Prepared:
    from memfit.train.model.weights import check_weights

    device = find_machine(request, imports(not may_quantise(request)))
    limit: int | None = None
    for _ in range(REPLANS):
        made = _plan_within(request, device, limit)
        if made.memory.verdict == "does_not_fit" and not override:
            raise DoesNotFit(
                describe_shortfall(made.memory, made.recipe.device),
                hint=f"raise the limit, or see `memfit plan --why`; {ANYWAY}",
            )
        check_weights(made.recipe)  # before anything is written
        say(f"certifying recipe {made.recipe_digest}")
        proof = _certify(request, made, say, override=override, imports=imports)
        if proof is None or proof.memory.verdict != "does_not_fit" or override:
            return Prepared(request=request, plan=made, certificate=proof)
        over = needs(proof.memory) - needs(made.memory)
        limit = (made.memory.usable or 0) - over
        say(f"certified {over} B above the prediction: planning again within {limit} B")
    raise NotCertified(
        f"{REPLANS} plans in a row were refuted by their certificates",
        hint="lower `limits.memory` a little, or state the knobs and use `memfit certify`",
    )


def _plan_within(request: Request, device: Device, limit: int | None) -> Plan:
    """The plan under a tighter limit than the request's own, which its verdict still names."""
    own = problems.read_own_problem(request, device=device, published=True)
    if limit is None:
        return search.search(own)
    limits = msgspec.structs.replace(request.limits, memory=f"{max(limit, 0)} B")
    within = msgspec.structs.replace(request, limits=limits)
    tighter = search.search(problems.read_own_problem(within, device=device, published=True))
    memory = msgspec.structs.replace(tighter.memory, usable=own.usable)
    return msgspec.structs.replace(tighter, request=request, memory=memory)


def _write(prepared: Prepared, folder: Path) -> Prepared:
    write_json(folder / "request.json", prepared.request)
    return write_prepared(prepared, folder)


def write_prepared(prepared: Prepared, folder: Path) -> Prepared:
    """Write the plan and its certificate; the certificate of another plan is put aside."""
    write_json(folder / "plan.json", prepared.plan)
    file = folder / "certificate.json"
    if prepared.certificate is not None:
        write_json(file, prepared.certificate)
    elif file.exists():  # it does not hold, and the report must not join it
        file.replace(folder / STALE)
    return prepared
