"""Peaks of a deep model from traces of shallow ones, for sweeps over many recipes.

Blocks of one kind allocate and free alike, so a deeper model's tape is a shallower one's with the
same stretches of events inserted repeatedly. Two tapes that differ by one block show where and
which; a third, two blocks deeper, must come out event by event, or the model is refused. The deep
tape is then written down and its peaks are read off it, wherever they lie: a line through the
peaks of two depths is wrong as soon as a peak moves to another moment.

Live bytes alone. What the caching allocator reserves depends on addresses, and is never
extrapolated: certify the recipe for that.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from memfit.certify.tracing.recorder import Trace
from memfit.certify.tracing.runs import find_runs, with_runs
from memfit.certify.tracing.trace_step import trace_step
from memfit.core.errors import NotCertified
from memfit.records.hardware import Device
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Recipe

SHALLOW = 3  # blocks of one kind in the shallowest trace: a first, a last and one between
CHECKED = 2  # blocks more in the trace that must come out
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


Signed = tuple[int, ...]  # bytes, allocated or freed


class Token(NamedTuple):
    """One event of a tape, named so that alike blocks have alike tokens."""

    sign: int  # +1 allocated, -1 freed
    op: str
    module: str  # without the block's number
    kind: Kind
    nbytes: int | None  # None where it depends on the depth


Events = Sequence[tuple[Token, int]]  # with their signed bytes


class Insertion(NamedTuple):
    """What one more block of a kind adds before a position of the shallow tape."""

    position: int
    kind: int
    parts: tuple[Signed, ...]  # two more blocks add the first part twice, then the next twice, …


class Stretch(NamedTuple):
    """One stretch of the shallow tape, and what a block of each kind adds to it."""

    nbytes: Signed
    slopes: tuple[Signed, ...]  # for each kind: bytes that one block adds to each event
    insertions: tuple[Insertion, ...]  # by position

    def at(self, more: Sequence[int]) -> list[int]:
        """Return signed bytes of the tape with `more` blocks of each kind added."""
        sized = [
            n + sum(m * slope[i] for m, slope in zip(more, self.slopes, strict=True))
            for i, n in enumerate(self.nbytes)
        ]
        found: list[int] = []
        last = 0
        for position, kind, parts in self.insertions:
            found += sized[last:position]
            last = position
            for part in parts:
                found += part * more[kind]
        return found + sized[last:]


def sweep(recipes: Iterable[Recipe], device: Device) -> list[dict[Phase, int]]:
    """Each recipe's peak of live bytes (tensors and workspaces, unrounded) in every phase.

    Equal to `trace(recipe, device).phases`, in a fraction of its time for deep models.
    Raises NotCertified where the blocks are not alike, and what `trace` raises.
    """
    known: dict[str, Trace] = {}
    return [peaks(recipe, device, known) for recipe in recipes]


def peaks(
    recipe: Recipe, device: Device, known: dict[str, Trace] | None = None
) -> dict[Phase, int]:
    """One recipe's peaks; `known` keeps the shallow traces, by their recipes' digests."""
    known = {} if known is None else known
    runs = find_runs(recipe)
    long = [i for i, n in enumerate(runs) if n > SHALLOW + CHECKED]
    if not long:
        return dict(_trace(recipe, device, known).phases)

    def shallow(*more: int) -> Trace:
        added = dict(zip(long, more, strict=True))
        lengths = [SHALLOW + added[i] if i in added else n for i, n in enumerate(runs)]
        return _trace(with_runs(recipe, lengths), device, known)

    base = shallow(*[0] * len(long))
    deeper = [shallow(*[int(i == k) for i in range(len(long))]) for k in range(len(long))]
    deepest = shallow(*[CHECKED] * len(long))
    stretches = _learn(base, deeper, deepest)
    _check(stretches, [CHECKED] * len(long), deepest, recipe)
    more = [runs[i] - SHALLOW for i in long]
    return _peaks(base.stretches, [stretch.at(more) for stretch in stretches])


def _trace(recipe: Recipe, device: Device, known: dict[str, Trace]) -> Trace:
    if recipe.digest not in known:
        known[recipe.digest] = trace_step(recipe, device)
    return known[recipe.digest]


def _tokens(trace: Trace) -> list[list[tuple[Token, int]]]:
    """For each stretch its events, as tokens and as signed bytes."""
    names: dict[int, Token] = {}
    found: list[tuple[Token, int]] = []
    for event in trace.tape:
        if event.nbytes > 0:
            tensor = trace.tensor(event.tensor)
            module = _NUMBER.sub(".*", tensor.module)
            names[event.tensor] = Token(1, tensor.op, module, Kind(tensor.kind), event.nbytes)
            found.append((names[event.tensor], event.nbytes))
        elif event.nbytes < 0:  # streams that meet: no tensor comes or goes
            found.append((Token(0, "", "", Kind.TEMPORARY, event.nbytes), 0))
        else:
            token = names.pop(event.tensor)
            found.append((token._replace(sign=-1), -(token.nbytes or 0)))
    edges = [0, *trace.marks, len(found)]
    return [found[a:b] for a, b in pairwise(edges)]


def _learn(base: Trace, deeper: Sequence[Trace], deepest: Trace) -> list[Stretch]:
    """What each deeper tape, by one block of one kind, adds to the base."""
    tapes = [_tokens(trace) for trace in (base, *deeper, deepest)]
    found = []
    for shallow, *others, last in zip(*tapes, strict=True):
        want = [n for _, n in last]
        stretch = _learn_stretch(shallow, others, want, turned=False)
        if stretch.at([CHECKED] * len(others)) != want:
            stretch = _learn_stretch(shallow, others, want, turned=True)
        found.append(stretch)
    return found


def _learn_stretch(
    shallow: Events, deeper: Sequence[Events], deepest: Sequence[int], *, turned: bool
) -> Stretch:
    """turned: compare from the end, which finds other places where events may have been put in."""
    compared = [_compare(shallow, other, kind, turned) for kind, other in enumerate(deeper)]
    added = sorted(insertion for _, insertions in compared for insertion in insertions)
    return Stretch(
        nbytes=tuple(n for _, n in shallow),
        slopes=tuple(slopes for slopes, _ in compared),
        insertions=tuple(_arrange(added, tuple(deepest))),
    )


def _compare(
    shallow: Events, deep: Events, kind: int, turned: bool
) -> tuple[Signed, list[Insertion]]:
    """(bytes that each event grows by, events put in). NotCertified when events are missing."""
    in_shallow, in_deep = Counter(t for t, _ in shallow), Counter(t for t, _ in deep)
    # A size that only one of the two tapes has depends on the depth, such as a list of all norms.
    a = [t if t in in_deep else t._replace(nbytes=None) for t, _ in shallow]
    b = [t if t in in_shallow else t._replace(nbytes=None) for t, _ in deep]
    slopes = [0] * len(a)
    added: list[tuple[int, deque[tuple[Token, int]]]] = []
    for tag, a0, a1, b0, b1 in _differences(a, b, turned):
        if tag == "equal":
            for i, j in zip(range(a0, a1), range(b0, b1), strict=True):
                slopes[i] = deep[j][1] - shallow[i][1]
        elif tag == "insert":
            _add(added, a0, deque(zip(b[b0:b1], (n for _, n in deep[b0:b1]), strict=True)), a)
        else:
            raise NotCertified(
                "a model with one block more does not hold all that the shallower one holds, so"
                f" the depth cannot be extrapolated ({a[a0]} is missing)",
                hint="certify the recipe in full",
            )
    insertions = [Insertion(i, kind, (tuple(n for _, n in events),)) for i, events in added]
    return tuple(slopes), insertions


def _add(
    added: list[tuple[int, deque[tuple[Token, int]]]],
    position: int,
    events: deque[tuple[Token, int]],
    a: Sequence[Token],
) -> None:
    """Add an insertion as far to the left as it can be, joined with the one that it meets there.

    Before an event that equals its last one, an insertion turned by that event says the same.
    """
    floor = added[-1][0] if added else 0
    while position > floor and a[position - 1] == events[-1][0] and events[-1][0].nbytes:
        events.rotate(1)
        position -= 1
    if added and position == floor:
        added[-1][1].extend(events)
    else:
        added.append((position, events))


def _differences(
    a: Sequence[Token], b: Sequence[Token], turned: bool
) -> Sequence[tuple[str, int, int, int, int]]:
    """difflib's opcodes, from the start or from the end."""
    if not turned:
        return list(SequenceMatcher(None, a, b, autojunk=False).get_opcodes())
    codes = SequenceMatcher(None, a[::-1], b[::-1], autojunk=False).get_opcodes()
    n, m = len(a), len(b)
    return [(tag, n - a1, n - a0, m - b1, m - b0) for tag, a0, a1, b0, b1 in reversed(codes)]


