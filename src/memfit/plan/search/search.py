"""Decide every `auto` of a request: the fastest predicted recipe that fits, of any framework.

Two kinds of knobs. *Exact* ones change memory and time but not what is learned (micro-batch at a
fixed global batch, recompute, chunked loss, the mesh): among these the fastest that fits wins.
*Inexact* ones (method, precision) change the result: memfit keeps the first of a fixed order of
preference under which anything fits, and never gives one up for speed.
"""

from __future__ import annotations

from msgspec.structs import replace

from memfit.core.system.collector import without_collecting
from memfit.plan.frameworks import Framework, hinting
from memfit.plan.memory.host_memory import find_host_excess
from memfit.plan.questions.replanned import INEXACT, learns, replan_levers
from memfit.plan.questions.shown_levers import replan_shown
from memfit.plan.request.problem import Problem, read_problem
from memfit.plan.search.choice import Explorer, Found
from memfit.records.recipe import Recipe
from memfit.records.request import Request
from memfit.records.results import Considered, Memory, Plan


def search(problem: Problem, *, levers: bool = True) -> Plan:
    """The plan of a request: its best recipe, or the nearest miss with verdict `does_not_fit`.

    levers: False leaves out those of a plan that fits, which take most of the time.

    Raises DoesNotFit where what fits would exceed `limits.time`, `limits.cost` or
    `limits.host_memory`, and InvalidRequest where no candidate is left.
    """
    with hinting(problem.framework), without_collecting():
        plan, chosen = _find_best(problem)
        if not levers or plan.memory.verdict == "does_not_fit":
            return plan

        found = Found(plan, chosen)

        def find(changed: Request) -> Found:
            return _find_best(_read_lever(problem, found, changed))

        return replace(plan, levers=_mark(replan_levers(problem, chosen, find), found))


def _read_lever(problem: Problem, found: Found, changed: Request) -> Problem:
    """The problem of one lever; where the plan's replay is long, without any replay."""
    made = read_problem(changed, device=problem.device)
    ratio = _find_ratio(found.plan.memory) if found.choice.is_long else None
    return replace(made, ranged=False, assumed_ratio=ratio)


def _find_ratio(memory: Memory) -> float:
    """Reserved over allocated bytes; 1 where it is not known what is reserved."""
    if not memory.peak_reserved:
        return 1.0
    return memory.peak_reserved / (memory.peak_allocated or 1)


def _mark(rows: tuple[Considered, ...], found: Found) -> tuple[Considered, ...]:
    """Levers, as estimates where they were planned without any replay."""
    return tuple(replace(row, exact=False) for row in rows) if found.choice.is_long else rows


def search_briefly(problem: Problem) -> Found:
    """As `search` without levers; of what was considered the chosen recipe alone is described."""
    with hinting(problem.framework), without_collecting():
        return _find_best(replace(problem, brief=True))


def find_shown_levers(problem: Problem, found: Found) -> tuple[Considered, ...]:
    """Those of the levers of `search` that a short screen shows; found: the problem's plan."""
    ratio = _find_ratio(found.plan.memory)
    explorer, learned = find_explorer(problem.framework), learns(found.choice.recipe)

    def read(changed: Request) -> Problem:
        return replace(_read_lever(problem, found, changed), brief=True)

    def estimate(changed: Request) -> tuple[Considered, Recipe]:
        rough = explorer.find_roughly(read(changed), ratio)
        row = Considered(
            label="", changes={}, peak_allocated=rough.peak_allocated, device_total=rough.needs,
            exact=False, relative_time=rough.seconds / found.choice.seconds(problem.device),
            fits=rough.fits, chosen=False,
            because=INEXACT if learns(rough.recipe) != learned else "",
        )  # fmt: skip
        return row, rough.recipe

    with hinting(problem.framework), without_collecting():
        rows = replan_shown(problem, found, lambda changed: _find_best(read(changed)), estimate)
        return _mark(rows, found)


def find_fitting(problem: Problem) -> Plan | None:
    """The plan of a request without levers, as brief; None where nothing fits.

    Raises DoesNotFit where what fits would exceed `limits.time` or `limits.cost`.
    """
    brief = replace(problem, brief=True)
    with hinting(problem.framework), without_collecting():
        found = find_explorer(problem.framework).find_fitting(brief)
        if found is None:
            return None
        _check_host(found.plan)
        return found.plan


def predict(problem: Problem, *, levers: bool = False) -> Plan:
    """The plan of a request that leaves nothing to decide; no search, no alternatives.

    levers: with what each knob turned would save or cost, where single knobs are described. Of a
    step that memfit does not run, what is left open takes the framework's own default.
    """
    with hinting(problem.framework):
        plan = find_explorer(problem.framework).predict(problem, levers=levers)
        _check_host(plan)
        return plan


def predict_request(request: Request) -> Plan:
    """As `predict`, of a request whose names are not looked up yet."""
    return predict(read_problem(request))


def find_explorer(framework: Framework) -> Explorer:
    """What decides a request for this framework's step.

    A simulated step is predicted one candidate at a time, and bounds choose which; closed forms
    take arrays of candidates. Each imports much that the other does not need.
    """
    if framework.simulated:
        from memfit.plan.search.best_first import BestFirst

        return BestFirst()
    from memfit.plan.search.exhaustive import Exhaustive

    return Exhaustive()


def _find_best(problem: Problem) -> Found:
    found = find_explorer(problem.framework).find_best(problem)
    _check_host(found.plan)
    return found


def _check_host(plan: Plan) -> None:
    """Raise DoesNotFit for a plan that fits its devices and not their hosts."""
    held = plan.host.get("offloaded", 0)
    excess = find_host_excess(plan.recipe, held, plan.request.limits)
    if excess is not None and plan.memory.verdict != "does_not_fit":
        raise excess
