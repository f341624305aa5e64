"""A step's seconds: cases worked by hand, arrays against numbers, and what can never be slower."""

import math
from itertools import pairwise

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.plan.step_time import block, step, work
from memfit.plan.step_time.arrays import (
    beside,
    ceil_div,
    change,
    gather,
    larger,
    list_names,
    list_numbers,
    log2,
    smaller,
    where,
)
from memfit.plan.step_time.communication import collectives, exchanges
from memfit.plan.step_time.pipeline.exact import bubble_share
from memfit.plan.step_time.pipeline.orders import Schedule
from memfit.plan.step_time.pipeline.schedules import StageTimes, simulate
from memfit.plan.step_time.rates import Machine, Rates, Setting

# Llama-3-8B's sizes
SHAPE = work.Shape(
    layers=32.0, hidden=4096.0, heads=32.0, kv_heads=8.0, key=128.0, value=128.0, query_rank=0.0,
    kv_rank=0.0, rotated=0.0, ffn=14336.0, gated=1.0, experts=0.0, per_token=0.0, expert_ffn=0.0,
    shared_ffn=0.0, plain=1.0, window=0.0, sliding=0.0, clamped=0.0, vocab=128256.0, own_head=1.0,
)  # fmt: skip
SPARSE = SHAPE._replace(
    experts=64.0, per_token=8.0, expert_ffn=1024.0, shared_ffn=2048.0, plain=0.25
)
LAYOUT = gather(work.Layout, dict(
    sequence=8192.0, micro_batch=1.0, accumulation=4.0, dp=1.0, shard=1.0, zero=0.0, tp=1.0,
    sequence_parallel=0.0, cp=1.0, pp=1.0, chunks=1.0, ep=1.0, repeated=0.0, selective=0.0,
    products_repeated=0.0, narrow=0.0, gradient_bytes=4.0, state_bytes=30.0, trains=1.0,
    packed=0.0, compiled=0.0, written_out=0.0, asynchronous=0.0, deduplicated=0.0,
    overlapped=0.0, most=32.0, last=32.0, balanced=0.0, offloaded=0.0,
    element=2.0, entered=1.0, chunk_bytes=0.0,
))  # fmt: skip
MACHINE = Machine(
    products=8e14, wide_products=8e14, wide_peak=1e15, memory=3e12, host=5e10,
    links=collectives.Links(inside=4e11, outside=5e10),
)  # fmt: skip
IDEAL = gather(Rates, dict.fromkeys(list_names(Rates), 0.0) | dict(
    products=1.0, head=1.0, attention=1.0, memory=1.0, link=1.0, network=1.0, slowdown=1.0,
    misaligned=1.0, grouped=1.0, fused=1.0, asynchronous=1.0,
))  # fmt: skip
USUAL = change(
    IDEAL,
    products=0.9, attention=0.5, memory=0.6, link=0.8, network=0.8, tile=100.0, weight_traffic=1.0,
    narrow_head=0.2, passes=1.0, launch=2e-3, expert_launch=3e-3, exposed_data=0.3,
    exposed_all_reduce=0.3, exposed_tensor=0.7, fixed=0.01, straggling=0.005, dispatch=0.4,
    dispatch_across=0.8, dispatch_overlapped=0.5,
    permute=1.0, cast=0.5, adapter=1.0, unpack=1.0, link_latency=3e-5, context_latency=1e-5,
    ring_latency=5e-6, send_latency=5e-5, selective=1.0, tensor_launch=0.3, adapter_launch=0.5,
)  # fmt: skip


def setting(rates=USUAL, shape=SHAPE, machine=MACHINE, **layout):
    return Setting(shape, change(LAYOUT, **layout), machine, rates)


def with_links(**changes):
    return MACHINE._replace(links=MACHINE.links._replace(**changes))


def seconds(*args, **kwargs):
    return step.predict_step(setting(*args, **kwargs)).total


