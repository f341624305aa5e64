"""Pipelines in seconds: the simulation against the papers' bubbles, closed forms against it."""

import random

import pytest
from pipeline_paths import even_seconds, path_seconds

from memfit.core.errors import InvalidRequest
from memfit.plan.step_time.pipeline.orders import Schedule
from memfit.plan.step_time.pipeline.schedules import StageTimes, pipeline_seconds, simulate


def alike(stages, forward=1.0, backward=1.0, weight=1.0, send=0.0):
    return StageTimes([forward] * stages, [backward] * stages, [weight] * stages, send)


def uneven(stages, how, seed, send):
    """Stages 30 % either way; or alike but for a longer last one (the head)."""
    chance = random.Random(seed)
    forward = [1.0] * stages
    if how == "random":
        forward = [chance.uniform(0.7, 1.3) for _ in range(stages)]
    elif how == "last":
        forward[-1] = chance.uniform(1, 1.6)
    return StageTimes(forward, [1.2 * f for f in forward], [0.8 * f for f in forward], send)


def test_two_stages_worked_by_hand():
    """Rank 0: F0 F1 . . B0 F2 B1 . B2; forward 1 s, backward 2 s, a send half a second."""
    schedule = Schedule(kind="1f1b", ranks=2, micro_batches=3)
    run = simulate(schedule, alike(2, send=0.5))
    first = [(r.piece.pass_, r.piece.micro_batch, r.start, r.end) for r in run.ranks[0]]
    assert first == [
        ("F", 0, 0.0, 1.0), ("F", 1, 1.0, 2.0), ("B", 0, 5.0, 7.0), ("F", 2, 7.0, 8.0),
        ("B", 1, 8.0, 10.0), ("B", 2, 12.0, 14.0),
    ]  # fmt: skip
    assert run.seconds == 14.0
    assert run.idle(0) == 14.0 - 9.0


