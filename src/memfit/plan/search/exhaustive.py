"""The search over a step whose bytes are a closed form: arrays of all that a request leaves open.

Every candidate of the space is predicted, memory and time, up to `WHOLE` of them. Of a larger space
those are, of each mesh and batch, that fit with the least recomputing (`fitting`): more recomputing
never makes a step faster, so that the fastest is the same. Nothing is estimated. Where the chosen
candidate alone is needed, and each is simulated by itself, the fastest come first, and what is
slower than one that fits is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from msgspec import structs

from memfit.core import units
from memfit.core.errors import InvalidRequest, MemoryUnknown
from memfit.plan.budget.limits import find_excess, find_unjudged
from memfit.plan.frameworks.shared.columns import find_distinct, pick, take
from memfit.plan.memory.bounds import find_bounds
from memfit.plan.memory.declared import (
    describe_ledger,
    describe_unknown,
    find_on_host,
    find_waiting,
    predict_ledger,
)
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import Problem
from memfit.plan.request.wording import describe, state, words
from memfit.plan.search.candidates import SLICE, Space, span
from memfit.plan.search.choice import Choice, Explorer, Found, assemble
from memfit.plan.search.fitting import find_fitting
from memfit.plan.search.tables import find_front
from memfit.plan.step_time.predicted_time import sum_up, without_training
from memfit.plan.step_time.read import read_setting, time_recipes
from memfit.records.ledger import Ledger
from memfit.records.recipe import Recipe
from memfit.records.request import Request
from memfit.records.results import Considered, Plan

WHOLE = 20_000  # candidates of a space that is predicted whole
SHOWN = 5  # runners-up of other meshes, points of the front, and faster ones that do not fit
MOST_POINTS = 64  # of a slice, before those of other slices are seen


class Point(NamedTuple):
    """One candidate with its two figures."""

    seconds: float  # of a step
    allocated: int  # bytes at the peak
    low: int  # bytes that the device must have, at the least and for certain
    total: int
    high: int
    recipe: Recipe

    @property
    def mesh(self) -> tuple[int, ...]:
        """Its axes, without how a batch is divided."""
        p = self.recipe.parallel
        return p.tp, p.cp, p.pp, p.virtual_pp, p.ep


class Outcome(NamedTuple):
    """What a search found; every list is sorted by seconds."""

    fitting: list[Point]  # the fastest of each mesh
    risky: list[Point]  # that fit at the low end of what is not known, and not at the high one
    front: list[Point]  # that fit: less memory cannot be had in less time
    beyond: list[Point]  # the same of those that do not fit
    smallest: Point  # whose low end is the least
    size: int


class Exhaustive(Explorer):
    """See `Explorer`: every candidate is predicted, in arrays."""

    def find_best(self, problem: Problem) -> Found:
        """See `Explorer.find_best`."""
        if is_lazy(problem):
            try:
                return self._find_best(problem)
            except InvalidRequest:  # of a prediction too: which ones are left is found beforehand
                problem = structs.replace(problem, brief=False)
        return self._find_best(problem)

    def _find_best(self, problem: Problem) -> Found:
        whole = best = explore_all(problem, problem.request.with_batch)
        for fewer in _fewer(whole.request):
            if not best.found.fitting or least_seconds(best, fewer.devices) >= best.chosen.seconds:
                break
            try:
                space = span(fewer, problem.device, predicts=not is_lazy(problem))
            except InvalidRequest:
                continue
            if any_faster(space, problem.usable, best.chosen.seconds):
                best = explore_all(problem, fewer)
        stated = state(best.request, best.chosen.recipe, best.space.framework)
        notes = [
            f"searched: {best.found.size:,} configurations, none left out but by a rule or as"
            " slower"
        ]
        if best is not whole:
            slower = whole.chosen.seconds / best.chosen.seconds
            notes.append(
                f"uses {best.request.devices} of {problem.request.devices} devices: all of them"
                f" take {slower:.2f}x the time"
            )
        restated = structs.replace(problem, request=stated)
        choice = declare(restated)
        plan = assemble(restated, choice, tuple(_rows(best)))
        if excess := find_excess(plan):
            raise excess
        notes = [*plan.assumptions, *notes, *find_unjudged(plan)]
        plan = structs.replace(plan, request=problem.request, assumptions=tuple(notes))
        return Found(plan, choice)

    def find_fitting(self, problem: Problem) -> Found | None:
        """See `Explorer.find_fitting`."""
        found = self.find_best(problem)
        return None if found.plan.memory.verdict in ("does_not_fit", "at_risk") else found

    def predict(self, problem: Problem, *, levers: bool) -> Plan:
        """See `Explorer.predict`; single knobs of these steps have no levers."""
        del levers
        return assemble(problem, declare(problem))


def declare(problem: Problem) -> Choice:
    """The one configuration that a request states, and what its framework's file says of it."""
    recipe, model, left = read_defaults(problem.request, problem.device)
    device, usable = problem.device, problem.usable
    try:
        ledger = predict_ledger(recipe, model, device)
        waiting = find_waiting(recipe, model, device)
        memory = describe_ledger(ledger, recipe, device, usable, waiting)
    except MemoryUnknown as reason:
        ledger, memory = Ledger(entries=()), describe_unknown(usable, str(reason))
    totals = sum_up(model)
    return Choice(
        recipe=recipe, model=model, memory=memory, ledger=ledger,
        totals=without_training(totals) if recipe.adapted else totals,
        on_host=find_on_host(recipe, model, device), assumptions=left,
    )  # fmt: skip