def test_a_rank_s_share_of_a_sparse_block_by_hand():
    """h 4096, 32 and 8 heads of 128: three quarters of the blocks have 64 experts of 1024."""
    attention = 4096 * (4096 + 2 * 1024) + 4096 * 4096
    plain = attention + 0.25 * 3 * 4096 * 14336 + 0.75 * 3 * 4096 * 2048
    experts = 0.75 * 3 * 64 * 4096 * 1024
    cut = change(LAYOUT, tp=2.0, ep=4.0, dp=16.0, shard=16.0, pp=8.0)
    assert work.gathered_elements(SPARSE, cut) == plain / 2 + experts / 4
    # ep over all ranks: each has its experts alone, and gathers none
    assert work.gathered_elements(SPARSE, change(cut, ep=32.0)) == plain / 2
    # and so has each of two copies of the model
    copies = change(cut, tp=1.0, ep=8.0, dp=16.0, shard=8.0)
    assert work.gathered_elements(SPARSE, copies) == plain
    updated, own = work.own_weights(SPARSE, cut)
    assert updated == (32 * plain + 2 * 128256 * 4096) / 2 / 8
    assert own == 32 * experts / 4 / 8
    assert work.activation_bytes(SPARSE, cut) == 2 * 8192 * 4096
    assert work.key_value_bytes(SPARSE, cut) == 2 * 8192 * 8 * 256 / 2
    assert work.stage_bytes(SPARSE, cut) == 2 * 8192 * 4096
    assert work.stage_bytes(SPARSE, change(cut, sequence_parallel=1.0)) == 8192 * 4096
    ring = change(cut, cp=4.0)
    assert work.key_value_bytes(SPARSE, ring) == 2 * 2048 * 8 * 256 / 2


def test_a_large_product_takes_its_flop_and_a_single_row_its_weights_bytes():
    large = block.multiply(work.Product(8192.0, 4096.0, 4096.0), 8e14, setting(IDEAL))
    assert large.forward == pytest.approx(2 * 8192 * 4096 * 4096 / 8e14)
    assert large.all == 3 * large.forward
    moved = change(IDEAL, weight_traffic=2.0)  # all of a 16-bit weight's two bytes an element
    one = block.multiply(work.Product(1.0, 4096.0, 4096.0), 8e14, setting(moved))
    assert one.forward == pytest.approx(2 * 4096 * 4096 / 3e12, rel=0.01)


def test_a_weights_gradient_reads_and_writes_a_buffer_of_four_bytes_an_element():
    moved = change(IDEAL, weight_traffic=2.0)
    found = block.multiply(work.Product(1.0, 4096.0, 4096.0), 8e14, setting(moved))
    busy = 2 * 4096 * 4096 / 8e14
    assert found.weights - busy == pytest.approx(8 * 4096 * 4096 / 3e12)
    frozen = block.multiply(work.Product(1.0, 64.0, 64.0), 8e14, setting(moved, trains=0.0))
    assert frozen.weights == 0


def test_a_step_waits_for_its_launches_where_they_take_longer_than_its_work():
    slow = change(IDEAL, launch=1.0)
    found = step.predict_step(setting(slow, sequence=128.0))
    assert found.forward + found.backward + found.waiting == pytest.approx(4 * 32 * 1.0, rel=1e-3)
    fast = step.predict_step(setting(change(IDEAL, launch=1e-6)))
    assert fast.waiting == pytest.approx(0, abs=1e-6)


def test_a_step_without_overheads_is_six_flop_a_parameter_and_token():
    found = step.predict_step(setting(IDEAL, state_bytes=0.0))
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    products = 6 * 8192 * 4 * (32 * block + 4096 * 128256) / 8e14
    causal = 2 * 8192 * 8192 / 2 * 32 * 256 * 4 * 32
    attention = causal * (1 / 1e15) * 3.75
    assert found.total == pytest.approx(products + attention, rel=1e-12)


