"""A plan for the step of the tool that it is written for.

What a request leaves open is decided for that step; what it states stays. What the tool does
whatever its file states (`Draft.becomes`) is planned for, until file and plan agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from memfit import families
from memfit.base_formats import find_base_format
from memfit.core.errors import InvalidRequest
from memfit.core.wording import as_yaml
from memfit.export.unwritten_keys import learns
from memfit.plan.frameworks import Framework, find_framework
from memfit.plan.request.model_reference import find_reference
from memfit.plan.request.problem import find_device, find_rate, read_problem
from memfit.plan.request.wording import restate
from memfit.plan.search import search
from memfit.records import from_data, to_data
from memfit.records.recipe import ADAPTED, Method, Parallel, Recipe
from memfit.records.request import Request
from memfit.records.results import Plan
from memfit.workflows.load_inputs import change

if TYPE_CHECKING:
    from memfit.export.target import Draft, Job, Target

ORDER = ("fits", "unproven", "at_risk", "does_not_fit")
ROUNDS = 6  # of planning what a tool does anyhow: each pins another key
PAGED = {"adamw8bit-bnb": False, "adamw8bit-paged": True}  # bitsandbytes', of memfit's own step
TORCHAO = ("adamw8bit", "adamw4bit")  # torchao's there, which the Trainer has, too
# keys that change memory and time alone: the value that leaves each of them open
OPEN = {
    "recompute": "auto", "attention": "auto", "loss": "auto", "compile": "auto",
    "offload": "none", "optimizer.implementation": "auto",
}  # fmt: skip
# keys of a request that decide what is learned, and that a plan's own choice fills in
CHOSEN = ("method", "base_format", "precision", "optimizer.name")
OF_TASK = ("sequence_length", "packing")  # keys of a recipe that a request has under `task`


class Settled(NamedTuple):
    """A plan that the target's files express, the files, and what differs from the source."""

    job: Job
    draft: Draft
    changed: dict[str, str]  # key -> in words: what it was, what it is, and why


def settle(source: Plan | Request, target: Target) -> Settled:
    """The plan under the target's own step, and its files.

    Raises InvalidRequest where the files would train something else than `source`.
    """
    request = source.request if isinstance(source, Plan) else source
    if target.schedules:
        return _settle_started(source if isinstance(source, Plan) else plan_anew(source), target)
    before = source.recipe.framework if isinstance(source, Plan) else request.framework
    name = before if before in target.frameworks else target.frameworks[0]
    moved, changed = move(request, name, target)
    moved = change(moved, {"optimizer.learning_rate": _rate(source, target)})
    if isinstance(source, Plan):
        plan = source if before == name else _first(moved, keep_chosen(moved, source))
    else:
        plan = plan_anew(moved)
    first = Settled(make_job(plan, target), _draft(plan, target), changed)
    settled = _pin(first, moved, target, fixed=plan is source)
    if isinstance(source, Plan):
        _note_changes(source.recipe, settled)
    return settled


def _note_changes(before: Recipe, settled: Settled) -> None:
    """Say it where what is learned is not what the plan had."""
    after, changed = settled.job.recipe, settled.changed
    if before.framework == after.framework:
        return
    for key in (*CHOSEN, *OF_TASK):
        was, now = look_up(before, key), look_up(after, key)
        frozen = key != "base_format" or after.method in ADAPTED
        if was != now and frozen and key not in changed:
            changed[key] = f"{as_yaml(was)} -> {as_yaml(now)}: as {after.framework} has it"


def _settle_started(plan: Plan, target: Target) -> Settled:
    """A scheduler starts the plan's own trainer, whose files say what that trainer does."""
    from memfit.export.start import TRAINERS
    from memfit.export.target import find_target

    changed: dict[str, str] = {}
    if trainer := TRAINERS.get(plan.recipe.framework):
        settled = settle(plan, find_target(trainer))
        plan, changed = settled.job.plan, settled.changed
    job = make_job(plan, target)
    return Settled(job, target.draft(job), changed)


def plan_anew(request: Request) -> Plan:
    """Every knob that is left open, decided."""
    return search.search(read_problem(request), levers=False)