class Explored(NamedTuple):
    """A request's space, searched."""

    request: Request
    space: Space
    usable: int | None
    found: Outcome

    @property
    def chosen(self) -> Point:
        """The fastest that fits; else that may; else the nearest miss."""
        return (self.found.fitting or self.found.risky or [self.found.smallest])[0]


def explore_all(problem: Problem, request: Request) -> Explored:
    """Search the space of a request; raises InvalidRequest where no candidate is left.

    request: the problem's own, or one of it for fewer devices.
    """
    lazy = is_lazy(problem)
    space = span(request, problem.device, predicts=not lazy)
    found = (explore_lazily if lazy else explore)(space, problem.usable)
    return Explored(request, space, problem.usable, found)


def is_lazy(problem: Problem) -> bool:
    """Whether the chosen candidate is enough, and each prediction takes a simulation."""
    return problem.brief and not problem.framework.arrays


def _fewer(request: Request) -> Iterator[Request]:
    """Half of the devices, a quarter, …; none where the mesh is stated.

    A small step may be faster on fewer devices than on all, which talk to one another.
    """
    hardware = request.hardware
    while request.parallel == "auto" and hardware.count * hardware.nodes % 2 == 0:
        name = "count" if hardware.nodes % 2 else "nodes"
        half = getattr(hardware, name) // 2
        if not half or getattr(hardware, name) % 2:
            return
        hardware = structs.replace(hardware, **{name: half})
        yield structs.replace(request, hardware=hardware)


def any_faster(space: Space, usable: int | None, seconds: float) -> bool:
    """Whether a candidate fits and takes less than that.

    Times come first, without recomputing: memory is computed only for rows that are faster so.
    """
    for part in space.parts:
        for own in part.pieces(SLICE):
            recipes = own.choose_none()
            fast = time_recipes(recipes, space.model, space.device) < seconds
            if not fast.any():
                continue
            if usable is None:
                return True
            faster = own.only(fast.nonzero()[0])
            for fitting in find_fitting(space, faster, usable):
                if (time_recipes(fitting, space.model, space.device) < seconds).any():
                    return True
    return False


def least_seconds(explored: Explored, devices: int) -> float:
    """Return a lower bound of a step's seconds on these devices: its products at full speed."""
    space, recipe = explored.space, explored.chosen.recipe
    setting = read_setting(recipe, space.model, space.device)
    machine, rates = setting.machine, setting.rates
    fastest = max(
        machine.products * rates.compute.products, machine.wide_products * rates.compute.head
    )
    totals = sum_up(space.model)
    passes = {"full": 3, "lora": 2}.get(recipe.method, 1)  # frozen blocks may have no backward
    tokens = recipe.global_batch * recipe.sequence_length
    flop = 2.0 * passes * tokens * (sum(totals.dense) + totals.head)
    return float(flop * rates.compute.slowdown / (fastest * devices))


