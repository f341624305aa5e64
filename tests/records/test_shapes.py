"""Shapes that bound all others, against every way to cut a row."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.records.shapes import (
    MOST_DOCUMENTS,
    RowBounds,
    bounding_shapes,
    evaluation_shapes,
    holds,
    most_unequal,
)
from tiny_models import make_recipe


def partitions(width: int, longest: int) -> list[tuple[int, ...]]:
    """Every way to cut `width` into parts of at most `longest`, largest first."""
    if width == 0:
        return [()]
    return [
        (first, *rest)
        for first in range(min(width, longest), 0, -1)
        for rest in partitions(width - first, first)
    ]


COSTS = {  # of one document: what kernels keep
    "squares": lambda n: n * n,
    "padded to 32": lambda n: -(-n // 8) * 8,
    "a constant each": lambda n: n + 5,
    "squares and a constant": lambda n: n * n + 40,
}


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("longest", [1, 3, 5, 14])
def test_no_cut_of_a_row_costs_more_than_the_fewest_and_the_most_documents(longest, cost):
    width = 14
    cuts = partitions(width, longest)
    assert all(sum(cut) == width for cut in cuts)
    for most in range(-(-width // longest), width + 1):
        allowed = [cut for cut in cuts if len(cut) <= most]
        ends = [most_unequal(width, longest, n) for n in (-(-width // longest), most)]
        assert all(sum(end) == width and max(end) <= longest for end in ends)
        assert len(ends[1]) == most
        highest = max(sum(map(cost, cut)) for cut in allowed)
        assert highest <= max(sum(map(cost, end)) for end in ends)


def bounds(tokens, documents, longest):
    return RowBounds(tokens=tokens, documents=documents, longest=longest)


def test_a_micro_batch_is_cut_row_by_row_and_the_last_row_stays_whole():
    recipe = make_recipe(packing=True, micro_batch=3, device="h100-sxm")
    (shape,) = bounding_shapes(recipe, bounds(6, 9, 6))
    assert shape.documents == ((1, 1, 1, 1, 1, 1), (5, 1), (6,))
    (shape,) = bounding_shapes(recipe, bounds(6, 9, 4))
    assert shape.documents == ((2, 1, 1, 1, 1), (4, 2), (4, 2))
    assert bounding_shapes(recipe, bounds(6, 0, 6))[0].documents is None


def test_what_a_kernel_keeps_of_squares_asks_for_the_fewest_documents_too():
    recipe = make_recipe(packing=True, micro_batch=1, attention="math", device="h100-sxm")
    made = [shape.documents for shape in bounding_shapes(recipe, bounds(8, 5, 8))]
    assert made == [((8,),), ((4, 1, 1, 1, 1),)]


def test_more_documents_than_a_certificate_can_follow_are_refused_on_a_gpu_alone():
    many = bounds(2048, MOST_DOCUMENTS + 1, 2048)
    recipe = make_recipe(packing=True, micro_batch=1, device="h100-sxm")
    with pytest.raises(InvalidRequest, match=r"holds 1025 documents.* 1024 at most") as refused:
        bounding_shapes(recipe, many)
    assert "packing: false" in refused.value.hint
    assert "attention: varlen" in refused.value.hint
    (shape,) = bounding_shapes(replace(recipe, attention="varlen"), many)
    assert shape.documents is not None
    assert len(shape.documents[0]) == MOST_DOCUMENTS + 1
    (shape,) = bounding_shapes(make_recipe(packing=True, micro_batch=1), many)
    assert shape.documents == ((2047, 1),)


def test_bounds_cover_what_is_within_all_of_them():
    mine = bounds(8, 5, 7)
    assert mine.covers(mine)
    assert mine.covers(bounds(4, 2, 7))
    for beyond in (bounds(9, 5, 7), bounds(8, 6, 7), bounds(8, 5, 8)):
        assert not mine.covers(beyond)
    assert str(mine).startswith("rows of at most 8 tokens, at most 5 documents a micro-batch")


def test_an_evaluation_takes_the_longest_document_last():
    recipe = make_recipe(packing=True, micro_batch=2, device="h100-sxm")
    (shape,) = evaluation_shapes(recipe, bounds(6, 5, 4))
    assert shape.documents == ((1, 1, 4), (2, 4))
    assert evaluation_shapes(recipe, bounds(6, 0, 6))[0].documents is None


def test_on_a_cpu_more_documents_ask_for_no_new_certificate():
    here = make_recipe(packing=True, micro_batch=1)
    there = make_recipe(packing=True, micro_batch=1, device="h100-sxm")
    assert holds(here, bounds(8, 2, 8), bounds(8, 8, 8))
    assert not holds(there, bounds(8, 2, 8), bounds(8, 8, 8))
    assert not holds(here, bounds(8, 1, 8), bounds(8, 2, 8)), "outputs of two are joined"
    assert not holds(here, bounds(8, 2, 4), bounds(8, 2, 8))
