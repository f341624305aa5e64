"""nanotron: stages, states and saved tensors by hand; reserved bytes beside a replayed step."""

import pytest
import torch
from nanotron_tape import replay
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import Job
from memfit.plan.frameworks.nanotron import AHEAD, find_stage, saved_bytes
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.plan.search.search import predict_request
from memfit.records import from_data, to_data
from memfit.records.ledger import Kind, Phase
from memfit.records.request import Request

SIZES = {
    "model_type": "llama", "vocab_size": 131072, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def request(model=None, micro=1, accumulation=1, options=None, sequence=4096, **parallel):
    dp = parallel.get("dp_shard", 1) * parallel.get("dp_replicate", 1)
    world = dp * parallel.get("tp", 1) * parallel.get("pp", 1)
    data = {
        "framework": "nanotron", "model": SIZES | (model or {}), "micro_batch": micro,
        "task": {"sequence_length": sequence, "global_batch": dp * micro * accumulation,
                 "packing": False},
        "parallel": {"zero": 1} | parallel, "options": options or {},
        "hardware": {"device": "h100-sxm", "count": world},
    }  # fmt: skip
    return from_data(data, Request, source="test")


def make(*args, **parallel):
    recipe, model, _ = read_defaults(request(*args, **parallel))
    return Job(model=model, recipe=recipe, device=find_device("h100-sxm"))


def ledger(*args, **parallel):
    recipe, model, _ = read_defaults(request(*args, **parallel))
    return predict_ledger(recipe, model, find_device("h100-sxm"))


def bytes_of(found, phase, kind):
    return found.by_kind(phase).get(kind, 0)


def test_states_of_one_rank_are_18_bytes_a_weight_and_20_beside_copies():
    n = 131072 * 2048 + 16 * (4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048)
    alone, copies = ledger(), ledger(dp_replicate=2)
    states = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE)
    assert sum(bytes_of(alone, Phase.LOSS, k) for k in states) == 18 * n
    assert sum(bytes_of(copies, Phase.LOSS, k) for k in states) == 20 * n


def test_zero_1_cuts_master_weights_and_moments_and_no_gradients():
    n = find_stage(make(dp_shard=8), 0).parameters
    found = ledger(dp_shard=8)
    assert bytes_of(found, Phase.LOSS, Kind.OPTIMIZER_STATE) == 12 * n // 8
    assert bytes_of(found, Phase.LOSS, Kind.GRADIENTS) == 4 * n
    assert bytes_of(found, Phase.OPTIMIZER_STEP, Kind.ALL_GATHER) == 4 * n + 2 * n // 8


def test_a_logit_takes_ten_bytes_on_the_last_stage_alone():
    assert bytes_of(ledger(), Phase.LOSS, Kind.LOGITS) == 10 * 4096 * 131072
    assert bytes_of(ledger(tp=2), Phase.LOSS, Kind.LOGITS) == 5 * 4096 * 131072
    assert bytes_of(ledger(pp=2, accumulation=2, options={"rank": "first"}), Phase.FORWARD,
                    Kind.LOGITS) == 0  # fmt: skip


# Blocks cost 4 h^2 + 3 h f, the head vocab x h; shares of 1/pp each.
@pytest.mark.parametrize(
    ("model", "pp", "blocks"),
    [
        ({}, 2, [10, 6]),  # the head costs four blocks: 20 in all, 10 a stage
        ({}, 4, [5, 5, 5, 1]),
        ({"num_hidden_layers": 28, "hidden_size": 3072}, 2, [16, 12]),  # the head 3.56 blocks
        ({"num_hidden_layers": 28, "hidden_size": 3072}, 4, [8, 8, 8, 4]),
    ],
)
def test_blocks_are_dealt_by_cost_and_the_head_takes_its_share(model, pp, blocks):
    job = make(model, pp=pp)
    assert [find_stage(job, rank).blocks for rank in range(pp)] == blocks


def test_one_forward_one_backward_holds_as_many_micro_batches_as_stages_follow():
    job = make(pp=4, accumulation=8)
    assert [find_stage(job, rank).in_flight for rank in range(4)] == [4, 3, 2, 1]
    assert find_stage(make(pp=4, accumulation=2), 0).in_flight == 2
    job = make(pp=4, accumulation=8, options={"pipeline": "afab"})
    assert [find_stage(job, rank).in_flight for rank in range(4)] == [8] * 4