def _arrange(added: Sequence[Insertion], deepest: Signed) -> list[Insertion]:
    """Where two repeated runs meet, one insertion holds the end of one and the start of the other,

    and two kinds may meet in either order: the tape with `CHECKED` more blocks tells.
    """
    found: list[Insertion] = []
    last = cursor = 0
    for position, group in groupby(added, key=lambda insertion: insertion.position):
        here = list(group)
        cursor += position - last
        last = position
        length = CHECKED * sum(len(insertion.parts[0]) for insertion in here)
        seen = deepest[cursor : cursor + length]
        cursor += length
        found += _cut_all(here, seen) or _cut_all(here[::-1], seen) or here
    return found


def _cut_all(insertions: Sequence[Insertion], seen: Signed) -> list[Insertion] | None:
    """The insertions in this order, cut so that they give what was seen; None if none do."""
    found = []
    for insertion in insertions:
        length = CHECKED * len(insertion.parts[0])
        parts = _cut(insertion.parts[0], seen[:length])
        if parts is None:
            return None
        found.append(insertion._replace(parts=parts))
        seen = seen[length:]
    return found


def _cut(whole: Signed, seen: Signed) -> tuple[Signed, ...] | None:
    """Parts of `whole` that, each repeated `CHECKED` times, give `seen`."""
    if whole * CHECKED == seen:
        return (whole,) if whole else ()
    for length in range(1, len(whole)):
        if whole[:length] * CHECKED == seen[: CHECKED * length]:
            rest = _cut(whole[length:], seen[CHECKED * length :])
            if rest is not None:
                return (whole[:length], *rest)
    return None


def _check(stretches: Sequence[Stretch], more: Sequence[int], real: Trace, recipe: Recipe) -> None:
    """Raise NotCertified unless the extrapolated tape is the traced one, event by event."""
    for phase, stretch, traced in zip(real.stretches, stretches, _tokens(real), strict=True):
        if stretch.at(more) != [n for _, n in traced]:
            raise NotCertified(
                f"the blocks of `{recipe.model.name}` do not repeat in {phase}, so the depth"
                " cannot be extrapolated",
                hint="certify the recipe in full",
            )


def _peaks(phases: Sequence[Phase], tapes: Sequence[Sequence[int]]) -> dict[Phase, int]:
    """The highest sum of each phase's stretches."""
    live, found = 0, dict[Phase, int]()
    for phase, tape in zip(phases, tapes, strict=True):
        sums = list(accumulate(tape, initial=live))
        found[phase] = max(found.get(phase, 0), *sums)
        live = sums[-1]
    return {phase: found[phase] for phase in Phase if phase in found}