def test_an_exposed_all_reduce_moves_twice_its_bytes_less_a_share():
    tp = setting(IDEAL, tp=4.0)
    nbytes = 2 * 8192 * 4096
    # NCCL's ring: 6 steps of 3.4 µs after the first 8.4
    ring = 2 * 3 / 4 * nbytes / 4e11 + (8.4 + 6 * 3.4) * 1e-6
    assert exchanges.tensor_seconds(tp) == pytest.approx(ring)
    cut = setting(IDEAL, tp=4.0, sequence_parallel=1.0)  # gathered and scattered instead
    assert exchanges.tensor_seconds(cut) == pytest.approx(ring + 8.4e-6)
    whole = step.predict_step(setting(change(IDEAL, exposed_tensor=1.0), tp=4.0))
    # two in a block's forward, two in its backward
    assert whole.tensor == pytest.approx(4 * 4 * 32 * exchanges.tensor_seconds(tp))


def test_the_last_of_two_stages_waits_for_the_other_ones_work_of_one_micro_batch():
    halves = {"pp": 2.0, "most": 16.0, "last": 16.0}
    found = step.predict_step(setting(IDEAL, **halves))
    other = (found.forward + found.backward) / 4  # the head is on the last stage
    assert found.bubble == pytest.approx(other)
    # 1F1B, 2 stages, 4 micro-batches: 4 - 2 rounds of two messages over the one hop
    once = 2 * 8192 * 4096 / 4e11 + (8.4 + 3.4) * 1e-6
    assert found.sending == pytest.approx(2 * 2 * once)
    interleaved = step.predict_step(setting(IDEAL, **halves, chunks=4.0))
    assert interleaved.bubble == pytest.approx(other / 4)
    assert interleaved.sending == pytest.approx(2 * 7 * once)  # once through 8 pieces and back


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks"),
    [("1f1b", 2, 1), ("1f1b", 4, 1), ("gpipe", 4, 1), ("interleaved", 4, 2)],
)
def test_a_pipelines_step_is_its_schedule_simulated(kind, ranks, chunks):
    """Where sends take no time, and the head is the last stage's."""
    each = {"most": 32.0 / ranks, "last": 32.0 / ranks}
    layout = {"pp": float(ranks), "chunks": float(chunks), "accumulation": 8.0, **each}
    found = step.predict_step(setting(IDEAL, **layout))
    passes = found.forward / 8 / chunks, found.backward / 8 / chunks
    forward, backward = ([seconds] * (ranks * chunks) for seconds in passes)
    backward[-1] += found.head / 8
    schedule = Schedule(kind=kind, ranks=ranks, micro_batches=8, chunks=chunks)
    run = simulate(schedule, StageTimes(forward, backward, [0.0] * (ranks * chunks)))
    assert found.total - found.updating - found.sending == pytest.approx(run.seconds)


def test_zero_bubble_schedules_wait_less():
    layout = {"pp": 4.0, "accumulation": 16.0, "most": 8.0, "last": 8.0}
    plain = step.predict_step(setting(IDEAL, **layout)).bubble
    for kind, chunks in (("zb-h1", 1), ("zb-v", 2)):
        schedule = Schedule(kind=kind, ranks=4, micro_batches=16, chunks=chunks)
        share = bubble_share(schedule)
        assert share == pytest.approx(1 / 3)
        made = step.predict_step(setting(IDEAL, **layout, bubble=share)).bubble
        assert made == pytest.approx(plain * share)


def test_blocks_are_dealt_and_the_fullest_stage_decides():
    full = step.predict_step(setting(IDEAL, pp=2.0, most=20.0, last=12.0))
    even = step.predict_step(setting(IDEAL, pp=2.0, most=16.0, last=16.0))
    assert full.forward == pytest.approx(even.forward * 20 / 16)
    assert full.head == 0  # on a stage that waits
    balanced = step.predict_step(setting(IDEAL, pp=2.0, most=16.0, last=16.0, balanced=1.0))
    assert balanced.total < min(full.total, even.total)


