"""Blocks of Megatron-LM: the papers' sums, experts, latent attention, adapters, all by hand too."""

import pytest
from megatron_jobs import DROPOUT, LLAMA_70B_CUT, job, one_stage, predict
from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB
from memfit.plan.frameworks import find_framework
from memfit.plan.frameworks.megatron import stage as stages
from memfit.plan.frameworks.megatron.block import save_block
from memfit.plan.frameworks.megatron.settings import read_settings
from memfit.plan.frameworks.megatron.shape import read_shape
from memfit.records.ledger import Kind, Phase
from memfit.records.model import Architecture, Experts, Latent, Model, Weight


def kept(made, moe=False):
    """Bytes that one block keeps, without statistics and log-sum-exp (which the papers drop)."""
    shape = read_shape(made)
    total = sum(save_block(shape, read_settings(made).block, moe=moe).values())
    return total - 2 * shape.norm * 4 * shape.own_tokens


@pytest.mark.parametrize(
    ("tp", "sp", "expected"),  # Korthikanti et al. 2205.05198, Table 2, in bytes / sbh
    [
        (1, False, lambda t, scores: 34 + scores),
        (4, False, lambda t, scores: 10 + 24 / t + scores / t),
        (4, True, lambda t, scores: (34 + scores) / t),
    ],
)
def test_a_block_keeps_what_korthikanti_counts(tp, sp, expected):
    made = job(
        length=2048, attention="eager", options=DROPOUT,
        parallel={"tp": tp, "sequence_parallel": sp},
    )  # fmt: skip
    a = made.model.architecture
    scores = 5 * a.heads * 2048 / a.hidden
    sbh = 2048 * 4 * a.hidden
    assert kept(made) == sbh * expected(tp, scores)


@pytest.mark.parametrize(("dropout", "fused", "unfused"), [(0.1, 5, 7), (0.0, 2, 6)])
def test_probabilities_by_hand(dropout, fused, unfused):
    # fused: 2 of the softmax, with dropout 1 + 2 more; unfused 4 in fp32 and 2 that are multiplied
    for fusion, each in ((True, fused), (False, unfused)):
        options = {"attention_dropout": dropout, "masked_softmax_fusion": fusion}
        made = job(attention="eager", options=options)
        parts = save_block(read_shape(made), read_settings(made).block, moe=False)
        assert parts["probabilities"] == each * 16 * 4 * 1024**2


def test_selective_recompute_drops_the_scores_alone():
    made = job(
        length=2048, attention="eager", recompute="selective", options=DROPOUT,
        parallel={"tp": 4, "sequence_parallel": True},
    )  # fmt: skip
    assert kept(made) == 2048 * 4 * 1024 * 34 / 4


def deepseek(hidden, ffn, experts, vocab, **mesh):
    """4 blocks of DeepSeek's, of which the first is dense, on 8 B200."""
    a = Architecture(
        family="deepseek", layers=4, hidden=hidden, heads=128, kv_heads=128, head_dim=192, ffn=ffn,
        vocab=vocab, max_sequence=4096, rotary_dim=64, experts=experts,
        latent=Latent(kv_rank=512, query_rank=1536, rotated=64, unrotated=128, value=128),
    )  # fmt: skip
    made = job(
        device="b200-sxm", length=4096, micro=1, batch=4 * mesh["dp_shard"], attention="cudnn",
        parallel={axis: n for axis, n in mesh.items() if axis != "ep"},
        options={
            "cross_entropy_loss_fusion": "te", "create_attention_mask_in_dataloader": False,
            "expert_tensor_parallel_size": 1,
        },
    )  # fmt: skip
    model = Model(
        name="deepseek", architecture=a, weights=(Weight(name="norm", shape=(1,), part="norm"),)
    )
    parallel = replace(made.recipe.parallel, ep=mesh["ep"])
    return replace(made, model=model, recipe=replace(made.recipe, parallel=parallel))


