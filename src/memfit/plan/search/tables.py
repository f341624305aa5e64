"""Tables of candidates, numpy arrays of equal length by name: the rules that thin them out, and
the front of those that no other one beats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import Rule
from memfit.plan.frameworks.shared.columns import take

Columns = dict[str, Any]  # arrays of equal length


class Removed(NamedTuple):
    """A rule that left candidates out: how many, and what it says of the first."""

    rule: str
    number: int
    sentence: str
    hint: str

    def more(self, number: int) -> Removed:
        """The same rule, after it has left out further candidates."""
        return self._replace(number=self.number + number)


def length(table: Columns) -> int:
    """Rows of a table."""
    return len(next(iter(table.values())))


def take_rows(table: Columns, rows: Any) -> Columns:
    """Those rows of every column: an index array, truths, or a slice."""
    return {name: column[rows] for name, column in table.items()}


def cross(table: Columns, name: str, values: Sequence[int]) -> Columns:
    """Every row with every value of another column."""
    import numpy

    rows = length(table)
    found = {key: numpy.repeat(column, len(values)) for key, column in table.items()}
    return {**found, name: numpy.tile(numpy.array(values), rows)}


def cross_each(
    table: Columns, name: str, of: Any, list_values: Callable[[int], Sequence[int]]
) -> Columns:
    """Every row with every value of another column, which are those of its own number in `of`."""
    import numpy

    numbers, which = numpy.unique(of, return_inverse=True)
    values = [numpy.array(list_values(int(number))) for number in numbers]
    sizes = numpy.array([len(own) for own in values])
    rows = numpy.repeat(numpy.arange(len(of)), sizes[which])
    counts = sizes[which]
    order = numpy.arange(len(rows)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
    starts = (numpy.cumsum(sizes) - sizes)[which][rows]
    return {**take_rows(table, rows), name: numpy.concatenate(values)[starts + order]}


def keep(table: Columns, rules: Sequence[Rule], removed: dict[str, Removed]) -> Columns:
    """The rows that break no rule; raises InvalidRequest when none is left."""
    right = find_right(table, rules, removed)
    if not right.any():
        refuse(removed)
    return table if right.all() else take_rows(table, right)


def find_right(table: Columns, rules: Sequence[Rule], removed: dict[str, Removed]) -> Any:
    """Which rows break no rule, as truths; the rules that some do are noted in `removed`."""
    import numpy

    right = numpy.ones(length(table), bool)
    for rule in rules:
        broken = right & rule.broken
        count = int(broken.sum())
        if count:
            first = take(rule.values, broken.argmax())
            removed_row = Removed(rule.name, 0, rule.says.format(*first), rule.hint)
            note(removed, removed_row, count)
            right &= ~broken
    return right


def note(removed: dict[str, Removed], removed_row: Removed, count: int) -> None:
    """Add the rows that a rule has left out; the last rule noted stands last."""
    removed[removed_row.rule] = removed.pop(removed_row.rule, removed_row).more(count)


def refuse(removed: dict[str, Removed]) -> NoReturn:
    """Raise InvalidRequest with the sentence of the rule that left out the last candidate."""
    last = list(removed.values())[-1]
    raise InvalidRequest(last.sentence, hint=last.hint)


def find_front(columns: Sequence[Any]) -> Any:
    """Rows that no other row equals or beats in every column; all columns are to be small.

    columns: arrays of equal length, of numbers; a NaN, which is unknown, is beaten by every number.
    Rows come back as an index array, sorted by the first column, then by the next. Of rows that are
    equal in all columns the first stays.
    """
    import numpy

    known = [numpy.asarray(column, float) for column in columns]
    table = numpy.stack([numpy.where(numpy.isnan(one), numpy.inf, one) for one in known], 1)
    left = numpy.lexsort(table.T[::-1])
    if len(left) and len(columns) == 2:  # then only those below all before them stay
        second = table[left, 1]
        below = second[1:] < numpy.minimum.accumulate(second)[:-1]
        return left[numpy.concatenate([[True], below])]
    found = []
    while len(left):
        # whatever beats the first row left would stand before it
        found.append(left[0])
        left = left[(table[left] < table[left[0]]).any(1)]
    return numpy.array(found, int)
