"""torchtitan: blocks beside the same blocks in torch, FSDP2's pools beside a traced step."""

import json
from itertools import product
from pathlib import Path

import pytest
from titan_block import alive_after

from memfit import families
from memfit.allocator.tape import FREED
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import Job, find_framework, make_ledger
from memfit.plan.frameworks.shared.fsdp import Unit, gathered
from memfit.plan.frameworks.torchtitan.held import (
    describe_instants,
    saved_by_policy,
    saved_per_token,
)
from memfit.plan.frameworks.torchtitan.stage import (
    count_elements,
    count_stage,
    cut,
    find_stage,
    leave_alike,
    units,
)
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.plan.search.search import predict_request
from memfit.plan.step_time.pipeline.orders import count_held, find_schedule
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Parallel
from memfit.records.request import Request
from tiny_models import CONFIGS, make_recipe

H100 = find_device("h100-sxm")
LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
BLOCK, TABLE = 218_112_000, 525_336_576  # elements of Llama 3 8B's block and embedding


def request(model=None, micro=1, accumulation=1, sequence=8192, version=202508, **changes):
    axes = ("dp_shard", "dp_replicate", "tp", "sequence_parallel", "cp", "pp", "virtual_pp")
    parallel = {k: changes.pop(k) for k in axes if k in changes}
    dp = parallel.get("dp_shard", 1) * parallel.get("dp_replicate", 1)
    world = dp * parallel.get("tp", 1) * parallel.get("pp", 1) * parallel.get("cp", 1)
    data = {
        "framework": "torchtitan", "model": LLAMA | (model or {}), "micro_batch": micro,
        "task": {"sequence_length": sequence, "global_batch": dp * micro * accumulation,
                 "packing": False},
        "parallel": parallel, "options": {"version": version},
        "hardware": {"device": "h100-sxm", "count": world}, **changes,
    }  # fmt: skip
    return from_data(data, Request, source="test")


def make(*args, **changes):
    recipe, model, _ = read_defaults(request(*args, **changes))
    return Job(model=model, recipe=recipe, device=H100)


def ledger(*args, **changes):
    recipe, model, _ = read_defaults(request(*args, **changes))
    return predict_ledger(recipe, model, H100)


def stage_of(job, rank):
    return find_stage(job, rank)


def units_of(job, rank):
    count = count_stage(stage_of(job, rank))
    return units(job, cut(job, count_elements(job.model), count), count)


def part(found, phase, owner):
    return sum(e.nbytes for e in found.at(phase) if e.owner == owner)


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "vocab_size": 128}


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_block_keeps_what_the_same_block_in_torch_keeps(kv_heads):
    sizes = SMALL | {"num_key_value_heads": kv_heads}
    job = make(sizes, sequence=128, recompute="none", version=202412)
    kept, _ = alive_after(64, 8, kv_heads, 96, 128, selective=False)
    assert saved_per_token(job) * 128 == kept


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_policy_keeps_what_torch_s_checkpoint_keeps_by_it(kv_heads):
    job = make(SMALL | {"num_key_value_heads": kv_heads}, sequence=128)
    kept, _ = alive_after(64, 8, kv_heads, 96, 128, selective=True)
    assert saved_by_policy(job) * 128 == kept


def test_compiled_blocks_keep_one_product_less_and_cudnn_s_attention_is_not_listed():
    eager, compiled = saved_by_policy(make()), saved_by_policy(make(compile="blocks"))
    # h 4096, kv 1024, f 14336, 32 heads: x, q, v, gate, attention, log-sum-exp; the last product
    assert eager == 2 * (4096 + 4096 + 1024 + 14336 + 4096) + 4 * 32 + 2 * 4096
    assert eager - compiled == 2 * 4096
    assert compiled - saved_by_policy(make(compile="blocks", attention="cudnn")) == 2 * 4096 + 128


def test_every_second_block_recomputed_keeps_half_of_both():
    found = ledger(recompute={"blocks": 16})
    each = (2 * 4096 + saved_per_token(make(recompute="none"))) / 2
    assert part(found, Phase.LOSS, "blocks") == round(8192 * each) * 32


def test_states_are_16_bytes_a_weight_over_all_ranks_that_share_it():
    n = 32 * BLOCK + 2 * TABLE + 4096
    found = ledger(dp_shard=4, cp=2)
    states = (Kind.PARAMETERS, Kind.OPTIMIZER_STATE, Kind.GRADIENTS)
    step = found.by_kind(Phase.OPTIMIZER_STEP)
    assert sum(step[k] for k in states) == 16 * n // 8
    copies = ledger(dp_shard=4, dp_replicate=2, accumulation=1).by_kind(Phase.OPTIMIZER_STEP)
    assert sum(copies[k] for k in states) == 16 * n // 4


def tape_peaks(tape):
    """Most bytes alive at once, by stream."""
    live, now, most = {}, {}, {}
    for event in tape:
        if event.nbytes > 0:
            live[event.tensor] = event
            now[event.stream] = now.get(event.stream, 0) + event.nbytes
            most[event.stream] = max(most.get(event.stream, 0), now[event.stream])
        elif event.nbytes == FREED and event.tensor in live:
            now[live[event.tensor].stream] -= live.pop(event.tensor).nbytes
    return most