V2 = Experts(count=160, per_token=6, ffn=1536, shared_ffn=3072, dense_layers=1)


V3 = Experts(count=256, per_token=8, ffn=2048, shared_ffn=2048, dense_layers=1)


@pytest.mark.parametrize(  # published by MooreThreads/SimuMax
    ("made", "gib"),
    [
        (deepseek(5120, 12288, V2, 102400, dp_shard=8, ep=8), 45.63),
        (deepseek(5120, 12288, V2, 102400, dp_shard=4, pp=2, ep=4), 44.70),
        (deepseek(7168, 18432, V3, 129280, dp_shard=4, pp=2, ep=4), 114.00),
    ],
    ids=["V2", "V2 in two stages", "V3 in two stages"],
)
def test_experts_and_latent_attention_within_one_percent_of_what_was_measured(made, gib):
    assert find_framework("megatron").predict(made).peak / GIB == pytest.approx(gib, rel=0.01)


def test_latent_attention_by_hand():
    made = deepseek(5120, 12288, V2, 102400, dp_shard=8, ep=8)
    parts = save_block(read_shape(made), read_settings(made).block, moe=False)
    tokens = 4096
    assert parts["query, key, value"] == 2 * tokens * 128 * (192 + 192 + 128)
    # compressed queries and keys, before and behind their norms, and the keys' rotated part
    compressed = 2 * tokens * (2 * 1536 + 2 * 512 + 64)
    assert parts["latent"] == compressed + 2 * 4 * tokens  # and two statistics
    assert parts["attention's output"] == 2 * tokens * 128 * 128
    assert parts["log-sum-exp"] == 4 * tokens * 128
    shape = read_shape(made)
    down = 5120 * (1536 + 512 + 64)
    up = 1536 * 128 * 192 + 512 * 128 * (128 + 128)
    norms = 5120 + 1536 + 512
    assert shape.attention_parameters == down + up + norms + 128 * 128 * 5120


EXPERTS = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 4096}


def test_experts_by_hand():
    made = job(batch=16, parallel={"dp_shard": 4, "ep": 4}, options=EXPERTS)
    shape, blocks, count = one_stage(made)
    dense, expert = stages.count_parameters(shape, blocks, count)
    one = 2 * 1024 * 4096 + 4096 + 1024
    assert expert == 24 * 2 * one  # 8 experts on 4 ranks
    router = 24 * 8 * 1024
    assert dense == made.model.parameters - 24 * one + router
    parts = save_block(shape, read_settings(made).block, moe=True)
    copies = 2 * 4096  # of 4096 tokens, each to 2 experts
    assert parts["experts, tokens"] == 2 * copies * 1024
    assert parts["experts, first linear"] == 2 * copies * 4096
    assert parts["experts, activation"] == 2 * (2 * copies * 4096)  # and beside it, weighed
    again = {"recompute": "selective", "options": EXPERTS | {"recompute_modules": "moe_act"}}
    other = job(batch=16, parallel={"dp_shard": 4, "ep": 4}, **again)
    less = save_block(read_shape(other), read_settings(other).block, moe=True)
    assert "experts, activation" not in less
    # dp x tp = 4 ranks, of which 4 hold different experts: none shares an expert's states
    assert (shape.mesh.shards, shape.mesh.expert_shards) == (4, 1)


def test_grouped_products_have_a_workspace_on_each_of_four_streams():
    held = []
    for grouped in (False, True):
        ledger = predict(
            batch=16, device="h100-sxm", parallel={"dp_shard": 4, "ep": 4},
            options=EXPERTS | {"moe_grouped_gemm": grouped},
        )  # fmt: skip
        held += [e.nbytes for e in ledger.at(Phase.LOSS) if e.owner == "Transformer Engine"]
    assert held == [32 * 2**20 + 1024, 5 * (32 * 2**20 + 1024)]


