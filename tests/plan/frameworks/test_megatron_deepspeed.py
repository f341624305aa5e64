"""Megatron-DeepSpeed: states by hand, stages as DeepSpeed deals them, runs that sized BLOOM."""

import pytest

from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB
from memfit.plan.frameworks import Job, find_framework
from memfit.plan.frameworks.megatron.shape import read_shape
from memfit.plan.frameworks.megatron_deepspeed import _deal_stages
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.plan.search.search import predict_request
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Parallel
from memfit.records.request import Request

BLOOM = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "position_embedding_type": "rope"}


def request(hidden=14336, layers=72, heads=64, dp=4, tp=8, pp=12, micro=1, **more):
    options = BLOOM | more.pop("options", {})
    return from_data(
        {
            "model": {
                "name": "sizing", "model_type": "gpt2", "vocab_size": 250880, "n_embd": hidden,
                "n_layer": layers, "n_head": heads, "n_positions": 2048,
            },
            "framework": "megatron-deepspeed", "precision": "fp16-mixed", "recompute": "full",
            "task": {"sequence_length": 2048, "global_batch": 42 * dp * micro},
            "micro_batch": micro,
            "parallel": {"dp_shard": dp, "zero": 1, "tp": tp, "pp": pp},
            "hardware": {"device": "a100-sxm-80", "count": dp * tp * pp},
            "options": options, **more,
        },
        Request, source="test",
    )  # fmt: skip


def predict(**asked):
    recipe, model, _ = read_defaults(request(**asked))
    return predict_ledger(recipe, model, find_device(recipe.device))


@pytest.mark.parametrize(  # chronicles-prequel.md; nvidia-smi of the fullest node, whole GB
    ("asked", "gib"),
    [
        ({}, 29),
        ({"micro": 8}, 69),
        ({"dp": 8, "pp": 6, "micro": 4}, 55),
        ({"dp": 8, "tp": 2, "pp": 24, "micro": 2}, 53),
        ({"hidden": 13824, "layers": 78, "dp": 8, "tp": 4, "heads": 96, "micro": 2}, 48),
        ({"hidden": 14336, "layers": 70, "dp": 8, "tp": 4, "heads": 128, "micro": 2,
          "precision": "bf16-mixed",
          "options": {"pp_partition_method": "type:transformer|embedding"}}, 60),
    ],
)  # fmt: skip
def test_the_device_holds_what_was_measured_within_a_tenth(asked, gib):
    memory = predict_request(request(**asked)).memory
    assert memory.device_total / GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize("asked", [{"dp": 48, "pp": 1}, {"dp": 32, "tp": 2, "pp": 6}])
def test_runs_that_ran_out_are_said_not_to_fit(asked):
    assert predict_request(request(**asked)).memory.verdict == "does_not_fit"


def of(ledger, phase):
    return ledger.by_kind(phase)


def test_states_by_hand():
    # one stage of one block: 12 h^2 + 13 h, the table, the final norm
    small = {"hidden": 1024, "layers": 1, "heads": 16, "tp": 1, "pp": 1, "options": {}}
    count = 12 * 1024**2 + 13 * 1024 + 250880 * 1024 + 2 * 1024
    held = of(predict(dp=4, **small), Phase.BACKWARD)
    assert held[Kind.PARAMETERS] == held[Kind.GRADIENTS] == 2 * count
    assert held[Kind.OPTIMIZER_STATE] == 12 * count // 4
    # the step: the rank's gradients twice in 16 bits, once in fp32; no other gradient any more
    step = of(predict(dp=4, **small), Phase.OPTIMIZER_STEP)
    assert step[Kind.TEMPORARY] == pytest.approx(8 * count / 4, rel=1e-6)
    assert Kind.GRADIENTS not in step
    # the reduction: the rank's share beside the gradients, and a bucket of 5e8
    reduced = of(predict(dp=4, **small), Phase.ACCUMULATE)
    assert reduced[Kind.REDUCE_SCATTER] == 2 * count // 4 + 10**9


def test_without_zero_the_step_holds_two_fp32_copies_of_the_gradients():
    recipe, model, _ = read_defaults(
        request(parallel={"dp_replicate": 4, "tp": 8, "pp": 12}, micro=2)
    )
    ledger = predict_ledger(recipe, model, find_device(recipe.device))
    held = ledger.by_kind(Phase.OPTIMIZER_STEP)
    count = held[Kind.PARAMETERS] // 2
    assert held[Kind.OPTIMIZER_STATE] == 12 * count
    assert held[Kind.GRADIENTS] == 2 * count
    assert held[Kind.TEMPORARY] == 8 * count
    assert ledger.peak_phase == Phase.OPTIMIZER_STEP


def test_a_stage_keeps_what_it_sends_and_receives():
    # 6 blocks' inputs and what is sent, on a later stage what was received too; 12 - stage times
    last = predict(options={"rank": "last"})
    first = predict()
    stream = 2 * 2048 * 14336

    def kept(ledger, part):
        return next((e.nbytes for e in ledger.at(Phase.BACKWARD) if e.owner == part), 0)

    assert kept(first, "blocks' inputs") == 12 * 6 * stream
    assert kept(first, "what the stage sends") == 12 * stream
    assert kept(first, "what the stage received") == 0
    assert kept(last, "what the stage received") == stream


def test_bf16_adds_up_in_fp32_beside_the_16_bit_gradients():
    small = {"hidden": 1024, "layers": 2, "heads": 16, "tp": 1, "pp": 1, "dp": 1}
    wide = of(predict(precision="bf16-mixed", **small), Phase.BACKWARD)
    narrow = of(
        predict(precision="bf16-mixed", options={"fp32_gradients": False}, **small), Phase.BACKWARD
    )
    assert wide[Kind.GRADIENTS] == 3 * narrow[Kind.GRADIENTS]


def sizes(layers, pp, method):
    recipe, model, _ = read_defaults(
        request(layers=layers, pp=pp, options={"pp_partition_method": method})
    )
    job = Job(model=model, recipe=recipe, device=find_device(recipe.device))
    return [len(s.chunks[0]) for s in _deal_stages(read_shape(job), "embedding" in method)]


def test_stages_are_dealt_greedily():
    # "78/12=6.5 - so the last stage has 1 block, while the rest have 7" (the chronicle)
    assert sizes(78, 12, "type:transformer") == [7] * 11 + [1]
    assert sizes(72, 12, "type:transformer") == [6] * 12
    assert sizes(106, 12, "type:transformer|embedding") == [8, *[9] * 10, 8]


def test_every_group_of_ranks_counts():
    framework = find_framework("megatron-deepspeed")
    assert framework.count_groups(Parallel()) == 0
    # all ranks, tensor, model
    assert framework.count_groups(Parallel(tp=8)) == 3
    # all, data, tensor, pipeline, model, tied embeddings, either neighbour
    assert framework.count_groups(Parallel(dp_shard=4, tp=8, pp=12)) == 8
    megatron = find_framework("megatron")
    assert megatron.count_groups(Parallel(dp_shard=4, tp=2)) == 4


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"parallel": {"dp_shard": 4, "tp": 8, "pp": 12, "zero": 3}}, "zero: 3"),
        ({"recompute": "selective"}, "selective"),
        ({"options": {"num_experts": 8}}, "experts"),
        ({"layers": 12, "options": {"pp_partition_method": "type:transformer|embedding"}},
         "without one"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_by_name(asked, names):
    with pytest.raises(InvalidRequest, match=names):
        predict_request(request(**asked))
