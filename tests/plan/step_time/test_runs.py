"""What candidates share is worked out once for them, and never anything else."""

import numpy
import pytest
from test_step_seconds import IDEAL, setting

from memfit.plan.step_time.arrays import change
from memfit.plan.step_time.runs import MESHES_DO_NOT_READ, once


def columns(**arrays):
    own = setting(IDEAL)
    return own._replace(layout=change(own.layout, **arrays))


@pytest.mark.parametrize(
    ("tp", "worked_out"),
    [
        ([2.0, 2.0, 4.0, 2.0, 4.0, 2.0], 2),
        ([0.5, 0.5, 2.0, 0.5, 0.5, 0.5], 6),  # no whole numbers: every row for itself
        ([1.0, 2.0, 1e9, 2.0, 2.0, 2.0], 6),  # too far apart for a table
    ],
)
def test_each_row_gets_its_own_and_equal_rows_are_worked_out_once(tp, worked_out):
    asked = []

    def function(one):
        asked.extend(one.layout.mesh.tp)
        return one.layout.mesh.tp * 10, 1.0

    found, plain = once(function, columns(tp=numpy.array(tp)), MESHES_DO_NOT_READ)
    assert list(found) == [10 * value for value in tp]
    assert plain == 1.0
    assert len(asked) == worked_out


def test_rows_that_differ_in_any_read_column_are_kept_apart():
    tp, pp = numpy.array([2.0, 2.0, 4.0, 4.0] * 4), numpy.array([1.0, 8.0, 1.0, 8.0] * 4)
    (found,) = once(
        lambda one: (one.layout.mesh.tp + 100 * one.layout.mesh.pp,),
        columns(tp=tp, pp=pp),
        MESHES_DO_NOT_READ,
    )
    assert list(found) == list(tp + 100 * pp)


def test_numbers_pass_as_they_are():
    own = setting(IDEAL)
    assert once(lambda one: (one.layout.mesh.tp,), own, MESHES_DO_NOT_READ) == (own.layout.mesh.tp,)


def test_an_array_that_is_said_not_to_be_read_cannot_be():
    many = columns(tp=numpy.array([1.0, 2.0]), micro_batch=numpy.array([1.0, 3.0]))
    with pytest.raises(TypeError):
        once(
            lambda one: (one.layout.mesh.tp * one.layout.rows.micro_batch,),
            many,
            MESHES_DO_NOT_READ,
        )
