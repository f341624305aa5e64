"""Megatron-LM's step: published sums, hand-worked schedules, measured peaks, refusals."""

import json
import sys
import time
from itertools import product
from pathlib import Path

import numpy
import pytest
from megatron_jobs import DROPOUT, GPT, LLAMA_70B_CUT, job, one_stage, predict

from memfit import catalog, families
from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB
from memfit.plan.frameworks import find_framework
from memfit.plan.frameworks.megatron import stage as stages
from memfit.plan.frameworks.megatron.block import save_block
from memfit.plan.frameworks.megatron.settings import read_settings
from memfit.plan.frameworks.megatron.shape import read_shape
from memfit.plan.frameworks.megatron.split import deal_stages
from memfit.plan.frameworks.shared.pipeline import count_in_flight, deal_blocks
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.plan.search.search import predict_request
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.request import Request

ROOT = Path(__file__).parents[3]


def test_what_selective_recompute_drops_comes_back_for_one_block():
    ledgers = [
        predict(length=2048, attention="eager", recompute=how, options=DROPOUT, parallel={"pp": 2})
        for how in ("none", "selective")
    ]
    kinds = [ledger.by_kind(Phase.BACKWARD)[Kind.ACTIVATIONS] for ledger in ledgers]
    scores = 5 * 16 * 4 * 2048**2
    # two stages of 12 blocks and one micro-batch: 12 blocks in flight, of which one is back
    assert kinds[0] - kinds[1] == 12 * 1 * scores - scores


def test_full_recompute_keeps_inputs_and_one_block_at_a_time():
    none, full = (predict(options=DROPOUT, recompute=how) for how in ("none", "full"))
    stream = 2 * 1024 * 4 * 1024
    inputs = [e for e in full.at(Phase.BACKWARD) if e.owner == "blocks' inputs"]
    assert [e.nbytes for e in inputs] == [24 * stream]
    again = [e for e in full.at(Phase.BACKWARD) if e.owner == "computed again"]
    one = save_block(read_shape(job(options=DROPOUT)), read_settings(job()).block, moe=False)
    assert again[0].nbytes == sum(one.values()) + 2 * 1024 * 4 * 1024 - stream  # two masks of 1 B
    assert full.peak < none.peak


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "gpt2", "qwen3-8b", "opt-1.3b", "bloom-560m", "qwen1.5-moe-a2.7b",
     "mixtral-8x7b-v0.1", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3"],
)  # fmt: skip
def test_one_rank_has_the_models_parameters(name):
    reference = catalog.find_model(name).reference()
    model = families.read_model(reference)
    made = job(
        model={"name": name, **reference.config}, length=128, micro=1, batch=1,
        options={"make_vocab_size_divisible_by": 1},
    )  # fmt: skip
    assert sum(stages.count_parameters(*one_stage(made))) == model.parameters


def test_states_are_18_bytes_and_6_and_12_over_the_distributed_optimizers_ranks():
    for shards, each in ((1, 18), (8, 6 + 12 / 8)):
        made = job(batch=32, parallel={"dp_shard": shards})
        shape, blocks, count = one_stage(made)
        held = stages.hold_states(shape, read_settings(made), blocks, count)
        total = sum(nbytes for nbytes, _ in held.values())
        assert total == pytest.approx(each * made.model.parameters, rel=1e-9)


def test_16_bit_gradients_are_copied_to_fp32_in_the_optimizers_step():
    options = {"accumulate_allreduce_grads_in_fp32": False}
    plain, half = predict(), predict(precision="fp16-mixed", options=options)
    parameters = job().model.parameters

    def of(ledger, kind, phase):
        return ledger.by_kind(phase).get(kind, 0)

    assert of(plain, Kind.GRADIENTS, Phase.LOSS) == 4 * parameters
    assert of(half, Kind.GRADIENTS, Phase.LOSS) == 2 * parameters
    assert of(half, Kind.TEMPORARY, Phase.OPTIMIZER_STEP) == 4 * parameters
    assert of(plain, Kind.TEMPORARY, Phase.OPTIMIZER_STEP) == 0


