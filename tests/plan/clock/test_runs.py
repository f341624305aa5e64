"""What candidates share is worked out once for them, and never anything else."""

import numpy
import pytest
from test_step_seconds import IDEAL, setting

from memfit.plan.clock.runs import MESHES_DO_NOT_READ, over_runs


def columns(**arrays):
    own = setting(IDEAL)
    return own._replace(layout=own.layout._replace(**arrays))


def test_a_run_is_worked_out_once_and_rows_get_their_own():
    tp = numpy.array([2.0, 2.0, 2.0, 4.0, 2.0, 2.0])
    asked = []

    def function(one):
        asked.append(list(one.layout.tp))
        return one.layout.tp * 10, 1.0

    found, plain = over_runs(function, columns(tp=tp), MESHES_DO_NOT_READ)
    assert list(found) == [20, 20, 20, 40, 20, 20]
    assert plain == 1.0
    assert asked == [[2.0, 4.0, 2.0]]


def test_numbers_pass_as_they_are():
    assert over_runs(lambda one: (one.layout.tp,), setting(IDEAL), MESHES_DO_NOT_READ) == (
        setting(IDEAL).layout.tp,
    )


def test_an_array_that_is_said_not_to_be_read_cannot_be():
    many = columns(tp=numpy.array([1.0, 2.0]), micro_batch=numpy.array([1.0, 3.0]))
    with pytest.raises(TypeError):
        over_runs(lambda one: (one.layout.tp * one.layout.micro_batch,), many, MESHES_DO_NOT_READ)