def test_a_tied_table_is_on_both_ends_of_a_pipeline_and_once_without_one():
    table = 131072 * 2048
    job = make(pp=2)
    assert (find_stage(job, 0).embedding, find_stage(job, 1).head) == (table, table)
    assert (find_stage(make(), 0).embedding, find_stage(make(), 0).head) == (table, 0)
    untied = make({"tie_word_embeddings": False})
    assert find_stage(untied, 0).head == table


class Norm(torch.autograd.Function):
    """Keeps what flash-attention's Triton RMSNorm keeps: input, weight, one fp32 number a row."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = x.float().pow(2).mean(-1).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return x * weight

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError


class Attention(torch.autograd.Function):
    """Keeps what `flash_attn_varlen_func` keeps: q, k, v, output, fp32 log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError


def saved_of_a_real_block(hidden, heads, kv_heads, ffn, tokens):
    """Storages that a block written as `LlamaDecoderLayer` saves, weights left out."""
    size = hidden // heads
    make_linear = lambda n, m: nn.Linear(n, m, bias=False, dtype=torch.bfloat16)  # noqa: E731
    qkv, out = make_linear(hidden, (heads + 2 * kv_heads) * size), make_linear(hidden, hidden)
    both, down = make_linear(hidden, 2 * ffn), make_linear(ffn, hidden)
    weight = nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16))
    own = {p.data_ptr() for m in (qkv, out, both, down) for p in m.parameters()}
    own.add(weight.data_ptr())
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    x = torch.ones(tokens, hidden, dtype=torch.bfloat16, requires_grad=True) * 1
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        mixed = qkv(Norm.apply(x, weight))
        if heads == kv_heads:
            q, k, v = mixed.view(tokens, 3, heads, size).permute(1, 0, 2, 3).contiguous()
        else:
            parts = torch.split(mixed, [heads * size, kv_heads * size, kv_heads * size], dim=-1)
            q, k, v = (p.contiguous().view(tokens, -1, size) for p in parts)
        joined = torch.stack([k, v], dim=1).contiguous()
        answer = Attention.apply(q, joined[:, 0], joined[:, 1])
        x = x + out(answer.view(tokens, -1))
        gate, up = torch.split(both(Norm.apply(x, weight)), ffn, dim=-1)
        down(nn.functional.silu(gate) * up)
    return sum(nbytes for nbytes, _ in held.values())


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_block_saves_what_the_same_block_in_torch_saves(kv_heads):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
             "num_key_value_heads": kv_heads, "vocab_size": 128}  # fmt: skip
    assert saved_bytes(make(sizes, sequence=32)) == saved_of_a_real_block(64, 8, kv_heads, 96, 32)