def simulate(stage, stages, chunks, micro_batches, group):
    """Forwards minus backwards of Megatron's own order of work; the most there are."""
    total = micro_batches * chunks
    warmup = stages - stage - 1
    if chunks > 1:
        warmup = 2 * warmup + (chunks - 1) * group
    warmup = min(warmup, total)
    alive = most = warmup
    for _ in range(total - warmup):
        alive += 1
        most = max(most, alive)
        alive -= 1
    return most


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 4, 8, 12])
def test_in_flight_is_what_the_schedule_leaves_open(stage, chunks, micro_batches):
    counts = count_in_flight(stage, stages=4, chunks=chunks, micro_batches=micro_batches)
    assert sum(counts) == simulate(stage, 4, chunks, micro_batches, 4)
    assert max(counts) <= micro_batches


def test_interleaved_chunks_by_hand():
    # stage 0 of 4 with 2 chunks: 3 x 2 + 4 forwards of warm-up and one more: 0 0 0 0 1 1 1 1 0 0 0
    assert count_in_flight(0, stages=4, chunks=2, micro_batches=8) == (7, 4)
    assert count_in_flight(3, stages=4, chunks=2, micro_batches=8) == (4, 1)
    # groups of 5 micro-batches: 2 x 5 of warm-up and one more on the last of 3 chunks
    assert count_in_flight(3, stages=4, chunks=3, micro_batches=5, group=5) == (5, 5, 1)
    assert deal_blocks(8, 2, 2) == ((range(2), range(4, 6)), (range(2, 4), range(6, 8)))


