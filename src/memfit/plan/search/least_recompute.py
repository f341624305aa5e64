"""The least recompute under which combinations of the other knobs fit: bisected, then traded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from memfit.plan.memory.predicted_memory import predict_update
from memfit.plan.search.candidate import Candidate
from memfit.plan.simulate.recompute import RecomputedBlocks

NOTHING = RecomputedBlocks(0, 0)
# seconds that an entry takes at least; whether they are what it takes; where it was listed
_Key = tuple[float, bool, int]


class Climb(NamedTuple):
    """A combination with the least recompute of one path under which it is likely to fit."""

    candidate: Candidate
    path: list[RecomputedBlocks]
    rung: int  # of the path


def climb(plain: Candidate, path: list[RecomputedBlocks]) -> Climb | None:
    """The least on one path; None where not even the most is likely to fit."""
    if plain.likely:
        return Climb(plain, path, 0)
    top = len(path) - 1
    if top == 0 or not plain.but(**path[top].knobs).likely:
        return None
    rung = first_rung(top, lambda n: plain.but(**path[n].knobs).likely)
    return Climb(plain.but(**path[rung].knobs), path, rung)


def first_rung(top: int, fits: Callable[[int], bool], low: int = 0) -> int:
    """The first rung above `low` that fits, as `top` does: memory falls with each."""
    while top - low > 1:
        middle = (low + top) // 2
        if fits(middle):
            top = middle
        else:
            low = middle
    return top


def settle(least: Climb) -> Candidate | None:
    """The first rung by the prediction itself, from where the estimate says."""
    path, rung, top = least.path, least.rung, len(least.path) - 1
    made: dict[int, Candidate] = {}

    def exact(n: int) -> Candidate:
        if n not in made:
            made[n] = least.candidate.but(**path[n].knobs)
            made[n].estimate = None
        return made[n]

    def fits(n: int) -> bool:
        return exact(n).fits

    if fits(rung):
        return exact(rung if rung == 0 or not fits(rung - 1) else first_rung(rung - 1, fits, -1))
    if rung == top or not fits(top):
        return None
    return exact(first_rung(top, fits, rung))


def anchor(best: Candidate) -> None:
    """Shift its estimate to its prediction."""
    r = best.recipe
    if best.estimate is not None:
        peak = predict_update(best.model, r, best.problem.device) if r.samples else best.peak
        best.estimate.anchor(peak, r.micro_batch, RecomputedBlocks.of(r), r.loss_chunk)


def trade(best: Candidate) -> Candidate:
    """The fastest of all pairs of whole and selective blocks at the chosen micro-batch and loss.

    The paths end within one block of it: for each number of whole blocks that could be faster, the
    fewest selective ones that fit. The anchored estimate asks, the prediction decides.
    """
    layers, plain = best.model.architecture.layers, best
    for full in range(layers + 1):
        if plain.but(**RecomputedBlocks(full, 0).knobs).seconds >= best.seconds:
            break

        def pair(n: int, full: int = full) -> Candidate:
            return plain.but(**RecomputedBlocks(full, n).knobs)

        most = layers - full
        if not pair(most).likely:
            continue
        fewest = 0 if pair(0).likely else first_rung(most, lambda n: pair(n).likely)
        for n in range(max(0, fewest - 1), min(most, fewest + 1) + 1):
            exact = pair(n)
            exact.estimate = None
            if exact.seconds < best.seconds and exact.fits:
                exact.estimate = plain.estimate
                best = exact
                break
    return best


def settle_fastest(
    start: Candidate, ranked: Iterable[Climb], slowest: float, *, trades: bool
) -> Candidate | None:
    """The fastest of these that fits, each with the least recompute; faster than `slowest`.

    ranked: the fastest first; it is read as far as they are fast enough.
    """
    best: Candidate | None = None
    for least in ranked:
        if least.candidate.seconds >= slowest:
            break
        found = settle(least)
        if found is not None and found.seconds < slowest:
            best, slowest = found, found.seconds
    if best is not None:
        # its levers need no more than that; offloaded, it is another simulation
        best.estimate = start.estimate if best.recipe.offload == "none" else None
        anchor(best)
        if trades:
            best = trade(best)
            anchor(best)
    return best


class Ranking:
    """Combinations of the exact knobs, the fastest first, each looked at when its turn comes.

    Recomputing never makes a step faster, so that a combination which is slower than the best found
    even without what it has to recompute needs no estimate of how much that is. Of equals the one
    that is listed first comes first.
    """

    def __init__(
        self, combinations: Sequence[Candidate], paths: Sequence[list[RecomputedBlocks]]
    ) -> None:
        self._pairs = [(plain, path) for plain in combinations for path in paths]
        self._climbed: dict[int, Climb | None] = {}  # by place in the list
        self._found: list[Climb] = []  # so far, in the order of seconds
        self._waiting: list[_Key] = [
            (plain.seconds, False, at) for at, (plain, _) in enumerate(self._pairs)
        ]
        heapify(self._waiting)
        self._bounded: set[int] = set()
        self._bounds: dict[
            int, int
        ] = {}  # rungs below which nothing fits, where it is not the first
        # of replays before this mesh: later ones tell of their own combination
        self._value = combinations[0].ratio.value if combinations else 0.0

    def __iter__(self) -> Iterator[Climb]:
        at = 0
        while at < len(self._found) or self._find_next():
            yield self._found[at]
            at += 1

    def listed(self) -> list[Climb]:
        """All of them, in the order of the list."""
        found = (self._climb(at) for at in range(len(self._pairs)))
        return [one for one in found if one is not None]

    def _find_next(self) -> bool:
        """Find the next one in the order of seconds; False where there is none."""
        while self._waiting:
            _, known, at = heappop(self._waiting)
            if known:
                one = self._climbed[at]
                assert one is not None
                self._found.append(one)
                return True
            self._look_at(at)
        return False

    def _look_at(self, at: int) -> None:
        """Put an entry back with more seconds, or with its own; drop it where nothing fits."""
        plain, path = self._pairs[at]
        if at not in self._bounded and at not in self._climbed:
            self._bounded.add(at)
            least = self._bound(at)
            if least is None:
                self._climbed[at] = None
                return
            if least > 0:
                self._bounds[at] = least
                seconds = plain.but(**path[least].knobs).seconds
                heappush(self._waiting, (seconds, False, at))
                return
        one = self._climb(at)
        if one is not None:
            heappush(self._waiting, (one.candidate.seconds, True, at))

    def _climb(self, at: int) -> Climb | None:
        if at not in self._climbed:
            plain, path = self._pairs[at]
            with plain.ratio.at(self._value):
                rough = plain.problem.rough
                if rough and at in self._bounds and self._fits_at_top(at):
                    bound = plain.but(**path[self._bounds[at]].knobs)
                    bound.note_estimate(self._least_peak(at, self._bounds[at]))
                    self._climbed[at] = Climb(bound, path, self._bounds[at])
                else:
                    self._climbed[at] = climb(plain, path)
        return self._climbed[at]

    def _bound(self, at: int) -> int | None:
        """The rung of a path below which nothing is likely to fit; None where nothing is.

        What is surely likely on rung 0 is noted as such: that takes no other estimate.
        """
        plain, path = self._pairs[at]
        recipe, estimate = plain.recipe, plain.estimate
        rough = plain.problem.rough
        if estimate is None or recipe.samples:
            return 0
        if rough and path == [(plain.model.architecture.layers, 0)]:
            found = estimate.alike(recipe.micro_batch, recipe.loss_chunk, "recomputed")
            plain.note_estimate(found.peak)
        if path[0] != NOTHING or len(path) == 1:
            return 0
        found = estimate.alike(recipe.micro_batch, recipe.loss_chunk)

        def may_fit(rung: int) -> bool:
            return plain.may_fit(self._least_peak(at, rung))

        with plain.ratio.at(self._value):
            if may_fit(0):
                if plain.may_fit(round(found.peak + (0 if rough else found.saved))):
                    self._climbed[at] = Climb(plain, path, 0)
                    if rough:
                        plain.note_estimate(found.peak)
                return 0
            top = len(path) - 1
            return first_rung(top, may_fit) if may_fit(top) else None

    def _least_peak(self, at: int, rung: int) -> int:
        """Bytes that no estimate of this rung is below."""
        plain, path = self._pairs[at]
        assert plain.estimate is not None
        found = plain.estimate.alike(plain.recipe.micro_batch, plain.recipe.loss_chunk)
        return round(found.peak - (1 + sum(path[rung])) * found.saved)

    def _fits_at_top(self, at: int) -> bool:
        """Whether a path ends with all blocks recomputed, and is likely to fit there."""
        plain, path = self._pairs[at]
        top = plain.but(**path[-1].knobs)
        if plain.estimate is None or path[-1] != (plain.model.architecture.layers, 0):
            return False
        r = plain.recipe
        top.note_estimate(plain.estimate.alike(r.micro_batch, r.loss_chunk, "recomputed").peak)
        return top.likely