def test_pools_of_fsdp2_s_streams_are_those_of_a_traced_step():
    config = CONFIGS["llama"] | {"vocab_size": 96}
    recipe = make_recipe(config=config, precision="bf16-mixed", parallel=Parallel(dp_shard=4))
    model = families.read_model(recipe.model)
    block = sum(w.numel for w in model.weights if w.layer == 0)
    head = sum(w.numel for w in model.weights if w.part in ("norm", "head") and w.layer < 0)
    table = sum(w.numel for w in model.weights if w.part == "embedding")
    most = tape_peaks(trace(recipe, H100).tape)
    del most[0]  # the stream that computes
    found = gathered((Unit(table, False), *[Unit(block, False)] * 3, Unit(head, True)), 2, 4, 4)
    gradients = 4 * model.parameters // 4
    assert sorted(most.values(), reverse=True) == [found.gather_pool, gradients]


def test_buffers_by_hand():
    some = (Unit(100, False), Unit(40, False), Unit(40, False), Unit(60, True))
    assert gathered(some, 2, 4, 4) == (2 * 60, 2 * (100 + 40 + 25), 4 * (40 + 60))
    row = (Unit(100, False), Unit(40, False, 2), Unit(60, True))
    assert gathered(row, 2, 4, 4) == gathered(some, 2, 4, 4)
    one = (Unit(10, True), Unit(40, False, 0), Unit(40, True))  # the row's other blocks: none
    assert gathered(one, 2, 4, 4) == gathered((one[0], one[2]), 2, 4, 4)
    assert gathered(one, 2, 4, 4) == (2 * 50, 2 * (10 + 40 + 10), 4 * 50)


def test_of_ranks_alike_the_first_has_the_most():
    for changes in ({"pp": 8, "accumulation": 3}, {"pp": 4, "virtual_pp": 4, "accumulation": 20}):
        job = make({"num_hidden_layers": 34}, **changes)
        elements = count_elements(job.model)
        stages = [stage_of(job, rank) for rank in range(job.recipe.parallel.pp)]

        def peak(stage, job=job, elements=elements):
            return make_ledger(describe_instants(job, elements, count_stage(stage))).peak

        few = leave_alike(stages)
        assert len(few) < len(stages)
        assert max(map(peak, few)) == max(map(peak, stages))


def test_units_changed_in_2025_the_ends_are_gathered_apart():
    old, new = (make(dp_shard=8, version=v) for v in (202412, 202508))
    before, after = (units_of(job, 0) for job in (old, new))
    assert before == ((2 * TABLE + 4096, True, 1), (BLOCK, False, 31), (BLOCK, True, 1))
    assert after == ((TABLE, False, 1), (BLOCK, False, 32), (TABLE + 4096, True, 1))


def test_a_logit_s_bytes_by_loss():
    logits = 8192 * 128256
    for changes, nbytes, freed in (
        ({}, 12, 2),
        ({"compile": "blocks"}, 4, 0),
        ({"compile": "blocks", "version": 202412}, 12, 2),
        ({"tp": 8, "sequence_parallel": True}, 2, 0.25),
    ):
        found = ledger(**changes)
        assert found.by_kind(Phase.LOSS)[Kind.LOGITS] == nbytes * logits
        assert part(found, Phase.LOSS, "loss") == (nbytes + freed) * logits


CHUNKED = json.loads(
    (Path(__file__).parents[3] / "bench" / "results" / "torchtitan_loss.json").read_text("utf-8")
)


@pytest.mark.parametrize("row", CHUNKED["rows"], ids=str)
def test_a_loss_of_chunks_adds_what_torchtitan_s_own_does(row):
    """Measured by bench/torchtitan_loss.py; of cut logits, its masks and labels are not counted."""
    sizes = SMALL | {
        "hidden_size": row["hidden"], "vocab_size": row["vocab"], "num_hidden_layers": 2,
        "num_key_value_heads": 8, "tie_word_embeddings": row["tied"],
    }  # fmt: skip
    options = {"version": 202508, "loss_chunks": row["chunks"]}
    job = make(
        sizes, sequence=row["tokens"], loss="chunked", options=options,
        dp_shard=row["ranks"], tp=row["tp"], sequence_parallel=row["tp"] > 1,
    )  # fmt: skip
    count, elements = count_stage(stage_of(job, 0)), count_elements(job.model)
    found = make_ledger(describe_instants(job, elements, count)).at(Phase.LOSS)
    own = ("loss", "hidden", "head", "tied head")
    mine = sum(e.nbytes for e in found if e.owner in own and e.kind is not Kind.FRAGMENTATION)
    head = row["vocab"] * row["hidden"] // row["tp"]
    whole = 0 if row["tied"] else 2 * head  # among `whole weights`, with the norm
    small = 40 * row["tokens"] // row["chunks"] if row["tp"] > 1 else 0
    assert mine + whole == pytest.approx(row["rise"], abs=128 + small)