def deal_one_by_one(stage, stages, chunks, micro_batches, group):
    """The forwards of an interleaved schedule's warm-up and one more, each to its chunk."""
    total = micro_batches * chunks
    counts = [0] * chunks
    for forward in range(min((stages - stage - 1) * 2 + (chunks - 1) * group + 1, total)):
        lap, inside = divmod(forward, group * chunks)
        left = min(group, micro_batches - lap * group)  # the last group may be short
        counts[min(inside // left, chunks - 1)] += 1
    return tuple(counts)


def test_in_flight_of_each_chunk_is_what_dealing_forwards_one_by_one_gives():
    for stages_, chunks, micro_batches in product((2, 3, 8), (2, 3, 5), (1, 2, 7, 8, 24)):
        for stage, group in product(range(stages_), (0, 1, 3, 8)):
            dealt = deal_one_by_one(stage, stages_, chunks, micro_batches, group or stages_)
            asked = {"stages": stages_, "chunks": chunks, "group": group}
            assert count_in_flight(stage, micro_batches=micro_batches, **asked) == dealt
            many = count_in_flight(stage, micro_batches=numpy.array([micro_batches] * 2), **asked)
            assert [int(each[1]) for each in many] == list(dealt)


def test_no_stage_holds_more_than_the_first_of_those_alike():
    for model, pp, chunks in ((GPT, 8, 3), (GPT | {"n_layer": 48}, 4, 2), (GPT, 6, 1)):
        options = {"decoder_first_pipeline_num_layers": 9, "decoder_last_pipeline_num_layers": 7}
        uneven = {"options": options} if chunks == 1 else {}
        mesh = {"pp": pp, "virtual_pp": chunks}
        made = job(model=model, parallel=mesh, batch=64, **uneven)
        shape, settings = read_shape(made), read_settings(made)
        blocks, dealt = stages.read_blocks(shape, settings), deal_stages(made, shape)
        peaks = {}
        for stage in dealt:
            flights = stages.find_flights(shape, settings, stage)
            count = stages.count_stage(shape, settings, stage, flights)
            instants = stages.describe_instants(shape, settings, blocks, count)
            peaks[stage.index] = stages.peak_of(instants)
        few = stages.leave_alike(shape.experts, dealt)
        assert len(few) < len(dealt)
        assert max(peaks[stage.index] for stage in few) == max(peaks.values())


def test_the_first_stage_is_the_fullest_where_blocks_outweigh_the_head():
    model = GPT | {"n_layer": 48}
    pipeline = {"parallel": {"pp": 8}, "batch": 64, "model": model, "options": DROPOUT}
    ledger = predict(**pipeline)
    assert "8 forwards in flight on stage 0" in {e.because for e in ledger.at(Phase.BACKWARD)}
    last = predict(**pipeline | {"options": DROPOUT | {"rank": "last"}})
    first = predict(**pipeline | {"options": DROPOUT | {"rank": "first"}})
    assert last.peak < first.peak == ledger.peak
    assert last.peak_phase == Phase.LOSS


def test_uneven_and_counted_splits():
    made = job(
        model=GPT | {"n_layer": 12}, batch=32, parallel={"pp": 4},
        options={"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2},
    )  # fmt: skip
    dealt = deal_stages(made, read_shape(made))
    assert [len(s.chunks[0]) for s in dealt] == [2, 4, 4, 2]
    made = job(
        model=GPT | {"n_layer": 14}, batch=32, parallel={"pp": 4, "virtual_pp": 2},
        options={
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    )  # fmt: skip
    dealt = deal_stages(made, read_shape(made))
    assert [[len(c) for c in s.chunks] for s in dealt] == [[1, 2], [2, 2], [2, 2], [2, 1]]


MEASURED = [  # max_memory_allocated, GiB; published by MooreThreads/SimuMax (8 B200)
    ({"tp": 1, "pp": 2, "dp_shard": 4}, 4096, 66.55),
    ({"tp": 2, "dp_shard": 4, "sequence_parallel": True}, 4096, 60.68),
    ({"tp": 8, "sequence_parallel": True}, 4096, 28.29),
    ({"tp": 2, "cp": 4, "sequence_parallel": True}, 32768, 68.43),
    ({"cp": 8}, 131072, 147.99),
]


@pytest.mark.parametrize(("parallel", "length", "gib"), MEASURED)
def test_a_gated_model_is_within_half_a_percent_of_what_was_measured(parallel, length, gib):
    ledger = predict(
        model=LLAMA_70B_CUT, device="b200-sxm", length=length, micro=1,
        batch=4 * parallel.get("dp_shard", 1), parallel=parallel, attention="cudnn",
        options={
            "cross_entropy_loss_fusion": "te", "create_attention_mask_in_dataloader": False,
            "cp_comm_type": "a2a",
        },
    )  # fmt: skip
    assert ledger.peak / GIB == pytest.approx(gib, rel=0.005)


def test_golden_values_are_met_where_nothing_is_routed_by_data():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from published.megatron_golden import translate
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    cases = {  # test and machine -> GiB of mem-max-allocated-bytes
        ("gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files", "dev_dgx_a100"): 4.352,
        ("gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer", "dev_dgx_h100"): 2.507,
        ("gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap", "dev_dgx_a100"): 4.281,
        ("gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute", "dev_dgx_h100"): 2.385,
        ("gpt3_mcore_tp1_pp4", "dev_dgx_a100"): 2.56,
        ("gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion", "dev_dgx_h100"): 1.711,
        ("gpt3_mcore_tp2_pp2_uninstall_te", "dev_dgx_a100"): 1.943,
    }
    for (name, machine), gib in cases.items():
        request = translate({"case": f"gpt/{name}", "hw": machine}).request
        recipe, model, _ = read_defaults(from_data(request, Request, source=name))
        ledger = predict_ledger(recipe, model, find_device(recipe.device))
        assert ledger.peak / GIB == pytest.approx(gib, rel=0.01), name


def test_a_backward_holds_the_streams_gradient_and_the_first_linears():
    tokens, h, f = 4096, 1024, 4096
    entries = predict(batch=4).at(Phase.BACKWARD)
    extra = next(e.nbytes for e in entries if (e.kind, e.owner) == (Kind.TEMPORARY, "blocks"))
    assert extra == 2 * tokens * h + 2 * tokens * f


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"parallel": {"dp_shard": 2, "zero": 3}, "batch": 8}, "zero: 3"),
        ({"parallel": {"tp": 3}}, "16 attention heads"),
        ({"parallel": {"dp_shard": 2, "ep": 2}, "batch": 8}, "experts"),
        ({"parallel": {"pp": 5}, "batch": 40, "options": {"decoder_first_pipeline_num_layers": 1}},
         "24 blocks"),
        ({"parallel": {"pp": 5}, "batch": 40}, "24 blocks"),
        ({"parallel": {"virtual_pp": 2}}, "virtual_pp: 2"),
        ({"model": LLAMA_70B_CUT, "parallel": {"tp": 16}}, "8 key-value heads"),
        ({"options": {"recompute_modules": "core_atn"}}, "core_atn"),
        ({"attention": "math"}, "attention: math"),
        ({"method": "freeze"}, "method: freeze"),
        ({"precision": "fp8-mixed", "options": {"num_experts": 8}}, "fp8-mixed"),
        ({"method": "lora", "lora": {"targets": ["mlp"]}}, "mlp"),
        ({"method": "lora", "options": {"num_experts": 8}}, "adapters beside experts"),
        ({"options": {"hiden_dropout": 0.1}}, "hiden_dropout"),
    ],
)  # fmt: skip
def test_what_megatron_cannot_do_is_refused_by_name(asked, names):
    with pytest.raises(InvalidRequest, match=names):
        predict(**asked)


