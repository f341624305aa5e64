"""A step's segments as formulas of its rows and tokens: simulated once, evaluated for any shape.

A recording over unknown sizes (`meta.unknown`) holds for every shape under which the same
operations run. What a segment adds is then linear in a few products of the unknowns (1, rows x
tokens, rows x tokens squared, …) and, on CUDA, in what each distinct block is larger than its
tensor, which is not linear and is worked out for each shape. Of the instants of a segment only
those stay that are the highest for some shape. Nothing is fitted or interpolated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from memfit.meta.meter import block_size
from memfit.meta.unknown import Monomial, Number, Size, Unknowns, example, terms_of, value_at
from memfit.plan.simulate.blocks import ROUNDING, Part, Parts, record
from memfit.plan.simulate.segments import Passes, Segment, simulate
from memfit.plan.simulate.setting import Batch, Mark, Recording, Setting
from memfit.records.ledger import Kind

MOST_FORMS = 64  # of one setting
Vector = dict[int, int]  # what is in the basis, by index -> coefficient
Form = tuple[tuple[int, int], ...]  # the same, sorted, without zeros
ByPart = dict[tuple[Part, int], int]
Pairs = list[tuple[int, int]]  # index -> coefficient
Step = tuple[int, Number, Number, Kind, str]  # a birth (1) or a death (-1): bytes, count, part
Candidate = tuple[int, Vector, ByPart]  # an instant: its height in the example, its level, by part


class Rest(NamedTuple):
    """By how much `times` blocks are larger than their tensors of `nbytes`."""

    nbytes: Size
    times: Number


class Instant(NamedTuple):
    """A moment of a segment that is its highest for some shape; numbers are forms' indices."""

    rise: int
    top: tuple[tuple[Part, int], ...]


class Stretch(NamedTuple):
    """A segment before its shape is known; numbers are forms' indices."""

    net: tuple[tuple[Part, int], ...]
    instants: tuple[Instant, ...]  # in the order of time


class Named(NamedTuple):
    """Which stretch a segment is."""

    name: str
    stretch: int