def make_job(plan: Plan, target: Target) -> Job:
    """What the target asks of; raises InvalidRequest for a mesh or an objective that it has not."""
    from memfit.export.target import Job, check_supported

    check_supported(plan.recipe.objective, plan.recipe.parallel, target)
    model, device = families.read_model(plan.recipe.model), find_device(plan.recipe.device)
    return Job(plan=plan, model=model, device=device)


def _draft(plan: Plan, target: Target) -> Draft:
    return target.draft(make_job(plan, target))


def _first(moved: Request, filled: Request) -> Plan:
    """Return a plan with the earlier choices; where that is invalid, of the stated keys alone."""
    try:
        plan = plan_anew(filled)
    except InvalidRequest:
        if filled == moved:
            raise
        return plan_anew(moved)
    return plan if plan.memory.verdict != "does_not_fit" or filled == moved else plan_anew(moved)


def _pin(settled: Settled, moved: Request, target: Target, *, fixed: bool) -> Settled:
    """Return the same once everything that the tool does anyhow is planned for.

    fixed: the source is a plan, so that each difference is listed; else those in what is learned.
    """
    job, draft, changed = settled
    pins: dict[str, Any] = {}
    for _ in range(ROUNDS):
        found = {k: v for k, v in draft.becomes.items() if look_up(job.recipe, k) != v}
        if not found:
            _refuse_unwritten(draft, job, target)
            return Settled(job, draft, changed)
        if "precision" in found:  # kernels, and what hangs on them, depend on it
            found = {"precision": found["precision"]}
        for key, value in found.items():
            why = draft.left.get(key, "")
            _refuse_stated(moved, key, value, why, target)
            if learns(key) or fixed:
                reason = why.partition(": ")[2] or f"{target.title} does so"
                before = as_yaml(to_data(look_up(job.recipe, key)))
                changed[key] = f"{before} -> {as_yaml(value)}: {reason}"
        pins |= found
        plan = _replan(job.plan, moved, pins, fixed=fixed)
        job, draft = make_job(plan, target), _draft(plan, target)
    raise AssertionError(f"{target.name}: {found} is never as planned")


def _replan(plan: Plan, moved: Request, pins: Mapping[str, Any], *, fixed: bool) -> Plan:
    """The same recipe with these keys; where that cannot be, or may not fit, a new search.

    fixed: the source is a plan, which is exported even where it may not fit.
    """
    changes = {name_in_request(key): value for key, value in pins.items()}
    if "recompute_blocks" in changes:  # all of them
        del changes["recompute_blocks"]
        changes["recompute"] = plan.recipe.recompute
    same = None
    with suppress(InvalidRequest):
        same = search.predict_request(change(restate(plan), changes))
    enough = ORDER[:3] if fixed else ORDER[:1]
    if same is not None and same.memory.verdict in enough:
        return same
    anew = plan_anew(change(moved, changes))
    better = same is None or ORDER.index(anew.memory.verdict) < ORDER.index(same.memory.verdict)
    return anew if better or same is None else same


def name_in_request(key: str) -> str:
    """A recipe's key as a request has it."""
    return f"task.{key}" if key in OF_TASK else key


def _refuse_stated(moved: Request, key: str, value: Any, why: str, target: Target) -> None:
    """Raise InvalidRequest where the tool learns with another value than the stated one."""
    stated = look_up(moved, name_in_request(key))
    if not learns(key) or stated in ("auto", value):
        return
    reason = why.partition(": ")[2] or f"{target.title} always has {as_yaml(value)}"
    raise InvalidRequest(
        f"`{key}: {as_yaml(stated)}` cannot be written for `{target.name}`: {reason}",
        hint=f"`--set {name_in_request(key)}={as_yaml(value)}`, or leave it open",
    )