def test_after_the_chunks_the_head_s_gradient_is_reduced_and_its_weights_given_up():
    whole, chunked = ledger(dp_shard=8), ledger(dp_shard=8, loss="chunked")
    for owner in ("head", "whole weights"):
        assert part(whole, Phase.BACKWARD, owner) >= 2 * TABLE
        assert part(chunked, Phase.BACKWARD, owner) == 0
    assert part(chunked, Phase.BACKWARD, "inputs") == 2 * 4 * BLOCK
    assert part(chunked, Phase.LOSS, "loss") < part(whole, Phase.LOSS, "loss") / 6


def test_a_pipeline_of_chunks_keeps_hidden_states_of_other_micro_batches():
    for loss, width in (("chunked", 4096), ("plain", 128256)):
        job = make(loss=loss, pp=4, accumulation=4, recompute="full")
        last = count_stage(stage_of(job, 3))
        found = make_ledger(describe_instants(job, count_elements(job.model), last))
        assert part(found, Phase.LOSS, "outputs") == 3 * 8192 * 2 * width


def test_a_pipeline_s_ends_hold_fewer_blocks_and_keep_weights_and_gradients_whole():
    model = {"num_hidden_layers": 126}
    job = make(model, pp=8, accumulation=8, recompute="full")
    stages = [stage_of(job, rank) for rank in range(8)]
    assert [s.blocks for s in stages] == [(15,), *[(16,)] * 6, (15,)]
    assert [s.in_flight[0] for s in stages] == [8, 7, 6, 5, 4, 3, 2, 1]
    found = ledger(model, pp=8, accumulation=8, recompute="full")
    n = 15 * BLOCK + TABLE + 4096  # the last rank holds the most: norm, head, logits
    assert part(found, Phase.BACKWARD, "whole weights") == 2 * n
    assert part(found, Phase.BACKWARD, "whole") == 4 * n
    # h 4096, 8192 tokens: the last rank sends nothing on, and has 7 of 8 inputs yet to receive
    assert part(found, Phase.BACKWARD, "pipeline") == (7 + 0 + 1) * 8192 * 2 * 4096
    twice = make(model, pp=8, virtual_pp=2, accumulation=16, recompute="full")
    assert stage_of(twice, 0).blocks == (7, 8)
    assert sum(stage_of(twice, 0).in_flight) == 8 + 2 * 7 + 1


def test_a_pipelines_schedule_says_how_many_micro_batches_are_in_flight():
    """torch's orders, in which tests/plan/step_time/test_orders.py finds the same counts."""

    def ask(schedule, **changes):
        options = {"version": 202508, "pipeline_schedule": schedule}
        return {
            "model": {"num_hidden_layers": 126},
            "recompute": "full",
            "options": options,
            "pp": 4,
        } | changes

    gpipe = make(**ask("GPipe", accumulation=10))
    assert [stage_of(gpipe, rank).in_flight for rank in range(4)] == [(10,)] * 4
    # 10 micro-batches are 2 rounds of 5: (2 - 1) x 5 ahead on every rank, and 2 a hop
    rounds = make(**ask("Interleaved1F1B", accumulation=10, virtual_pp=2))
    assert [sum(stage_of(rounds, rank).in_flight) for rank in range(4)] == [12, 10, 8, 6]
    plan = predict_request(request(**ask("ZBVZeroBubble", accumulation=8, virtual_pp=2)))
    assert plan.memory.peak_allocated is None
    assert "`options.pipeline_schedule: ZBVZeroBubble`" in plan.memory.because


def test_flights_are_those_of_torch_s_own_orders():
    for schedule, chunks in (("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("1F1B", 3)):
        for pp, micro in product((2, 3, 4), (1, 2, 4, 6, 7, 12)):
            options = {"version": 202508, "pipeline_schedule": schedule}
            mesh = {"pp": pp, "virtual_pp": chunks, "accumulation": micro}
            recipe, model, _ = read_defaults(request(options=options, **mesh))
            job = Job(model=model, recipe=recipe, device=H100)
            try:
                asked = find_schedule(recipe)
            except InvalidRequest:
                with pytest.raises(InvalidRequest, match="rounds"):
                    find_framework("torchtitan").check(job)
                continue
            find_framework("torchtitan").check(job)
            for rank in range(pp):
                assert stage_of(job, rank).in_flight == count_held(asked, rank)


def test_reserved_is_slack_over_live_bytes_and_blocks_that_no_one_can_use():
    plan = predict_request(request(dp_shard=8))
    peak = plan.ledger.peak_phase
    unusable = plan.ledger.by_kind(peak)[Kind.FRAGMENTATION]
    assert plan.memory.peak_reserved == round(1.04 * plan.ledger.peak)
    assert plan.memory.peak_allocated == plan.ledger.peak - unusable


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp": 2}, "sequence_parallel"),
        ({"tp": 3, "sequence_parallel": True}, "divide"),
        ({"offload": "parameters"}, "offload"),
        ({"method": "lora"}, "lora"),
    ],
)
def test_what_torchtitan_does_otherwise_is_refused_by_name(changes, words):
    with pytest.raises(InvalidRequest, match=words):
        ledger(**changes)
