"""What a search over a simulated step says of its candidates: in a line, beside the chosen one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec.structs import replace

from memfit.core import units
from memfit.plan.questions.replanned import learns
from memfit.plan.request.meshes import describe_mesh
from memfit.plan.search.candidate import Candidate
from memfit.plan.search.levers import turn
from memfit.plan.simulate.recompute import RecomputedBlocks, describe_recompute
from memfit.records.recipe import Recipe
from memfit.records.results import Considered

SHOWN = 5  # runners-up and rejected ones that a plan keeps


def describe(recipe: Recipe, layers: int) -> str:
    """The knobs that the search turns, in one line."""
    recompute = describe_recompute(RecomputedBlocks.of(recipe), layers)
    loss = f"chunked {recipe.loss_chunk}" if recipe.loss == "chunked" else "plain"
    mesh = "" if recipe.parallel.world == 1 else f", {describe_mesh(recipe.parallel)}"
    stowed = "" if recipe.offload == "none" else f", {recipe.offload} offloaded"
    within = ", updates in backward" if recipe.optimizer.in_backward else ""
    base = f" over {recipe.base_format}" if recipe.coding else ""
    return (
        f"{recipe.method} {recipe.precision}{base}, micro-batch {recipe.micro_batch}, "
        f"recompute {recompute}, loss {loss}{within}{stowed}{mesh}"
    )


def list_considered(chosen: Candidate, tried: list[Candidate]) -> tuple[Considered, ...]:
    """The chosen one, then those that came nearest to it in time, whether they fit or not.

    Of a brief plan the chosen one alone.
    """
    tried = [] if chosen.problem.brief else tried
    own = chosen.recipe.allocator  # decided last, of the chosen one alone
    alike = [replace(c.recipe, allocator=own) == chosen.recipe for c in tried]
    others = {_knobs(c): c for c, same in zip(tried, alike, strict=True) if not same}
    fitting: list[Candidate] = []
    failing: list[Candidate] = []
    for c in _by_time(others.values()):
        found = fitting if c.likely else failing
        if len(found) < SHOWN:
            found.append(c)
        elif len(fitting) == len(failing):
            break
    rows = [chosen, *sorted([*fitting, *failing], key=lambda c: c.seconds)]
    return tuple(_row(c, chosen, because=_reason(c, chosen, lever=False), changes={}) for c in rows)


def _by_time(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """The fastest first; of equally fast ones, which alone are predicted, what needs the least."""
    for _, equal in groupby(sorted(candidates, key=lambda c: c.seconds), key=lambda c: c.seconds):
        own = list(equal)
        yield from own if len(own) == 1 else sorted(own, key=lambda c: c.needs)


def predict_levers(chosen: Candidate) -> tuple[Considered, ...]:
    """The chosen recipe with one knob turned: what each lever saves or costs.

    Another kernel alone is left to the certificate: the estimate knows the chosen one alone.
    """
    assert chosen.memory  # a replay of its own tells what blocks hold beside the closed form
    levers = turn(chosen.problem, chosen.recipe)
    rows = [(_turned(chosen, r), changes) for changes, r in levers if set(changes) != {"attention"}]
    return tuple(
        _row(c, chosen, because=_reason(c, chosen, lever=True), changes=way) for c, way in rows
    )


def _row(
    candidate: Candidate, chosen: Candidate, *, because: str, changes: dict[str, object]
) -> Considered:
    return Considered(
        label=describe(candidate.recipe, candidate.model.architecture.layers),
        changes=changes,
        peak_allocated=candidate.about,
        device_total=candidate.needs,
        exact=candidate.exact,
        relative_time=1.0 if candidate is chosen else candidate.seconds / chosen.seconds,
        fits=candidate.likely,
        chosen=candidate is chosen,
        because=because,
    )


def _reason(candidate: Candidate, chosen: Candidate, *, lever: bool) -> str:
    """Why a candidate was not chosen; a lever turns a knob that the search may have left alone."""
    if candidate is chosen:
        return "the fastest that fits" if chosen.fits else "the nearest miss"
    usable = candidate.problem.usable
    if not candidate.likely and usable is not None:
        over = candidate.needs - usable
        if over <= 0:
            return f"keeps no margin: up to {units.show_bytes(candidate.line - usable)} too much"
        return f"needs {units.show_bytes(over)} more than there is"
    other = (
        " and changes what is learned" if learns(candidate.recipe) != learns(chosen.recipe) else ""
    )
    if candidate.seconds > chosen.seconds:
        return f"fits, {candidate.seconds / chosen.seconds - 1:.1%} slower{other}"
    if candidate.seconds == chosen.seconds:
        return f"fits, equally fast{other}"
    if other:
        return "fits and is faster, but changes what is learned"
    if lever:
        return "fits and is faster, but is not turned unasked"
    return "would be faster, and fits by the estimate but not by the prediction"


def _knobs(candidate: Candidate) -> tuple[object, ...]:
    r = candidate.recipe
    knobs = r.micro_batch, RecomputedBlocks.of(r), r.loss_chunk, r.optimizer.in_backward, r.parallel
    return r.method, r.precision, r.offload, *knobs


def _turned(chosen: Candidate, recipe: Recipe) -> Candidate:
    """With the chosen one's estimate where that still holds."""
    mine = chosen.recipe
    stored = [(r.method, r.precision, r.coding, r.lean) for r in (recipe, mine)]
    if stored[0] != stored[1]:
        return Candidate.of(chosen.problem, recipe)
    names = [n for n in recipe.__struct_fields__ if getattr(recipe, n) != getattr(mine, n)]
    return chosen.but(**{n: getattr(recipe, n) for n in names})