@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 6), (4, 4), (8, 16)])
def test_bubbles_of_the_papers(ranks, micro_batches):
    """Idle seconds of a rank, from 2104.04473 section 2.2 and 2401.10241 table 2."""
    f, b, w = 1.0, 1.3, 0.7

    def idle(kind, chunks=1):
        schedule = Schedule(kind=kind, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
        return simulate(schedule, alike(ranks * chunks, f, b, w)).idle(0)

    one = (ranks - 1) * (f + b + w)
    assert idle("gpipe") == pytest.approx(one)
    assert idle("1f1b") == pytest.approx(one)
    for chunks in (2, 3):  # of chunks' passes: a stage's are `chunks` times as long
        assert idle("interleaved", chunks) == pytest.approx(one)
    assert idle("zb-h1") == pytest.approx((ranks - 1) * (f + b - w))
    for chunks in (2, 3):  # 1 is the paper's; more have the same bubble, of a chunk's passes
        schedule = Schedule(kind="zb-h1", ranks=ranks, micro_batches=micro_batches, chunks=chunks)
        whole = simulate(schedule, alike(ranks * chunks, f, b, w)).seconds
        made = even_seconds("zb-h1", ranks, chunks, micro_batches, (f, b, w, 0.0))
        assert made == pytest.approx(whole)


def test_zb_v_has_no_bubble_of_equal_passes():
    """2401.10241 section 6: only the ramp is left, ranks - 1 passes of a chunk."""
    for ranks in (2, 4, 6):
        schedule = Schedule(kind="zb-v", ranks=ranks, micro_batches=4 * ranks, chunks=2)
        run = simulate(schedule, alike(2 * ranks))
        assert run.seconds == 4 * ranks * 6 + ranks - 1
        mine = run.ranks[ranks - 1]
        assert mine[-1].end - mine[0].start == 4 * ranks * 6  # the last rank never waits


KINDS = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-h1", 2)]


def counts(chunks):
    """Ranks and micro-batches that go together, each with a time of sending."""
    for ranks, micro_batches in ((1, 40), (2, 61), (3, 96), (4, 128)):
        for send in (0.0, 0.3):
            if chunks == 1 or micro_batches % ranks == 0:
                yield ranks, micro_batches, send


@pytest.mark.parametrize("how", ["alike", "random"])
@pytest.mark.parametrize(("kind", "chunks"), KINDS)
def test_what_repeats_itself_need_not_be_run(kind, chunks, how):
    for ranks, micro_batches, send in counts(chunks):
        schedule = Schedule(kind=kind, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
        times = uneven(ranks * chunks, how, seed=micro_batches, send=send)
        whole = simulate(schedule, times).seconds
        assert pipeline_seconds(schedule, times) == pytest.approx(whole, rel=1e-11), schedule


def test_the_cost_of_many_micro_batches_is_bounded(monkeypatch):
    from memfit.plan.step_time.pipeline import schedules

    run = []
    monkeypatch.setattr(
        schedules, "simulate", lambda s, t: run.append(s.micro_batches) or simulate(s, t)
    )
    schedule = Schedule(kind="1f1b", ranks=4, micro_batches=100_000)
    assert pipeline_seconds(schedule, alike(4)) == pytest.approx(3.0 * 100_003)
    assert sum(run) < 100


def test_one_simulation_serves_an_array_of_durations():
    numpy = pytest.importorskip("numpy")
    schedule = Schedule(kind="interleaved", ranks=3, micro_batches=66, chunks=2)
    forward = numpy.array([1.0, 2.0, 0.5])
    times = StageTimes([forward] * 6, [2 * forward] * 6, [forward] * 6, 0.1)
    for seconds in (pipeline_seconds, path_seconds):
        one = [seconds(schedule, alike(6, f, 2 * f, f, 0.1)) for f in (1.0, 2.0, 0.5)]
        assert seconds(schedule, times) == pytest.approx(one)
    even = even_seconds(
        "interleaved", numpy.array([3, 1]), numpy.array([2, 1]), 66, (1.0, 2.0, 1.0, 0.1)
    )
    assert even == pytest.approx([seconds(schedule, alike(6, 1, 2, 1, 0.1)), 66 * 4.0])


SIMPLE = [("gpipe", 1), ("1f1b", 1), *(("interleaved", n) for n in (1, 2, 4)), ("zb-h1", 1)]


def schedules_of(kind, chunks):
    for ranks in (1, 2, 3, 6):
        for micro_batches in {1, 2, ranks, 2 * ranks, 3 * ranks + 1, 8 * ranks}:
            if chunks == 1 or micro_batches % ranks == 0:
                yield Schedule(kind=kind, ranks=ranks, micro_batches=micro_batches, chunks=chunks)


@pytest.mark.parametrize(("kind", "chunks"), SIMPLE)
def test_closed_forms_are_the_simulation_of_stages_alike(kind, chunks):
    for schedule in schedules_of(kind, chunks):
        ranks, micro_batches = schedule.ranks, schedule.micro_batches
        for f, b, w, send in ((1, 1, 1, 0), (1, 2, 0.5, 0), (1, 0.5, 1.5, 0), (1, 2, 1, 0.4)):
            if kind == "zb-h1" and send:
                continue
            times = alike(ranks * chunks, f, b, w, send)
            whole = pytest.approx(simulate(schedule, times).seconds)
            assert path_seconds(schedule, times) == whole, schedule
            if kind != "zb-h1" or micro_batches >= ranks:
                even = even_seconds(kind, ranks, chunks, micro_batches, (f, b, w, send))
                assert even == whole, schedule


# how far below the simulation a path may end, where the module's text says so
BOUNDS = {"gpipe": 1e-12, "1f1b": 0.08, "interleaved": 0.13, "zb-h1": 0.08}


@pytest.mark.parametrize("how", ["last", "random"])
@pytest.mark.parametrize(("kind", "chunks"), SIMPLE)
def test_paths_of_uneven_stages_stay_below_and_near(kind, chunks, how):
    lowest = 1 - (1e-12 if how == "last" and kind != "zb-h1" else BOUNDS[kind])
    for schedule in schedules_of(kind, chunks):
        for seed in range(3):
            times = uneven(schedule.ranks * chunks, how, seed, send=0.1 * seed)
            whole = simulate(schedule, times).seconds
            assert lowest <= path_seconds(schedule, times) / whole <= 1 + 1e-12, (schedule, seed)


@pytest.mark.parametrize("kind", ["zb-v", "breadth-first", "zb-h1"])
def test_no_closed_form_is_made_up(kind):
    schedule = Schedule(kind=kind, ranks=2, micro_batches=4, chunks=2)
    with pytest.raises(InvalidRequest, match=kind):
        path_seconds(schedule, alike(4))
    if kind != "zb-h1":  # whose chunks may be an array
        with pytest.raises(InvalidRequest, match=kind):
            even_seconds(kind, 2, 2, 4, (1, 1, 1, 0))


@pytest.mark.parametrize("seconds", [simulate, pipeline_seconds, path_seconds])
def test_durations_are_those_of_the_stages(seconds):
    schedule = Schedule(kind="interleaved", ranks=2, micro_batches=4, chunks=2)
    with pytest.raises(InvalidRequest, match="2 stages, the schedule 4"):
        seconds(schedule, alike(2))