def test_blocks_of_before_megatron_core_by_hand():
    model = LLAMA_70B_CUT | {"num_hidden_layers": 2}
    sizes = []
    for impl in ("local", "legacy"):
        made = job(model=model, micro=1, batch=1, options={"transformer_impl": impl})
        sizes.append(save_block(read_shape(made), read_settings(made).block, moe=False))
    local, legacy = sizes
    tokens, h, f = 1024, 8192, 28672
    for norm in ("attention", "feed-forward"):
        # RMSNorm in steps: the input in fp32 and the product in 16 bits, for the input in 16 bits
        more = legacy[f"{norm} norm's input"] - local[f"{norm} norm's input"]
        assert more + legacy[f"{norm} norm's product"] == 4 * tokens * h
    # SwiGLU in steps: silu's output; keys and values repeated for all heads
    assert legacy["feed-forward, gate"] == 2 * tokens * f
    assert legacy["query, key, value"] == 2 * 3 * tokens * h
    assert local["query, key, value"] == 2 * (h + 2 * 1024) * tokens


LLAMA_2_70B = {
    "name": "Llama-2-70B", "model_type": "llama", "vocab_size": 32000, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


ADAPTERS = {"rank": 16, "alpha": 32, "targets": ["linear_qkv", "linear_proj"]}


@pytest.mark.parametrize(("cp", "gib"), [(1, 168.83), (2, 134.083), (4, 99.574), (8, 82.323)])
def test_adapters_over_fp8_weights_as_mlcommons_measured_them(cp, gib):
    ledger = predict(
        model=LLAMA_2_70B, device="gb200", length=8192, micro=1, batch=8, method="lora",
        lora=ADAPTERS | {"dropout": 0.1}, precision="fp8-mixed", attention="cudnn",
        parallel={"dp_shard": 8, "cp": cp},
        options={
            "cp_comm_type": "a2a", "fp8_dot_product_attention": True,
            "activation_func_fp8_input_store": cp == 1,
            "accumulate_allreduce_grads_in_fp32": False,
        },
    )  # fmt: skip
    assert ledger.peak / GIB == pytest.approx(gib, rel=0.005)


def test_frozen_linears_keep_no_inputs_and_adapters_keep_theirs():
    full = save_block(read_shape(job()), read_settings(job()).block, moe=False)
    made = job(method="lora", lora=ADAPTERS)
    frozen = save_block(read_shape(made), read_settings(made).block, moe=False)
    stream = 2 * 4 * 1024 * 1024
    gone = {name: n for name, n in full.items() if name not in frozen}
    # the second norm's output and the activation; the first norm's is the adapter's input
    assert gone == {"feed-forward norm's output": stream, "feed-forward, activation": 4 * stream}
    assert frozen["adapters"] == 2 * 2 * 16 * 4 * 1024
    dropped = job(method="lora", lora=ADAPTERS | {"dropout": 0.1})
    kept_then = save_block(read_shape(dropped), read_settings(dropped).block, moe=False)
    # either adapter keeps a dropped input and its mask; the norm's output itself is not needed
    assert kept_then["adapters"] - frozen["adapters"] == 2 * stream * 3 // 2
    assert "attention norm's output" not in kept_then


def test_adapters_have_states_and_frozen_weights_have_none():
    made = job(method="lora", lora=ADAPTERS, batch=32, parallel={"dp_shard": 8})
    shape, blocks, count = one_stage(made)
    held = stages.hold_states(shape, read_settings(made), blocks, count)
    trained = 24 * 16 * ((1024 + 3 * 1024) + (1024 + 1024))
    assert held[Kind.PARAMETERS, "frozen"][0] == 2 * made.model.parameters
    assert held[Kind.PARAMETERS, "adapters"][0] == 2 * trained
    assert held[Kind.OPTIMIZER_STATE, "adapters"][0] == 12 * trained // 8


LLAMA_405B = {
    "name": "Llama-3.1-405B", "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384,
    "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


@pytest.mark.parametrize(("dp", "gib"), [(4, 58.817), (20, 52.062), (64, 50.901)])
def test_fp8_in_a_pipeline_as_mlcommons_measured_its_rank_0(dp, gib):
    ledger = predict(
        model=LLAMA_405B, device="h100-sxm", length=8192, micro=1, batch=24 * dp,
        precision="fp8-mixed", attention="cudnn",
        parallel={
            "dp_shard": dp, "tp": 8, "pp": 8, "virtual_pp": 8, "cp": 2, "sequence_parallel": True,
        },
        options={
            "rank": "first", "fp8_param_gather": True, "cross_entropy_loss_fusion": "native",
            "accumulate_allreduce_grads_in_fp32": False,
            "create_attention_mask_in_dataloader": False,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    )  # fmt: skip
    assert ledger.peak / GIB == pytest.approx(gib, rel=0.03)


def test_fp8_weights_by_hand():
    linears = 24 * 12 * 1024**2
    count = job().model.parameters
    for device, gather, each in (
        ("h100-sxm", True, 2),  # stored, and laid out the other way
        ("b200-sxm", True, 1),  # Blackwell's products read either layout
        ("h100-sxm", False, 4),  # beside the 16-bit weight
        ("b200-sxm", False, 3),
    ):
        made = job(precision="fp8-mixed", device=device, options={"fp8_param_gather": gather})
        shape, blocks, numbers = one_stage(made)
        held = stages.hold_states(shape, read_settings(made), blocks, numbers)
        weights = held[Kind.PARAMETERS, "blocks and tables"][0]
        assert weights == 2 * (count - linears) + each * linears


def test_fp8_linears_keep_their_inputs_in_fp8():
    plain, fp8 = (
        save_block(read_shape(made), read_settings(made).block, moe=False)
        for made in (job(device="h100-sxm"), job(device="h100-sxm", precision="fp8-mixed"))
    )
    for part in ("attention norm's output", "feed-forward norm's output"):
        assert fp8[part] == plain[part] // 2
    assert fp8["feed-forward, activation"] == plain["feed-forward, activation"] // 2
    assert fp8["feed-forward, first linear"] == plain["feed-forward, first linear"]
    # the kernel keeps its output in 16 bits, the projection in 8
    copy = fp8["attention's output, in FP8 for the projection"]
    assert copy == fp8["attention's output"] // 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # megatron/core/transformer/moe/moe_layer.py
        ({"parallel": {"tp": 2}, "options": EXPERTS}, "needs `sequence_parallel`"),
        # megatron/core/pipeline_parallel/schedules.py: groups of `pp`, of which none is short
        ({"parallel": {"pp": 4, "virtual_pp": 2}, "batch": 12}, "3 micro-batches in groups of 4"),
        ({"parallel": {"pp": 4, "virtual_pp": 2}, "batch": 20}, "5 micro-batches in groups of 4"),
        (
            {"parallel": {"pp": 2, "virtual_pp": 2}, "batch": 16,
             "options": {"microbatch_group_size_per_vp_stage": 1}},
            "4 micro-batches in groups of 1 on 2 stages",
        ),
        ({"parallel": {"virtual_pp": 2}}, "`pp: 1` is none"),
        # megatron/core/transformer/dot_product_attention.py, and Transformer Engine's choice of one
        ({"parallel": {"cp": 2}, "attention": "eager"}, "needs a kernel of Transformer Engine"),
        ({"parallel": {"cp": 2}, "options": {"transformer_impl": "local"}}, "`attention: flash`"),
    ],
)  # fmt: skip
def test_what_megatron_raises_at_is_refused(changes, words):
    with pytest.raises(InvalidRequest, match=words):
        job(**changes)
    short = {"options": {"microbatch_group_size_per_vp_stage": 3}}
    job(parallel={"pp": 2, "virtual_pp": 2}, batch=20, **short)  # 5 in groups of 3: 2 are enough
