"""torchtune: its README's ladder of techniques, blocks beside torch's, 4-bit weights by torchao."""

import pytest
import torch
from titan_block import alive_after
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB
from memfit.plan.frameworks import Job
from memfit.plan.frameworks.torchtune import NF4, measure, saved_per_token
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.plan.search.search import predict_request
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.request import Request

A100 = find_device("a100-sxm-80")
SMALL = {  # Llama 3.2 3B
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
BLOCK = 3072 * 128 * (2 * 24 + 2 * 8) + 3 * 3072 * 8192 + 2 * 3072
TABLE = 128256 * 3072


def request(model=None, micro=2, sequence=4096, accumulation=1, shards=1, options=None, **changes):
    data = {
        "framework": "torchtune", "model": SMALL | (model or {}), "micro_batch": micro,
        "task": {"sequence_length": sequence, "global_batch": micro * accumulation * shards},
        "parallel": {"dp_shard": shards}, "options": options or {},
        "hardware": {"device": "a100-sxm-80", "count": shards}, **changes,
    }  # fmt: skip
    return from_data(data, Request, source="test")


def make(*args, **changes):
    recipe, model, _ = read_defaults(request(*args, **changes))
    return Job(model=model, recipe=recipe, device=A100)


def ledger(*args, **changes):
    recipe, model, _ = read_defaults(request(*args, **changes))
    return predict_ledger(recipe, model, A100)


PLAIN = {"loss": "plain", "recompute": "none"}
CHUNKED = {"recompute": "none", "compile": "blocks"}
AT_ONCE = {"compile": "blocks", "options": {"optimizer_in_bwd": True}}


# README.md: 3B, batch 2, 4096 tokens, packed, bf16, one A100; active GiB, cumulative techniques.
# (Those that are kept to judge predictions by are not here.)
@pytest.mark.parametrize(
    ("asked", "measured"),
    [
        (PLAIN | {"compile": "blocks"}, 51.0),
        (CHUNKED, 42.9),
        (AT_ONCE, 23.1),
        (AT_ONCE | {"offload": "activations"}, 21.8),
    ],
)
def test_the_readme_s_ladder_of_techniques_is_met_within_one_and_a_half_percent(asked, measured):
    plan = predict_request(request(**asked))
    assert plan.memory.peak_allocated / GIB == pytest.approx(measured, rel=0.015)


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_block_keeps_what_the_same_block_in_torch_keeps(kv_heads):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
             "vocab_size": 128, "num_key_value_heads": kv_heads}  # fmt: skip
    kept, _ = alive_after(64, 8, kv_heads, 96, 128, selective=False)
    assert saved_per_token(make(sizes, sequence=128, recompute="none")) * 128 == kept


def test_a_4_bit_weight_takes_the_bytes_of_torchao_s():
    weight = to_nf4(torch.randn(1024, 1024, dtype=torch.bfloat16))
    names, _ = weight.__tensor_flatten__()
    parts = [getattr(weight, name) for name in names]
    large = sum(t.numel() * t.element_size() for t in parts if t.numel() > 16)
    assert large == NF4 * weight.numel()


def test_adapters_by_hand():
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    sizes = measure(make(method="lora", lora={"rank": 64, "targets": targets}))
    each = (3072 + 3072) + (3072 + 1024) + (3072 + 3072) + 3 * (3072 + 8192)
    assert sizes.adapters == 64 * each
    assert (sizes.targets, sizes.trained) == (6, 28 * 64 * each)
    assert sizes.stored == 28 * 2 * (BLOCK + 64 * each) + 2 * (TABLE + 3072)
    between = saved_per_token(make(method="lora", lora={"rank": 64, "targets": targets}))
    assert between - saved_per_token(make()) == 2 * 64 * 6
    four = measure(make(method="lora", base_format="nf4", lora={"rank": 64, "targets": targets}))
    matrices = BLOCK - 2 * 3072
    assert four.stored == pytest.approx(sizes.stored - 28 * (2 - NF4) * matrices, rel=1e-12)


def test_full_training_in_bf16_takes_8_bytes_a_weight_and_the_tied_table_s_gradient_twice():
    n = 28 * BLOCK + TABLE + 3072
    step = ledger().at(Phase.OPTIMIZER_STEP)
    assert sum(e.nbytes for e in step) == 8 * n + 2 * TABLE
    at_once = ledger(options={"optimizer_in_bwd": True}).at(Phase.OPTIMIZER_STEP)
    assert sum(e.nbytes for e in at_once) == 6 * n + 2 * TABLE
    fewer = ledger(optimizer={"name": "adamw8bit"}).by_kind(Phase.LOSS)[Kind.OPTIMIZER_STATE]
    assert fewer == round(2 * (1 + 4 / 256) * n)
    foreach = ledger(optimizer={"implementation": "foreach"}).by_kind(Phase.OPTIMIZER_STEP)
    assert foreach[Kind.TEMPORARY] == 2 * n


def test_shards_cut_states_and_a_tied_root_is_gathered_once():
    n = 28 * BLOCK + TABLE + 3072
    found = ledger(shards=4)
    assert found.by_kind(Phase.LOSS)[Kind.PARAMETERS] == 2 * n // 4
    assert found.by_kind(Phase.LOSS)[Kind.ALL_GATHER] == 2 * TABLE
    offloaded = ledger(shards=4, offload="parameters").by_kind(Phase.LOSS)
    assert Kind.PARAMETERS not in offloaded
    apart = ledger(shards=4, options={"custom_sharded_layers": True})
    pool = apart.by_kind(Phase.LOSS)[Kind.FRAGMENTATION]
    assert pool == 2 * (TABLE + BLOCK + TABLE // 4)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"base_format": "nf4"}, "cannot be trained"),
        ({"accumulation": 2, "options": {"optimizer_in_bwd": True}}, "micro-batches"),
        ({"precision": "bf16-mixed"}, "precision"),
        ({"options": {"optimizer_in_bw": True}}, "optimizer_in_bw"),
    ],
)
def test_what_the_recipes_refuse_is_refused_by_name(asked, words):
    with pytest.raises(InvalidRequest, match=words):
        ledger(**asked)