def _refuse_unwritten(draft: Draft, job: Job, target: Target) -> None:
    """Raise InvalidRequest for a learned setting that cannot be written; a launcher's are the
    script's."""
    from memfit.export.unwritten_keys import find_unwritten

    unwritten = {} if target.launches else find_unwritten(job.recipe, target.says_of(job))
    for key, why in {**draft.left, **unwritten}.items():
        if learns(key):
            raise InvalidRequest(
                f"`{key}: {why.partition(': ')[0]}` cannot be written for `{target.name}`:"
                f" {why.partition(': ')[2]}",
                hint=HINTS.get(key, "another value, or another target: `memfit export --help`"),
            )


HINTS = {
    "method": "`method: full`; trl, axolotl and llamafactory train adapters",
    "optimizer.momentum": "`--set optimizer.momentum=0`, or `--set optimizer.name=adamw`",
    "objective": "trl, axolotl and llamafactory train on answers; slurm, k8s, … start `memfit"
    " train`, which does, too",
    "lora.alpha": "a whole number",
    "weights": "torchtitan and megatron begin with random weights, and so does `memfit train`",
}  # fmt: skip


def look_up(record: Any, key: str) -> Any:
    """A dotted key of a recipe or a request; None where a mapping does not hold it."""
    for part in key.split("."):
        record = record.get(part) if isinstance(record, Mapping) else getattr(record, part, None)
    return record


def move(request: Request, name: str, target: Target) -> tuple[Request, dict[str, str]]:
    """The request for the framework `name`, and what of it is of no use there.

    Raises InvalidRequest where that would train something else.
    """
    from memfit.export.target import check_supported

    framework = find_framework(name)
    mesh = Parallel() if request.parallel == "auto" else request.parallel
    check_supported(request.task.objective, mesh, target)
    _refuse_untrainable(request, framework, target)
    if request.framework == name:
        return request, {}
    data, dropped = to_data(request), {}
    data["framework"] = name
    for key, free in OPEN.items():
        stated, allowed = look_up(request, key), framework.values[key.rpartition(".")[2]]
        word = stated if isinstance(stated, str) else "full"  # a number of blocks
        if stated == free or word in allowed:
            continue
        data = to_data(change(from_data(data, Request, source="the export"), {key: free}))
        dropped[key] = f"{as_yaml(to_data(stated))}: of no use there, and left open"
    if request.parallel != "auto":
        data["parallel"] |= _restate_mesh(request.parallel, framework, dropped)
    if request.lean not in ("auto", "none"):
        dropped["lean"] = f"{as_yaml(to_data(request.lean))}: of memfit's own step"
    data["lean"] = "auto"
    if request.optimizer.in_backward is True:
        dropped["optimizer.in_backward"] = "true: of memfit's own step"
    data["optimizer"]["in_backward"] = "auto"
    data["options"] = _options(request, framework, dropped)
    if "padding_free" in framework.knobs:  # until the files say it: they take flash-attn for it
        data["options"].setdefault("padding_free", False)
    _name_optimizer(request, framework, data)
    return from_data(data, Request, source="the export"), dropped


def _restate_mesh(mesh: Parallel, framework: Framework, dropped: dict[str, str]) -> dict[str, Any]:
    """What a framework's own way of cutting and gathering is, where it has one alone."""
    plain = Parallel()
    own: dict[str, Any] = {
        name: getattr(plain, name)
        for name in ("reshard_after_forward", "sequence_parallel", "zero")
        if name not in framework.axes
    }
    if framework.cuts != plain.zero:
        own["zero"] = framework.cuts
    for name, value in own.items():
        if getattr(mesh, name) != value:
            before = as_yaml(getattr(mesh, name))
            dropped[f"parallel.{name}"] = f"{before}: {framework.name} always has {as_yaml(value)}"
    return own


def _options(request: Request, framework: Framework, dropped: dict[str, str]) -> dict[str, Any]:
    """Knobs that both frameworks have alike; some share a name alone."""
    if request.is_own:
        base = request.base_format
        doubles = base == "auto" or find_base_format(base).doubles
        states_double = doubles and "double_quantisation" in framework.knobs
        return {"double_quantisation": request.quantisation.double} if states_double else {}
    knobs, found = find_framework(request.framework).knobs, {}
    for key, value in request.options.items():
        if key in framework.knobs and framework.knobs[key] == knobs.get(key):
            found[key] = value
        else:
            dropped[f"options.{key}"] = f"{as_yaml(value)}: of {request.framework} alone"
    return found