class Answers:
    """The passes of one setting for every shape, simulated anew only where it must be.

    A first shape may be the only one, and plain numbers are several times faster to simulate; from
    the second on (after `plain` of them), what is simulated answers for other shapes too.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        # the newest first; replaced and never changed, as another thread may be reading it
        self.forms: tuple[ClosedForm, ...] = ()
        self._likely: dict[tuple[int, int], ClosedForm] = {}  # by binary digits: where to begin
        self._plain: dict[Batch, list[Passes]] = {}

    def passes(
        self, batch: Batch, general: Callable[[int, int], Batch], *, plain: int = 1
    ) -> list[Passes]:
        """Of the first micro-batch and of a later one; general: the batch of other sizes."""
        if len(self._plain) < plain and batch not in self._plain:
            self._plain[batch] = simulate(self.setting, batch)
        if batch in self._plain:
            return self._plain[batch]
        magnitude = batch.rows.bit_length(), batch.tokens.bit_length()
        likely = self._likely.get(magnitude)
        for form in self.forms if likely is None else (likely, *self.forms):
            values = form.fit(batch)
            if values is not None:
                self._likely[magnitude] = form
                return form.at(values)
        unknowns = Unknowns(batch.rows, batch.tokens)
        wide = general(unknowns[0], unknowns[1])
        form = ClosedForm(record(self.setting, wide), unknowns, wide)
        self.forms = (form, *self.forms[: MOST_FORMS - 1])
        return form.at(unknowns.examples)


@lru_cache(maxsize=256)
def find_answers(setting: Setting) -> Answers:
    """Cached closed forms of one setting."""
    return Answers(setting)


class Basis:
    """What every form is linear in: products of unknowns, and what blocks are larger."""

    def __init__(self, unknowns: Unknowns) -> None:
        self.unknowns = unknowns
        self.keys: list[Monomial | Rest] = []
        self._positive: list[bool] = []  # of each key: whether it is 1 or more for any shape
        self._index: dict[Monomial | Rest, int] = {}

    def of(self, key: Monomial | Rest) -> int:
        """The index of a product, or of the rests of blocks."""
        if key not in self._index:
            self._index[key] = len(self.keys)
            self.keys.append(key)
            self._positive.append(not isinstance(key, Rest) and self.unknowns.positive(key))
        return self._index[key]

    def tensor(self, nbytes: Number) -> list[tuple[int, int]]:
        """Bytes in the basis: (index, coefficient)."""
        return [(self.of(monomial), c) for monomial, c in terms_of(nbytes)]

    def rest(self, nbytes: Number, count: Number) -> list[tuple[int, int]]:
        """Return by how much this number of CUDA blocks is larger than its tensors."""
        if isinstance(nbytes, Size):
            return [(self.of(Rest(nbytes, count)), 1)]
        return self.tensor(count * (block_size(nbytes) - nbytes))

    def surely(self, difference: Vector) -> bool:
        """Whether tensors differ by nothing or more for any shape."""
        least = 0
        for index, coefficient in difference.items():
            if coefficient:
                key = self.keys[index]
                if isinstance(key, Rest) or (coefficient < 0 and key):
                    return False
                if self._positive[index]:
                    least += coefficient
        return least >= 0

    def evaluate(self, values: list[int]) -> list[int]:
        """The basis under these values of the unknowns."""
        found = []
        for key in self.keys:
            if isinstance(key, Rest):
                nbytes = key.nbytes.at(values)
                found.append((block_size(nbytes) - nbytes) * value_at(key.times, values))
            else:
                found.append(prod(values[i] for i in key))
        return found


class ClosedForm:
    """The segments of a recording, and the conditions under which they hold."""

    def __init__(self, recording: Recording, unknowns: Unknowns, batch: Batch) -> None:
        self.unknowns, self.batch = unknowns, batch
        self.basis = Basis(unknowns)
        self.forms: dict[Form, int] = {}
        self.stretches: dict[Stretch, int] = {}
        self._made: dict[tuple[Number, Number], tuple[int, Pairs, Pairs]] = {}
        self._followed: dict[tuple[Step, ...], Stretch] = {}
        self.passes = [self._cut(recording, marks) for marks in recording.passes]
        self._made.clear()  # only while cutting
        self._followed.clear()

    def fit(self, batch: Batch) -> list[int] | None:
        """The unknowns of a micro-batch; None when other operations would run."""
        values = self.unknowns.evaluate(batch.rows, batch.tokens)
        if values is None or not self._same_documents(batch, values):
            return None
        return values

    def _same_documents(self, batch: Batch, values: list[int]) -> bool:
        mine, requested = self.batch.documents, batch.documents
        if mine is None or requested is None:
            return mine is requested
        return tuple(value_at(n, values) for n in mine) == requested

    def at(self, values: list[int]) -> list[Passes]:
        """The passes of one shape: of the first micro-batch, and of a later one."""
        found = self.basis.evaluate(values)
        amounts = [sum(c * found[i] for i, c in form) for form in self.forms]
        made = [_fill(stretch, amounts) for stretch in self.stretches]
        return [
            Passes(*([Segment(name, *made[number]) for name, number in part] for part in parts))
            for parts in self.passes
        ]

    def _cut(self, recording: Recording, marks: list[Mark]) -> list[list[Named]]:
        """Forward, loss and backward."""
        parts: dict[str, list[Named]] = {"": [], "loss": [], "head": []}
        part = ""
        for mark, until in pairwise(marks):
            part = mark.name if mark.name in parts else part
            stretch = self._stretch(recording, mark, until)
            number = self.stretches.setdefault(stretch, len(self.stretches))
            parts[part].append(Named(mark.name, number))
        return list(parts.values())

    def _stretch(self, recording: Recording, mark: Mark, until: Mark) -> Stretch:
        """Follow the log from one mark to the next; blocks alike are followed once."""
        meter = recording.meter
        requested, counts, kinds, owners = meter.requested, meter.counts, meter.kinds, meter.owners
        steps = tuple(
            (1, requested[i], counts[i], kinds[i], owners[i])
            if i >= 0
            else (-1, requested[~i], counts[~i], kinds[~i], owners[~i])
            for i in meter.events[mark.event : until.event]
        )
        found = self._followed.get(steps)
        if found is None:
            found = self._followed[steps] = self._follow(steps, cuda=meter.cuda)
        return found

    def _follow(self, steps: tuple[Step, ...], *, cuda: bool) -> Stretch:
        """What they add, and the instants that can be highest."""
        level: Vector = {}
        parts: ByPart = {}
        height = 0  # of the level, in the example
        candidates: list[Candidate] = [(0, {}, {})]
        for number, (sign, nbytes, count, kind, owner) in enumerate(steps, start=1):
            if (nbytes, count) not in self._made:
                self._made[nbytes, count] = self._storage(nbytes, count, cuda=cuda)
            size, tensor, rest = self._made[nbytes, count]
            part = kind, owner
            height += sign * size
            for at, coefficient in tensor:
                level[at] = level.get(at, 0) + sign * coefficient
                parts[part, at] = parts.get((part, at), 0) + sign * coefficient
            for at, coefficient in rest:
                parts[ROUNDING, at] = parts.get((ROUNDING, at), 0) + sign * coefficient
            falls = number == len(steps) or steps[number][0] < 0
            if sign > 0 and falls and count == 1:
                self._keep(candidates, (height, level, parts))
        instants = tuple(
            Instant(self._form(level), self._by_part(parts)) for _, level, parts in candidates
        )  # fmt: skip
        return Stretch(self._by_part(parts), instants)

    def _storage(self, nbytes: Number, count: Number, *, cuda: bool) -> tuple[int, Pairs, Pairs]:
        """Its bytes in the example; in the basis; and what its blocks are larger."""
        rest = self.basis.rest(nbytes, count) if cuda else []
        return example(nbytes * count), self.basis.tensor(nbytes * count), rest

    def _keep(self, candidates: list[Candidate], new: Candidate) -> None:
        """Add an instant that may be the highest; drop those that it is higher than everywhere.

        Of equal ones the first stays. What is lower in the example is not higher everywhere.
        """
        height, level, parts = new
        others = []
        for earlier in candidates:
            if earlier[0] >= height and self._over(earlier[1], level):
                return
            if height < earlier[0] or not self._over(level, earlier[1]):
                others.append(earlier)
        candidates[:] = [*others, (height, dict(level), dict(parts))]

    def _over(self, high: Vector, low: Vector) -> bool:
        """Whether it is at least as high for any shape."""
        difference = dict(high)
        for index, coefficient in low.items():
            difference[index] = difference.get(index, 0) - coefficient
        return self.basis.surely(difference)

    def _form(self, vector: Vector) -> int:
        nonzero = tuple(sorted((i, c) for i, c in vector.items() if c))
        return self.forms.setdefault(nonzero, len(self.forms))

    def _by_part(self, parts: ByPart) -> tuple[tuple[Part, int], ...]:
        vectors: dict[Part, Vector] = {}
        for (part, at), coefficient in parts.items():
            if coefficient:
                vectors.setdefault(part, {})[at] = coefficient
        return tuple((part, self._form(vector)) for part, vector in vectors.items())


def _fill(stretch: Stretch, amounts: list[int]) -> tuple[Parts, int, Parts]:
    """A segment without its name, at the highest of its instants (the first of equal ones)."""
    highest = max(stretch.instants, key=lambda instant: amounts[instant.rise])
    net = {part: amounts[form] for part, form in stretch.net}
    top = {part: amounts[form] for part, form in highest.top}
    return net, amounts[highest.rise], top