def explore(space: Space, usable: int | None) -> Outcome:
    """Predict every candidate, and keep those that matter."""
    lean = list(leanest(space, usable)) if space.size > WHOLE and usable is not None else []
    if lean:
        found = _gather(lean, usable, space.size)
        faster = list(without_recomputing(space, found.fitting[0].seconds))
        beyond = _gather(faster, usable, space.size).beyond if faster else []
        return found._replace(beyond=beyond)
    return _gather(slices(space), usable, space.size)


def explore_lazily(space: Space, usable: int | None) -> Outcome:
    """As `explore`, of what fits the chosen one alone: nothing is predicted that is slower."""
    import numpy

    parts = [recipes for part in space.parts for recipes in part.slices()]
    seconds = [time_recipes(recipes, space.model, space.device) for recipes in parts]
    bytes_ = [numpy.zeros((4, len(own)), numpy.int64) for own in seconds]
    places = [(own, at, row) for at, every in enumerate(seconds) for row, own in enumerate(every)]
    for _, alike in groupby(sorted(places), itemgetter(0)):
        points: list[Point] = []
        for at, own in groupby(alike, itemgetter(1)):
            rows = [row for _, _, row in own]
            found = _predict(space, take(parts[at], rows), seconds[at][rows])
            bytes_[at][:, rows] = found[1:5]
            points += found.fastest(usable, "fits")
        if points:
            fastest = min(points, key=lambda point: point[:2])
            return Outcome([fastest], [], [], [], fastest, space.size)
    whole = (Slice(*each) for each in zip(parts, *zip(*bytes_, strict=True), seconds, strict=True))
    return _gather(whole, usable, space.size)


def _gather(candidates: Iterable[Slice], usable: int | None, size: int) -> Outcome:
    fitting: dict[tuple[int, ...], Point] = {}
    risky: dict[tuple[int, ...], Point] = {}
    front: list[Point] = []
    beyond: list[Point] = []
    smallest: Point | None = None
    for slice_ in candidates:
        for kind, mine in (("fits", fitting), ("risky", risky)):
            for point in slice_.fastest(usable, kind):
                before = mine.get(point.mesh)
                if before is None or point[:2] < before[:2]:
                    mine[point.mesh] = point
        front = merge(front, slice_.front(usable, "fits"))
        beyond = merge(beyond, slice_.front(usable, "fails"))
        least = slice_.smallest()
        if smallest is None or least.low < smallest.low:
            smallest = least
    assert smallest is not None  # an empty space is an error of `span`

    def ordered(points: dict[tuple[int, ...], Point]) -> list[Point]:
        return sorted(points.values(), key=lambda point: point[:2])

    return Outcome(ordered(fitting), ordered(risky), front, beyond, smallest, size)


def slices(space: Space) -> Iterator[Slice]:
    """Yield all candidates, predicted in batches."""
    return (_predict(space, recipes) for part in space.parts for recipes in part.slices())


def leanest(space: Space, usable: int) -> Iterator[Slice]:
    """Of each row those that fit with the least recomputing."""
    for part in space.parts:
        yield from (_predict(space, recipes) for recipes in find_fitting(space, part, usable))


def without_recomputing(space: Space, seconds: float) -> Iterator[Slice]:
    """Return those that take less without recomputing, whether they fit or not."""
    for part in space.parts:
        for piece in part.pieces(SLICE):
            fast = time_recipes(piece.choose_none(), space.model, space.device) < seconds
            if fast.any():
                yield _predict(space, piece.only(fast.nonzero()[0]).choose_none())


def _predict(space: Space, recipes: Recipe, seconds: Any = None) -> Slice:
    """seconds: of a step, where they are known."""
    peaks = space.framework.measure(space.job(recipes))
    bounds = find_bounds(space.framework, space.device, recipes.parallel, peaks.peak)
    if seconds is None:
        seconds = time_recipes(recipes, space.model, space.device)
    known = (bounds.low, bounds.total, bounds.high)
    low, total, high = (peaks.peak if n is None else n for n in known)
    return Slice(recipes, peaks.allocated, low, total, high, seconds)