def test_a_ring_that_leaves_its_machine_uses_all_of_its_adapters():
    inside = setting(IDEAL, dp=8.0, shard=8.0)
    across = setting(IDEAL, dp=16.0, shard=16.0)
    hops = (8.4 + 14 * 3.4 + 14.0) * 1e-6
    near, far = (exchanges.gather_seconds(each, 1e9)[0] for each in (inside, across))
    assert near == pytest.approx(1e9 * 7 / 8 / 4e11 + (8.4 + 7 * 3.4) * 1e-6)
    assert far == pytest.approx(1e9 * 15 / 16 / 4e11 + hops)
    thin = across._replace(machine=with_links(outside=1e10))
    assert exchanges.gather_seconds(thin, 1e9)[0] == pytest.approx(1e9 * 15 / 16 / 8e10 + hops)


def test_every_message_of_a_step_takes_what_one_function_says(monkeypatch):
    """No second description: where a collective takes no time, neither does any part between."""
    layout = {
        "dp": 8.0, "shard": 4.0, "zero": 1.0, "tp": 2.0, "cp": 2.0, "pp": 2.0, "ep": 8.0,
        "accumulation": 4.0, "most": 16.0, "last": 16.0,
    }  # fmt: skip
    links = ("exposed_data", "exposed_all_reduce", "exposed_tensor", "dispatch", "dispatch_across")
    rates = change(IDEAL, **dict.fromkeys(links, 1.0))
    shapes = SPARSE, SHAPE._replace(own_head=0.0)
    for shape in shapes:
        for zero in (0.0, 1.0, 3.0):
            found = step.predict_step(setting(rates, shape=shape, **layout | {"zero": zero}))
            assert found.tensor > 0
            assert found.sending > 0
            assert found.reducing + found.gathering > 0
    monkeypatch.setattr(exchanges, "collective_seconds", lambda *_: 0.0)
    monkeypatch.setattr(exchanges, "exchange_seconds", lambda *_: 0.0)
    monkeypatch.setattr(exchanges, "collect", lambda messages, *_: [0.0 for _ in messages])
    for shape in shapes:
        for zero in (0.0, 1.0, 3.0):
            none = step.predict_step(setting(rates, shape=shape, **layout | {"zero": zero}))
            assert none.tensor == none.sending == none.reducing == none.gathering == 0


def test_gradients_hide_behind_a_backward_that_is_long_enough():
    rates = IDEAL
    hidden = step.predict_step(setting(rates, dp=8.0, shard=8.0, zero=1.0))
    assert hidden.reducing == 0
    slow = with_links(inside=1e9, outside=1e9)
    shown = step.predict_step(setting(rates, machine=slow, dp=8.0, shard=8.0, zero=1.0))
    assert shown.reducing > 0


def test_experts_multiply_the_tokens_that_reach_them():
    rows = [p.m for p in work.expert_products(SPARSE, change(LAYOUT, ep=8.0))]
    assert rows == [8192 * 8 / 8] * 2  # 8 of a token's visits over 8 experts of a rank
    flop = sum(p.flop for p in work.expert_products(SPARSE, change(LAYOUT, ep=8.0)))
    assert flop == 2 * 8192 * 8 * 3 * 4096 * 1024


def test_the_parameters_of_a_block_are_llamas():
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert work.plain_weights(SHAPE) == block
    assert work.expert_weights(SPARSE) == 0.75 * 64 * 3 * 4096 * 1024


