"""Orders of work against torch.distributed.pipelining's, Megatron-LM's counts, memory's counts."""

from itertools import product

import pytest

from memfit.accuracy.corpus import read_corpus
from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks.shared.pipeline import count_in_flight
from memfit.plan.request.defaults import read_defaults
from memfit.plan.step_time.pipeline.orders import (
    Schedule,
    count_held,
    count_warm_up,
    find_schedule,
    orders,
)
from memfit.records import from_data
from memfit.records.request import Request

TORCH = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "breadth-first": "LoopedBFS",
    "zb-v": "ZBVZeroBubble",
}
PASSES = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torchs_orders(name, ranks, micro_batches, chunks):
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    ops = get_schedule_ops(name, ranks, micro_batches, chunks if chunks > 1 else None)
    return read_actions(ops)


def read_actions(ops):
    return tuple(
        tuple(
            (PASSES[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in rank
            if a is not None and a.computation_type.name in PASSES
        )
        for rank in ops
    )


@pytest.mark.parametrize(
    ("kind", "ranks", "micro_batches", "chunks"),
    [
        *product(("gpipe", "1f1b"), (1, 2, 4, 7), (7, 8, 16), (1,)),
        *product(("interleaved",), (2, 4), (4, 8, 16), (2, 3)),
        *product(("breadth-first",), (2, 4), (1, 3, 8), (2, 3)),
        *product(("zb-v",), (2, 4, 5), (1, 4, 9, 16), (2,)),
    ],
)
def test_orders_are_torchs(kind, ranks, micro_batches, chunks):
    ours = orders(Schedule(kind=kind, ranks=ranks, micro_batches=micro_batches, chunks=chunks))
    theirs = torchs_orders(TORCH[kind], ranks, micro_batches, chunks)
    if kind == "1f1b":  # torch's listing (not its step) counts the last rank's forwards from 1
        last = [(p, s, m - 1 if p == "F" else m) for p, s, m in theirs[-1]]
        theirs = (*theirs[:-1], tuple(last))
    assert ours == theirs


@pytest.mark.parametrize(("micro_batches", "group"), [(6, 6), (10, 5)])
def test_a_group_of_more_micro_batches_than_ranks_is_torchs_round(micro_batches, group):
    schedule = Schedule(
        kind="interleaved", ranks=4, micro_batches=micro_batches, chunks=2, group=group
    )
    assert orders(schedule) == torchs_orders("Interleaved1F1B", 4, micro_batches, 2)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 12)])