def _name_optimizer(request: Request, framework: Framework, data: dict[str, Any]) -> None:
    """The framework's own name of an optimizer of memfit's own step."""
    name = request.optimizer.name
    if not request.is_own:
        return
    if name in PAGED:
        data["optimizer"]["name"], data["options"]["paged"] = "adamw8bit", PAGED[name]
    elif name in TORCHAO and "adamw8bit" in framework.knobs:
        data["options"]["adamw8bit"] = "torchao"
        data["optimizer"]["implementation"] = "fused"  # the Trainer compiles it


def _refuse_untrainable(request: Request, framework: Framework, target: Target) -> None:
    """Raise InvalidRequest for what is learned in a way that the tool's step has not."""
    cannot = f"cannot be written for `{target.name}`"
    started = "or `--to slurm`, `--to k8s`, …, which start `memfit train`"
    name, known = request.optimizer.name, framework.values["optimizer"]
    theirs = "adamw8bit" if name in PAGED and "paged" in framework.knobs else name
    if request.is_own and name in TORCHAO and "adamw8bit" not in framework.knobs:
        theirs = f"torchao's {name}"
    if theirs not in ("auto", *known):
        raise InvalidRequest(
            f"`optimizer.name: {name}` {cannot}: {framework.title} has no such optimizer, or memfit"
            " does not describe it there",
            hint=f"one of {', '.join(known)}; {started}",
        )
    if request.optimizer.stochastic_rounding is True:
        raise InvalidRequest(
            f"`optimizer.stochastic_rounding: true` {cannot}: it is of memfit's own step",
            hint=f"leave it out, {started}",
        )
    for key in ("method", "precision"):
        value, allowed = look_up(request, key), framework.values[key]
        if value not in ("auto", *allowed):
            raise InvalidRequest(
                f"`{key}: {value}` {cannot}: it is not described for {framework.title}",
                hint=f"one of {', '.join(allowed)}; {started}",
            )
    if target.loads and request.weights == "random":
        raise InvalidRequest(
            f"`weights: random` {cannot}, which loads a model's weights", hint=HINTS["weights"]
        )
    threshold = request.quantisation.outlier_threshold
    base = "bf16" if request.base_format == "auto" else request.base_format
    looks = find_base_format(base).product == "int8"  # for columns with outliers
    if looks and request.is_own and threshold != 6.0:
        raise InvalidRequest(
            f"`quantisation.outlier_threshold: {threshold}` {cannot}, whose threshold is"
            " bitsandbytes' own, 6.0",
            hint=f"leave it out, {started}",
        )


def _rate(source: Plan | Request, target: Target) -> float:
    """The learning rate that the plan has, or that memfit's own step would have."""
    if isinstance(source, Plan):
        return source.recipe.optimizer.learning_rate
    reference = find_reference(source.model)
    method: Method = "full" if source.method == "auto" else source.method
    if source.weights == "auto" and not (target.loads or target.launches):
        source = replace(source, weights="random")  # with which the tool begins
    return find_rate(source, reference, families.read_model(reference), method)


def keep_chosen(moved: Request, plan: Plan) -> Request:
    """The request with what decides learning as the plan has it, where the framework has that."""
    framework, recipe = find_framework(moved.framework), plan.recipe
    chosen: dict[str, Any] = {}
    for key in CHOSEN:
        value = look_up(recipe, key)
        wanted = framework.values[key.replace("optimizer.name", "optimizer")]
        if look_up(moved, key) == "auto" and value in wanted:
            chosen[key] = value
    if recipe.method == "full":
        chosen.pop("base_format", None)
    if recipe.optimizer.stochastic_rounding:  # without which weights of 16 bits learn otherwise
        chosen.pop("precision", None)
    if recipe.method in ADAPTED and moved.lora.targets == "auto":
        chosen["lora.targets"] = list(recipe.lora.targets)
    return change(moved, chosen)
