"""The front against comparing every candidate with every other one."""

import numpy
from hypothesis import given
from hypothesis import strategies as st

from memfit.plan.search.tables import find_front

NUMBERS = st.one_of(st.integers(0, 4), st.floats(0, 3), st.just(float("nan")))


@st.composite
def tables(draw):
    width = draw(st.integers(1, 4))
    rows = draw(st.lists(st.tuples(*[NUMBERS] * width), max_size=40))
    return [[row[i] for row in rows] for i in range(width)]


def beats(one, other):
    """Whether a row is as small in every column and smaller in one; an unknown is the largest."""
    one, other = ([float("inf") if n != n else n for n in row] for row in (one, other))
    pairs = list(zip(one, other, strict=True))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def same(one, other):
    return sort_key(one) == sort_key(other)


def sort_key(row):
    return [float("inf") if n != n else float(n) for n in row]


@given(tables())
def test_the_front_is_what_comparing_all_with_all_finds(columns):
    rows = list(zip(*columns, strict=True))
    expected = [
        i
        for i, row in enumerate(rows)
        if not any(beats(other, row) for other in rows)
        and not any(same(other, row) for other in rows[:i])
    ]
    found = [int(i) for i in find_front([numpy.array(column) for column in columns])]
    assert sorted(found) == expected
    assert [sort_key(rows[i]) for i in found] == sorted(sort_key(rows[i]) for i in found)


def test_a_front_by_hand():
    seconds, usd, devices = [3.0, 1.0, 2.0, 2.0, 1.0], [1, 5, 2, 3, 5], [8, 8, 16, 8, 8]
    # the second and the last are equal; of 2 seconds, one is cheaper and one has fewer devices
    assert list(find_front([seconds, usd, devices])) == [1, 2, 3, 0]
    assert list(find_front([seconds])) == [1]
    assert list(find_front([[], []])) == []
    nan = float("nan")
    assert list(find_front([[1.0, 2.0, 3.0], [nan, 4.0, nan]])) == [0, 1]


def test_a_large_front_takes_a_moment():
    rng = numpy.random.default_rng(0)
    table = rng.random((200_000, 3))
    front = find_front(list(table.T))
    assert 50 < len(front) < 2000
    inside = table[front]
    for row in table[rng.integers(0, len(table), 200)]:
        assert (inside <= row).all(1).any()
