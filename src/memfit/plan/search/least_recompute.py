"""The least recompute under which combinations of the other knobs fit: bisected, then traded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memfit.plan.memory.predicted_memory import predict_update
from memfit.plan.search.candidate import Candidate
from memfit.plan.simulate.recompute import RecomputedBlocks


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
    rung = _first(top, lambda n: plain.but(**path[n].knobs).likely)
    return Climb(plain.but(**path[rung].knobs), path, rung)


def _first(top: int, fits: Callable[[int], bool], low: int = 0) -> int:
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
        return exact(rung if rung == 0 or not fits(rung - 1) else _first(rung - 1, fits, -1))
    if rung == top or not fits(top):
        return None
    return exact(_first(top, fits, rung))


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
        fewest = 0 if pair(0).likely else _first(most, lambda n: pair(n).likely)
        for n in range(max(0, fewest - 1), min(most, fewest + 1) + 1):
            exact = pair(n)
            exact.estimate = None
            if exact.seconds < best.seconds and exact.fits:
                exact.estimate = plain.estimate
                best = exact
                break
    return best


def settle_fastest(
    start: Candidate, ranked: list[Climb], slowest: float, *, trades: bool
) -> Candidate | None:
    """The fastest of these that fits, each with the least recompute; faster than `slowest`."""
    best: Candidate | None = None
    for least in sorted(ranked, key=lambda c: c.candidate.seconds):
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