def test_zero_bubble_orders_are_torchs(ranks, micro_batches, chunks):
    from unittest import mock

    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
    from torch.distributed.pipelining.stage import PipelineStage

    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, ranks, None
    stage.num_stages = ranks * chunks
    made = ScheduleInterleavedZeroBubble([stage] * chunks, micro_batches)
    schedule = Schedule(kind="zb-h1", ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    theirs = read_actions(made.pipeline_order[rank] for rank in range(ranks))
    assert orders(schedule) == theirs


def test_interleaved_table_of_megatron_with_a_short_last_group():
    """Megatron-LM's own example: 5 micro-batches, 2 chunks, groups of 3 (get_schedule_table)."""
    schedule = Schedule(kind="interleaved", ranks=2, micro_batches=5, chunks=2, group=3)
    forwards = [p for p in orders(schedule)[0] if p.pass_ == "F"]
    assert [p.micro_batch for p in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [p.stage // 2 for p in forwards] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    # warm-up: 2 (2 - 0 - 1) + (2 - 1) x 3
    assert count_warm_up(schedule, 0) == 5
    assert [p.pass_ for p in orders(schedule)[0][:7]] == ["F"] * 6 + ["B"]


KINDS = [("gpipe", 1), ("1f1b", 1), ("breadth-first", 3), ("zb-h1", 1), ("zb-v", 2)]
SIZES = [(1, 3), (2, 1), (4, 3), (4, 8), (5, 13)]


@pytest.mark.parametrize(
    ("kind", "chunks", "ranks", "micro_batches"),
    [
        *((*kind, *size) for kind in KINDS for size in SIZES),
        *(("interleaved", chunks, *size) for chunks in (2, 4) for size in ((1, 3), (4, 8))),
    ],
)
def test_every_pass_of_every_micro_batch_runs_once(kind, chunks, ranks, micro_batches):
    schedule = Schedule(kind=kind, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    for rank, order in enumerate(orders(schedule)):
        assert len(set(order)) == len(order)
        passes = "FIW" if kind.startswith("zb") else "FB"
        stages = {schedule.stage(rank, c) for c in range(chunks)}
        assert all(schedule.rank(s) == rank for s in stages)
        assert set(order) == set(product(passes, stages, range(micro_batches)))


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 3), (2, 2), (2, 8), (4, 4), (4, 12), (8, 64)]
)
def test_activations_held_are_those_that_memory_counts(chunks, ranks, micro_batches):
    kind = "1f1b" if chunks == 1 else "interleaved"
    schedule = Schedule(kind=kind, ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    for rank in range(ranks):
        told = count_in_flight(rank, stages=ranks, chunks=chunks, micro_batches=micro_batches)
        assert count_held(schedule, rank) == told


@pytest.mark.parametrize(("group", "micro_batches"), [(6, 12), (6, 16), (5, 14)])
def test_activations_held_of_larger_groups(group, micro_batches):
    schedule = Schedule(
        kind="interleaved", ranks=4, micro_batches=micro_batches, chunks=3, group=group
    )
    for rank in range(4):
        told = count_in_flight(rank, stages=4, chunks=3, micro_batches=micro_batches, group=group)
        assert count_held(schedule, rank) == told


def test_held_activations_of_the_papers():
    """GPipe holds all; ZB-H1 as much as 1F1B's worst rank; ZB-V 2p chunks, half a stage each."""
    assert count_held(Schedule(kind="gpipe", ranks=4, micro_batches=9), 0) == (9,)
    h1 = Schedule(kind="zb-h1", ranks=4, micro_batches=9)
    assert [count_held(h1, rank) for rank in range(4)] == [(4,)] * 4
    v = Schedule(kind="zb-v", ranks=4, micro_batches=16, chunks=2)
    assert [sum(count_held(v, rank)) for rank in range(4)] == [8] * 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "1f1b", "chunks": 2},
        {"kind": "zb-v", "chunks": 3},
        {"kind": "zb-v"},
        {"kind": "gpipe", "ranks": 0},
        {"kind": "interleaved", "chunks": 2, "group": 2},
        {"kind": "interleaved", "chunks": 2, "micro_batches": 3},
        {"kind": "interleaved", "chunks": 2, "micro_batches": 9},
    ],
)
def test_what_no_rank_could_follow_is_refused(wrong):
    with pytest.raises(InvalidRequest):
        Schedule(**{"ranks": 4, "micro_batches": 8, **wrong})


def recipe_of(framework, pp, virtual_pp=1, micro_batches=16, **options):
    plain = {
        "model": "gpt2", "framework": framework, "micro_batch": 1, "options": options,
        "recompute": "none", "task": {"sequence_length": 512, "global_batch": micro_batches},
        "parallel": {"pp": pp, "virtual_pp": virtual_pp}, "precision": "bf16-mixed",
        "hardware": {"device": "h100-sxm", "count": pp},
    }  # fmt: skip
    return read_defaults(from_data(plain, Request, source="the test"))[0]


@pytest.mark.parametrize(
    ("asked", "kind", "group"),
    [
        (("megatron", 4), "1f1b", 0),
        (("megatron", 4, 3), "interleaved", 0),
        (("torchtitan", 4), "1f1b", 0),
        (("torchtitan", 4, 3), "interleaved", 4),
        (("nanotron", 4), "1f1b", 0),
    ],
)
def test_a_recipes_schedule_is_its_frameworks(asked, kind, group):
    schedule = find_schedule(recipe_of(*asked))
    assert (schedule.kind, schedule.group) == (kind, group)
    assert (schedule.ranks, schedule.chunks) == (4, (*asked, 1)[2])
    assert schedule.micro_batches == 16


def test_a_recipes_schedule_can_be_stated():
    assert find_schedule(recipe_of("nanotron", 4, pipeline="afab")).kind == "gpipe"
    asked = recipe_of("torchtitan", 4, 3, pipeline_schedule="InterleavedZeroBubble")
    assert find_schedule(asked).kind == "zb-h1"
    wide = recipe_of("megatron", 4, 3, microbatch_group_size_per_vp_stage=8)
    assert find_schedule(wide).lap == 8
    # torch's rounds: 10 micro-batches on 4 ranks are 2 rounds of 5
    assert find_schedule(recipe_of("torchtitan", 4, 3, micro_batches=10)).lap == 5


def test_every_published_pipeline_has_a_schedule_that_its_ranks_can_follow():
    pipelines = [row.recipe for row in read_corpus() if row.recipe.parallel.pp > 1]
    assert len(pipelines) > 500
    kinds = {find_schedule(recipe).kind for recipe in pipelines}
    assert kinds >= {"1f1b", "interleaved"}