def test_sequence_parallelism_cuts_the_stream_and_without_it_the_stream_is_whole():
    # h = 2048, f = 8192, 32 heads: 20 h + 8 f + 4 a + 8 of a token, by hand
    whole = saved_bytes(make())
    assert whole == 4096 * (20 * 2048 + 8 * 8192 + 4 * 32 + 8)
    assert saved_bytes(make(tp=4, sequence_parallel=True)) == whole // 4
    plain = saved_bytes(make(tp=4))
    assert plain == 4096 * (8 * 2048 + 8 + (12 * 2048 + 8 * 8192 + 4 * 32) // 4)
    kept = saved_bytes(make(tp=4, sequence_parallel=True, options={"recompute_allgather": False}))
    assert kept - whole // 4 == 4096 * 4 * 2048 * 3 // 4


@pytest.mark.parametrize(
    ("micro", "pp", "parallel"),
    [(1, 2, {"dp_replicate": 4}), (2, 4, {"dp_shard": 8}), (1, 8, {"dp_shard": 2})],
)
def test_reserved_bytes_are_near_those_of_a_replayed_step(micro, pp, parallel):
    sizes = {"num_hidden_layers": 28, "hidden_size": 3072}
    job = make(sizes, micro=micro, accumulation=2 * pp, pp=pp, options={"rank": "first"},
               **parallel)  # fmt: skip
    stage = find_stage(job, 0)
    replayed = replay(
        job.model.architecture, blocks=stage.blocks, micro_batches=pp + 1, in_flight=pp,
        tokens=job.recipe.tokens, shards=job.recipe.parallel.dp_shard,
        replicas=job.recipe.parallel.dp_replicate,
    )  # fmt: skip
    found = ledger(sizes, micro=micro, accumulation=2 * pp, pp=pp, options={"rank": "first"},
                   **parallel)  # fmt: skip
    assert found.peak == pytest.approx(replayed, rel=0.04)


def test_blocks_of_collectives_wait_where_the_device_is_slower_than_the_cpu():
    def waiting(**asked):
        found = ledger(options={"rank": "first"}, **asked)
        return sum(e.nbytes for e in found.at(Phase.LOSS) if e.owner == "collectives")

    assert waiting(micro=8, accumulation=8) == 0
    assert waiting(micro=8, accumulation=8, tp=4) == 0  # all-reduces are in place
    busy = waiting(micro=8, accumulation=8, tp=4, sequence_parallel=True)
    most = AHEAD * 8 * 4096 * (4 * 2048 + 4 * 2048 // 4)
    assert 0.7 * most < busy < most
    light = waiting(micro=1, accumulation=8, tp=8, sequence_parallel=True)
    assert light == 0  # a pass is over before the CPU has launched the next


def test_reserved_counts_blocks_that_cannot_be_used_and_allocated_does_not():
    plan = predict_request(
        request(micro=8, accumulation=8, tp=4, sequence_parallel=True, options={"rank": "first"})
    )
    found = plan.ledger
    unusable = bytes_of(found, Phase.LOSS, Kind.FRAGMENTATION)
    assert unusable > 0
    assert plan.memory.peak_allocated == found.total(Phase.LOSS) - unusable
    assert plan.memory.peak_reserved == round(found.peak * 1.04)


def test_recomputing_keeps_a_block_s_input_and_one_block():
    asked = request(accumulation=2)
    full = predict_request(from_data(
        {**to_data(asked), "recompute": "full"}, Request, source="test"
    )).ledger  # fmt: skip
    kept = bytes_of(full, Phase.LOSS, Kind.ACTIVATIONS)
    assert kept == 16 * 4096 * 2 * 2048 + saved_bytes(make())


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"dp_shard": 2, "zero": 3}, "ZeRO-1"),
        ({"dp_shard": 2, "dp_replicate": 2}, "dp_replicate"),
        ({"tp": 3}, "divide"),
        ({"cp": 2}, "cp"),
    ],
)
def test_what_nanotron_cannot_do_is_refused_by_name(parallel, words):
    with pytest.raises(InvalidRequest, match=words):
        ledger(**parallel)


def test_the_fullest_rank_may_be_the_last_and_rank_0_is_asked_for_by_name():
    few = {"num_hidden_layers": 4}
    first = ledger(few, micro=8, pp=2, accumulation=2, options={"rank": "first"})
    fullest = ledger(few, micro=8, pp=2, accumulation=2)
    assert bytes_of(first, Phase.LOSS, Kind.LOGITS) == 0
    assert bytes_of(fullest, Phase.LOSS, Kind.LOGITS) > 0
    assert fullest.peak > first.peak


def test_devices_alone_share_optimizer_states_by_zero_1():
    data = to_data(request()) | {
        "parallel": "auto", "hardware": {"device": "h100-sxm", "count": 8},
        "task": {"sequence_length": 4096, "global_batch": 8, "packing": False},
    }  # fmt: skip
    recipe = read_defaults(from_data(data, Request, source="test"))[0]
    assert (recipe.parallel.dp_shard, recipe.parallel.zero) == (8, 1)
    assert predict_request(from_data(data, Request, source="test")).ledger == ledger(dp_shard=8)


def test_a_rank_without_a_block_holds_nothing():
    small = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512}
    job = make(small, pp=4)
    blocks = [find_stage(job, rank).blocks for rank in range(4)]
    assert 0 in blocks[1:3]
    assert ledger(small, pp=4).peak > 0