class Slice(NamedTuple):
    """Predicted candidates: arrays of equal length, and the recipes that they are of."""

    recipes: Recipe
    allocated: Any
    low: Any
    total: Any
    high: Any
    seconds: Any

    def point(self, row: int) -> Point:
        """One of them."""
        return Point(
            seconds=float(self.seconds[row]), allocated=int(self.allocated[row]),
            low=int(self.low[row]), total=int(self.total[row]), high=int(self.high[row]),
            recipe=pick(self.recipes, int(row)),
        )  # fmt: skip

    def _are(self, usable: int | None, kind: str) -> Any:
        if usable is None:
            return self.low >= 0 if kind == "fits" else self.low < 0
        fits, may = self.high <= usable, self.low <= usable
        return {"fits": fits, "risky": may & ~fits, "fails": ~may}[kind]

    def fastest(self, usable: int | None, kind: str) -> list[Point]:
        """Of each mesh the fastest of those that fit, or that may."""
        import numpy

        rows = numpy.flatnonzero(self._are(usable, kind))
        if not len(rows):
            return []
        rows = rows[numpy.lexsort((self.allocated[rows], self.seconds[rows]))]
        p = self.recipes.parallel
        axes = (p.tp, p.cp, p.pp, p.virtual_pp, p.ep)
        columns = [numpy.broadcast_to(axis, self.seconds.shape)[rows] for axis in axes]
        first = find_distinct(columns, len(rows))[0]
        return [self.point(row) for row in rows[numpy.sort(first)[:MOST_POINTS]]]

    def front(self, usable: int | None, kind: str) -> list[Point]:
        """Those that fit, or do not, of which no other is as fast with less memory."""
        import numpy

        rows = numpy.flatnonzero(self._are(usable, kind))
        best = find_front([self.seconds[rows], self.high[rows]])
        return [self.point(row) for row in rows[best]]

    def smallest(self) -> Point:
        """The one that needs the least memory, the fastest of equals."""
        import numpy

        return self.point(int(numpy.lexsort((self.seconds, self.low))[0]))


def merge(one: list[Point], other: list[Point]) -> list[Point]:
    """The points of two fronts that stay on the common one, fastest first."""
    points: list[Point] = []
    for point in sorted([*one, *other], key=lambda p: (p.seconds, p.high)):
        if not points or point.high < points[-1].high:
            points.append(point)
    return points


def _rows(explored: Explored) -> Iterator[Considered]:
    """The chosen one, the next-best meshes, those with less memory, faster ones that fail."""
    found, chosen, usable = explored.found, explored.chosen, explored.usable
    others = [p for p in found.fitting if p.mesh != chosen.mesh][:SHOWN]
    saving = _spread([p for p in found.front if p.recipe != chosen.recipe])
    failing = _spread([p for p in found.beyond if p.seconds < chosen.seconds])
    shown: dict[Recipe, Point] = {}
    for point in (chosen, *others, *saving, *failing):
        shown.setdefault(point.recipe, point)
    for point in sorted(shown.values(), key=lambda p: p.seconds):
        yield Considered(
            label=describe(point.recipe),
            changes=words(explored.request, point.recipe, explored.space.framework),
            peak_allocated=point.allocated,
            device_total=point.total,
            exact=True,
            relative_time=point.seconds / chosen.seconds,
            fits=usable is None or point.high <= usable,
            chosen=point is chosen,
            because=_reason(point, chosen, usable),
        )


def _spread(front: list[Point]) -> list[Point]:
    """A few points of a front, evenly over its memory."""
    if len(front) <= SHOWN:
        return front
    step = (len(front) - 1) / (SHOWN - 1)
    return [front[round(i * step)] for i in range(SHOWN)]


def _reason(point: Point, chosen: Point, usable: int | None) -> str:
    slower = point.seconds / chosen.seconds - 1
    if point is chosen:
        if usable is None or point.high <= usable:
            return "the fastest that fits"
        return "the fastest that may fit" if point.low <= usable else "the nearest miss"
    if usable is not None and point.low > usable:
        return f"needs {units.show_bytes(point.low - usable)} more than there is"
    if usable is not None and point.high > usable:
        return "fits only at the low end of what is not known"
    if point.total < chosen.total:
        return f"{units.show_bytes(chosen.total - point.total)} less, {slower:.1%} slower"
    return f"fits, {slower:.1%} slower"
