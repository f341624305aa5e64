"""Sizes that are not numbers yet, against plain numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.meta.tensor import row_major, view_strides
from memfit.meta.unknown import Size, Unknowns, value_at

NUMBERS = st.integers(1, 300)
STEPS = st.lists(
    st.tuples(st.sampled_from("+-*/%rc"), st.sampled_from(["b", "t", 2, 3, 7, 128])), max_size=6
)


def compute(b, t, steps):
    """A number from two others, by what shapes are computed with."""
    x = b * t
    for operation, y in steps:
        y = {"b": b, "t": t}.get(y, y)
        match operation:
            case "+":
                x = x + y
            case "-":
                x = y - x if x > y else x - y
            case "*":
                x = x * y
            case "/":
                x = x // y
            case "%":
                x = x % y
            case "r":
                x = -(-x // y) * y
            case "c":
                x = min(x, y) if x != y else max(x, 5) + (x <= 2)
    return x


@given(b=NUMBERS, t=NUMBERS, other_b=NUMBERS, other_t=NUMBERS, steps=STEPS)
def test_a_formula_is_the_number_wherever_its_conditions_hold(b, t, other_b, other_t, steps):
    unknowns = Unknowns(b, t)
    formula = compute(unknowns[0], unknowns[1], steps)
    values = unknowns.evaluate(b, t)
    assert values is not None, "the example itself meets every condition"
    assert value_at(formula, values) == compute(b, t, steps)
    values = unknowns.evaluate(other_b, other_t)
    if values is not None:
        assert value_at(formula, values) == compute(other_b, other_t, steps)


def test_questions_become_conditions_unless_the_answer_is_certain():
    unknowns = Unknowns(2, 64)
    rows, tokens = unknowns[0], unknowns[1]
    assert rows * tokens * 4096 != 1
    assert rows * 8 > rows
    assert rows * tokens == tokens * rows
    assert not unknowns.conditions
    assert tokens != 32
    assert not tokens * rows * 2 < rows * 20
    assert str(unknowns.conditions) == "{1*t: 10 to inf without [32]}"
    assert unknowns.evaluate(9, 33) == [9, 33]
    assert unknowns.evaluate(9, 32) is None
    assert unknowns.evaluate(9, 9) is None


def test_a_number_that_is_used_as_one_holds_for_itself_alone():
    unknowns = Unknowns(3, 64)
    assert len(range(unknowns[0])) == 3
    assert unknowns.evaluate(3, 128)
    assert unknowns.evaluate(4, 128) is None


def test_division_is_exact_where_it_can_be_and_rounds_as_integers_do():
    unknowns = Unknowns(2, 100)
    rows, tokens = unknowns[0], unknowns[1]
    assert rows * tokens * 6 // (rows * 2) is tokens * 3
    assert rows * 4 % 2 == 0
    rounded = -(-tokens // 64) * 64
    assert isinstance(rounded, Size)
    assert [value_at(rounded, unknowns.evaluate(1, n)) for n in (64, 65, 128)] == [64, 128, 128]


@pytest.mark.parametrize("rows", [1, 2])
def test_caches_of_strides_keep_unknown_and_plain_shapes_apart(rows):
    for shape in ((rows, 8, 4), (Unknowns(rows, 8)[0], 8, 4), (rows, 8, 4)):
        assert [type(n) for n in row_major(shape)] == [int] * 3
        assert view_strides(shape, (32, 4, 1), (shape[0] * 8, 4)) == (4, 1)
    unknowns = Unknowns(rows, 8)
    assert not unknowns.conditions
    assert row_major((unknowns[0], unknowns[1], 4))[0] is unknowns[1] * 4
