"""The levers that matter: the few of a short screen, of which alone the plans are made exactly.

Each lever is planned roughly first, by the ratio of reserved to allocated bytes that the plan
itself was replayed with, and with no more recomputation than a bound requires; what may be among
the few is then planned as `replanned` does. So the figures that are shown, and which levers they
are of, are those of all levers planned exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from memfit.core.errors import Error
from memfit.plan.questions.replanned import INEXACT, Planner, describe_lever, list_changes
from memfit.plan.request.problem import Problem
from memfit.plan.search.choice import Found
from memfit.records.recipe import Recipe
from memfit.records.request import Request, change
from memfit.records.results import Considered, Plan

FEW = 3
MATTERS = 0.01  # of what is needed, or of the time: less is no lever
DOUBT = 0.03  # of a rough plan's bytes and seconds
Estimator = Callable[[Request], tuple[Considered, Recipe]]  # of a rough plan


def choose_levers(rows: Iterable[Considered], plan: Plan) -> list[Considered]:
    """What saves memory or time and fits, the most for its time first.

    A lever that needs more and is slower than another one, which changes no more of what is
    learned, is left to `--why`.
    """
    own, miss = plan.memory.needed or 0, plan.memory.verdict == "does_not_fit"
    timed = plan.time.step_seconds is not None
    able = [
        row
        for row in rows
        if (row.fits or miss)
        and (own - needs(row) > MATTERS * own or (timed and row.relative_time < 1 - MATTERS))
        and not (miss and needs(row) >= own)
    ]
    able = [row for row in able if not any(_beats(other, row) for other in able)]
    faster = [row for row in able if row.relative_time < 1 - MATTERS]
    saving = sorted((row for row in able if row not in faster), key=needs)
    return [*sorted(faster, key=lambda row: row.relative_time), *saving]


def _beats(one: Considered, other: Considered) -> bool:
    return (
        needs(one) < needs(other)
        and one.relative_time < other.relative_time
        and (is_inexact(other) or not is_inexact(one))
    )


def is_inexact(row: Considered) -> bool:
    """Whether a lever changes what is learned."""
    return INEXACT in row.because


def needs(row: Considered) -> int:
    """The bytes of the device that a row tells."""
    return row.peak_allocated if row.device_total is None else row.device_total


def replan_shown(
    problem: Problem, found: Found, find_plan: Planner, estimate: Estimator, few: int = FEW
) -> tuple[Considered, ...]:
    """The first `few` of `choose_levers`, in the order in which levers are listed.

    find_plan and estimate: of a request on the same device. Raises nothing, as `replan_levers`.
    """
    return _Shown(problem, found, find_plan, estimate, few).find()


class _Shown:
    """Levers of one plan, some known roughly and some exactly."""

    def __init__(
        self, problem: Problem, found: Found, find_plan: Planner, estimate: Estimator, few: int
    ) -> None:
        self.problem, self.find_plan, self.few = problem, find_plan, few
        self.plan, self.chosen = found
        self.rough: dict[int, Considered] = {}  # by place in the list
        self.recipes: dict[int, Recipe] = {}  # of rough plans
        self.exact: dict[int, tuple[Considered, Recipe]] = {}
        for at, changes in enumerate(list_changes(problem, self.chosen)):
            try:
                row, self.recipes[at] = estimate(change(problem.request, changes))
            except Error:
                continue
            self.rough[at] = replace(row, changes=changes)

    def find(self) -> tuple[Considered, ...]:
        """The rows, when no lever that is known roughly may be one of them."""
        while (at := self._next()) is not None:
            rough = self.rough.pop(at)
            try:
                plan, other = self.find_plan(change(self.problem.request, rough.changes))
            except Error:
                continue
            row = describe_lever(plan, other, self.chosen, rough.changes, self.problem.device)
            self.exact[at] = row, other.recipe
            self._forget_alike(at, other.recipe)
        rows = self._distinct()
        shown = self._choose(rows)
        return tuple(row for row in rows if row in shown)

    def _forget_alike(self, at: int, recipe: Recipe) -> None:
        """Later levers that come to a recipe which is planned exactly, as roughly as it did."""
        if self.recipes[at] == recipe:
            for other in [n for n in self.rough if n > at and self.recipes[n] == recipe]:
                del self.rough[other]

    def _choose(self, rows: Iterable[Considered]) -> list[Considered]:
        return choose_levers(rows, self.plan)[: self.few]

    def _next(self) -> int | None:
        """A lever that may be among the few and is known roughly; the likeliest first."""
        known = self._distinct()
        likely = self._choose([*known, *self.rough.values()])
        for at, row in self.rough.items():
            if row in likely:
                return at
        for at, row in self.rough.items():
            best = _at_best(row)
            if best in self._choose([*known, best]):
                return at
        return None

    def _distinct(self) -> list[Considered]:
        """Of levers that come to the same recipe the first; none that changes nothing."""
        seen: list[Recipe] = [self.chosen.recipe]
        rows: list[Considered] = []
        for _, (row, recipe) in sorted(self.exact.items(), key=lambda item: item[0]):
            if recipe not in seen:
                seen.append(recipe)
                rows.append(row)
        return rows


def _at_best(row: Considered) -> Considered:
    """As it may turn out: smaller, faster, and fitting."""
    total = row.device_total
    return replace(
        row,
        peak_allocated=round(row.peak_allocated * (1 - DOUBT)),
        device_total=None if total is None else round(total * (1 - DOUBT)),
        relative_time=row.relative_time * (1 - DOUBT),
        fits=True,
    )