AXES = {
    "micro_batch": (1.0, 2.0, 8.0), "accumulation": (1.0, 4.0, 16.0), "dp": (1.0, 8.0, 64.0),
    "tp": (1.0, 2.0, 8.0), "cp": (1.0, 2.0), "pp": (1.0, 2.0, 8.0), "chunks": (1.0, 4.0),
    "ep": (1.0, 8.0), "zero": (0.0, 1.0, 3.0), "repeated": (0.0, 0.5, 1.0), "narrow": (0.0, 1.0),
    "trains": (0.0, 1.0), "written_out": (0.0, 1.0), "sequence_parallel": (0.0, 1.0),
    "selective": (0.0, 1.0), "asynchronous": (0.0, 1.0), "balanced": (0.0, 1.0),
    "compiled": (0.0, 1.0),
}  # fmt: skip
layouts = st.fixed_dictionaries({k: st.sampled_from(v) for k, v in AXES.items()}).map(
    lambda chosen: {**chosen, "shard": chosen["dp"]}
)
shapes = st.sampled_from([SHAPE, SPARSE])


@settings(max_examples=60)
@given(layouts, shapes, st.sampled_from(["products", "memory", "host", "inside", "outside"]))
def test_a_faster_machine_never_slows_a_step(layout, shape, what):
    # products and attention both follow the peak; a part of either alone is faster too
    if what in ("inside", "outside"):
        fast = with_links(**{what: 2 * getattr(MACHINE.links, what)})
    else:
        fast = MACHINE._replace(**{what: 2 * getattr(MACHINE, what)})
    before = seconds(shape=shape, **layout)
    assert seconds(shape=shape, machine=fast, **layout) <= before * (1 + 1e-12)


@settings(max_examples=60)
@given(layouts, shapes)
def test_more_recomputation_never_speeds_a_step_up(layout, shape):
    times = [seconds(shape=shape, **{**layout, "repeated": share}) for share in (0.0, 0.5, 1.0)]
    # a gather that recomputation covers may leave the time as it is, but for rounding
    assert all(b >= a * (1 - 1e-12) for a, b in pairwise(times))


@settings(max_examples=30)
@given(st.lists(st.tuples(layouts, shapes), min_size=2, max_size=6))
def test_arrays_are_numbers_side_by_side(cases):
    alone = [seconds(shape=shape, **layout) for layout, shape in cases]
    rows = [list_numbers(change(LAYOUT, **layout)) for layout, _ in cases]
    stacked = Setting(
        work.Shape(*numpy.array([shape for _, shape in cases]).T),
        gather(work.Layout, {name: numpy.array([row[name] for row in rows]) for name in rows[0]}),
        MACHINE,
        USUAL,
    )
    assert step.predict_step(stacked).total == pytest.approx(alone, rel=1e-12)


def test_numbers_of_nested_records_are_read_and_changed_by_their_names():
    changed = change(LAYOUT, tp=4.0, bubble=0.5)
    assert (changed.mesh.tp, changed.stages.bubble) == (4.0, 0.5)
    expected = list_numbers(LAYOUT) | {"tp": 4.0, "bubble": 0.5}
    assert list_numbers(changed) == expected
    for kind in (work.Layout, Rates):
        names = [*kind._fields, *list_names(kind)]  # of its records, and of their numbers
        assert len(set(names)) == len(names)
    with pytest.raises(TypeError, match="Layout has no tensor"):
        change(LAYOUT, tensor=4.0)


def test_choices_take_numbers_and_arrays():
    a = numpy.array([1.0, 5.0])
    assert where(True, 1, 2) == 1
    assert list(where(a > 2, 1, 2)) == [2, 1]
    assert (larger(1, 2), smaller(1, 2), ceil_div(5, 2), log2(8)) == (2, 1, 3, 3.0)
    assert list(larger(a, 2)) == [2, 5]
    assert list(smaller(a, 2)) == [1, 2]
    assert list(log2(numpy.array([2.0, 4.0]))) == [1, 2]
    assert beside(1.0, 0.0) == 1
    assert beside(1.0, 1.0) == pytest.approx(math.sqrt(math.sqrt(2)))