@pytest.mark.parametrize("name", ["olmo-2-1b", "opt-350m"])
def test_models_with_other_parts_are_refused(name):
    reference = catalog.find_model(name).reference()
    with pytest.raises(InvalidRequest, match="parameters"):
        predict(model={"name": name, **reference.config}, length=128)


def test_moments_in_16_bits_take_half():
    whole = predict(batch=8, parallel={"dp_shard": 2})
    half = predict(
        batch=8, parallel={"dp_shard": 2},
        options={"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    )  # fmt: skip
    was, now = (x.by_kind(Phase.LOSS)[Kind.OPTIMIZER_STATE] for x in (whole, half))
    assert (was, now) == (6 * job().model.parameters, 4 * job().model.parameters)


def test_parallel_residuals_are_refused():
    pythia = catalog.find_model("pythia-1b").reference()
    with pytest.raises(InvalidRequest, match="side by side"):
        predict(model={"name": "pythia-1b", **pythia.config}, length=128)


def test_a_prediction_names_the_three_numbers():
    plan = predict_request(
        from_data(
            {
                "model": "llama-3.1-8b", "framework": "megatron", "micro_batch": 1,
                "task": {"sequence_length": 8192, "global_batch": 8},
                "hardware": {"device": "h100-sxm", "count": 8},
                "parallel": {"tp": 2, "dp_shard": 4, "zero": 1, "sequence_parallel": True},
            },
            Request, source="test",
        )
    )  # fmt: skip
    memory = plan.memory
    assert memory.peak_allocated < memory.peak_reserved < memory.device_total
    assert memory.verdict in ("fits", "at_risk")


def test_left_on_auto_all_devices_share_the_states():
    request = from_data(
        {
            "model": "gpt2", "framework": "megatron", "task": {"global_batch": 8},
            "hardware": {"device": "h100-sxm", "count": 8},
        },
        Request, source="test",
    )  # fmt: skip
    parallel = predict_request(request).recipe.parallel
    assert (parallel.dp_shard, parallel.zero, parallel.world) == (8, 1, 8)


def test_a_deep_pipeline_takes_milliseconds_at_most():
    made = job(
        model=LLAMA_70B_CUT | {"num_hidden_layers": 128}, device="b200-sxm", micro=1, batch=64,
        parallel={"pp": 16, "virtual_pp": 4},
    )  # fmt: skip
    best = min(_seconds(made) for _ in range(5))
    assert best < 0.02


def _seconds(made):
    start = time.process_time()  # of this process, whatever else the machine does
    find_framework("megatron").predict(made)
    return time.process_time() - start


def test_arguments_of_golden_values_are_complete():
    text = (ROOT / "scripts/published/megatron_arguments.json").read_text(encoding="utf-8")
    for case, forms in json.loads(text).items():
        for form in forms:
            assert {"machines", "gpus", "arguments", "environment"} == set(form), case
