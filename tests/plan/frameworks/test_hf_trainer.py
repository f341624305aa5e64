"""The Trainer's step against Hugging Face's class, its loss and peft's adapters on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_step import ROWS, TINY, TOKENS, ledger, make_config, rise, run

from memfit.core.errors import InvalidRequest
from memfit.plan.search.search import predict_request
from memfit.records import from_data
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.request import Request
from size_oracle import adapted

BIG: dict[str, Any] = TINY | {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "name": "gpt2", "vocab_size": 101, "n_embd": 48, "n_head": 4}
GPT2 |= {"n_layer": 2}
LORA_OF_FP32: dict[str, Any] = {
    "method": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}, "base_format": "fp32",
}  # fmt: skip


def real_rise(
    *, lora: bool, keeps_outputs: bool, checkpointing: bool, dtype: torch.dtype,
    mixed: bool = False, reentrant: bool = False,
) -> int:  # fmt: skip
    """The same of one real micro-batch on the CPU."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(make_config()).to(dtype)
    model = adapted(model, lora=lora, checkpointing=checkpointing, reentrant=reentrant)
    return run(model, mixed=mixed, keeps_outputs=keeps_outputs)


@pytest.mark.parametrize("keeps_outputs", [False, True])
@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"method": "full", "precision": "fp32"}, torch.float32),
        ({"method": "full"}, torch.bfloat16),
        ({"method": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}, torch.bfloat16),
    ],
)
def test_a_micro_batch_holds_what_the_class_holds(
    changes: dict[str, Any], dtype: torch.dtype, keeps_outputs: bool
) -> None:
    mine = rise(ledger(TINY, **changes, options={"keeps_outputs": keeps_outputs}))
    theirs = real_rise(
        lora=changes["method"] == "lora", keeps_outputs=keeps_outputs, checkpointing=False,
        dtype=dtype,
    )  # fmt: skip
    assert mine == pytest.approx(theirs, rel=0.005)


def test_recomputed_blocks() -> None:
    mine = rise(ledger(TINY, method="full", recompute="full"))
    theirs = real_rise(lora=False, keeps_outputs=False, checkpointing=True, dtype=torch.bfloat16)
    assert mine == pytest.approx(theirs, rel=0.005)


@pytest.mark.parametrize("own", [{}, LORA_OF_FP32], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_reentrant_checkpoints_hold_a_blocks_result_and_what_its_backward_began_with(
    precision: str, own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few words, so that the highest instant is in a block and not in the loss."""
    monkeypatch.setitem(TINY, "vocab_size", 64)
    asked = {"precision": precision, "recompute": "full", **own}
    found = [ledger(TINY, **asked, options={"reentrant": on}) for on in (False, True)]
    assert found[0].total(Phase.FORWARD) == found[1].total(Phase.FORWARD)  # neither has a graph
    plain, mine = map(rise, found)
    theirs = real_rise(
        lora=bool(own), keeps_outputs=False, checkpointing=True, dtype=torch.float32,
        mixed=precision == "bf16-mixed", reentrant=True,
    )  # fmt: skip
    assert mine == theirs > plain


@pytest.mark.parametrize("own", [{}, LORA_OF_FP32], ids=["full", "lora"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_autocast_keeps_its_casts_of_trained_weights_to_the_end_of_the_forward(
    recompute: str, own: dict[str, Any]
) -> None:
    mine = rise(ledger(TINY, precision="bf16-mixed", recompute=recompute, **own))
    theirs = real_rise(
        lora=bool(own), keeps_outputs=False, checkpointing=recompute == "full",
        dtype=torch.float32, mixed=True,
    )  # fmt: skip
    assert mine == pytest.approx(theirs, rel=0.005)


def held(found: Ledger, kind: Kind) -> int:
    return found.by_kind(Phase.FORWARD).get(kind, 0)


LORA = {"method": "lora", "lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}
BLOCK = 4 * 4096 * 4096 + 3 * 4096 * 11008  # weights of the projections of a block


def test_quantised_bases() -> None:
    """Projections of 4.5 bits; what is not quantised becomes fp32 (prepare_model_for_kbit_…)."""
    adapters = 32 * 2 * 8 * (4096 + 4096) * 4
    dense = 2 * 32000 * 4096 + 65 * 4096
    four = held(ledger(BIG, "h100-sxm", **LORA, base_format="nf4"), Kind.PARAMETERS)
    expected = 32 * BLOCK // 2 + 32 * BLOCK // 64 * 4 + dense * 4 + adapters
    assert four == pytest.approx(expected, rel=0.01)
    eight = held(ledger(BIG, "h100-sxm", **LORA, base_format="int8"), Kind.PARAMETERS)
    assert eight == pytest.approx(32 * BLOCK + dense * 4 + adapters, rel=0.015)
    options = {"prepare_kbit": False, "double_quantisation": True}
    bare = ledger(BIG, "h100-sxm", **LORA, base_format="nf4", options=options)
    nested = 32 * BLOCK // 2 + 32 * BLOCK // 64 + 32 * BLOCK // 64 // 256 * 4
    assert held(bare, Kind.PARAMETERS) == pytest.approx(nested + dense * 2 + adapters, rel=0.01)


def test_a_dense_copy_of_one_quantised_weight_lives_with_its_product() -> None:
    short = {"task": {"sequence_length": 8, "global_batch": 1, "packing": False}, "micro_batch": 1}
    coded = ledger(BIG, "h100-sxm", **LORA, **short, base_format="nf4")
    temporary = sum(e.nbytes for e in coded.at(Phase.FORWARD) if e.kind is Kind.TEMPORARY)
    assert temporary == pytest.approx(4096 * 11008 * 2, rel=0.01)


def test_states() -> None:
    count = 32 * (BLOCK + 2 * 4096) + 2 * 32000 * 4096 + 4096
    fused = ledger(BIG, "h100-sxm", method="full")
    assert held(fused, Kind.OPTIMIZER_STATE) == pytest.approx(count * 4, rel=0.01)
    mixed = ledger(BIG, "h100-sxm", method="full", precision="bf16-mixed")
    assert held(mixed, Kind.OPTIMIZER_STATE) == pytest.approx(count * 8, rel=0.01)
    eight = ledger(BIG, "h100-sxm", method="full", optimizer={"name": "adamw8bit"})
    # codes and scales in blocks of their own, but for the embedding, whose moments are fp32
    table = 32000 * 4096
    coded = (count - table) * (2 + 8 / 256) + table * 8
    assert held(eight, Kind.OPTIMIZER_STATE) == pytest.approx(coded, rel=0.02)
    paged = ledger(
        BIG, "h100-sxm", method="full", optimizer={"name": "adamw8bit"}, options={"paged": True}
    )
    # scales are not paged, and norms neither
    scales = (count - table) * 8 / 256
    assert held(paged, Kind.OPTIMIZER_STATE) == pytest.approx(scales, rel=0.05)


def test_ddp_holds_a_copy_of_every_gradient() -> None:
    two = {
        "hardware": {"device": "h100-sxm", "count": 2}, "parallel": {"dp_replicate": 2},
        "task": {"sequence_length": TOKENS, "global_batch": 2 * ROWS, "packing": False},
    }  # fmt: skip
    one, both = ledger(BIG, "h100-sxm"), ledger(BIG, "h100-sxm", **two)
    grown = both.by_kind(Phase.FORWARD)[Kind.GRADIENTS]
    assert grown == held(one, Kind.PARAMETERS) - buffers(one)


def buffers(found: Ledger) -> int:
    return sum(
        e.nbytes for e in found.at(Phase.FORWARD)
        if (e.kind, e.owner) == (Kind.PARAMETERS, "rotary")
    )  # fmt: skip


TWO = {
    "hardware": {"device": "h100-sxm", "count": 2}, "parallel": {"dp_shard": 2},
    "task": {"sequence_length": TOKENS, "global_batch": 2 * ROWS, "packing": False},
}  # fmt: skip


def owned(found: Ledger, kind: Kind, owner: str) -> int:
    entries = found.at(Phase.FORWARD)
    return sum(e.nbytes for e in entries if (e.kind, e.owner) == (kind, owner))


def test_fsdp_cuts_codes_and_leaves_scales_whole() -> None:
    options = {"prepare_kbit": False, "adapter_dtype": "base"}
    found = ledger(BIG, "h100-sxm", **LORA, **TWO, base_format="nf4", options=options)
    adapters, outside = 32 * 2 * 8 * 8192 * 2, (2 * 32000 * 4096 + 4096) * 2
    norms = 64 * 4096 * 2
    cut = owned(found, Kind.PARAMETERS, "shards")
    assert cut == (32 * BLOCK // 2 + outside + norms + adapters) // 2
    assert owned(found, Kind.PARAMETERS, "scales") == 32 * BLOCK // 64 * 4 + 32 * 7 * 64
    gathered = outside + 2 * (BLOCK // 2 + 2 * 4096 * 2)  # the root's unit and two blocks
    assert owned(found, Kind.ALL_GATHER, "units") == gathered
    assert owned(found, Kind.GRADIENTS, "units") == adapters // 2


def test_offloaded_shards_and_states_are_elsewhere() -> None:
    here = ledger(BIG, "h100-sxm", **LORA, **TWO)
    away = ledger(BIG, "h100-sxm", **LORA, **TWO, offload="parameters")
    assert Kind.PARAMETERS not in away.by_kind(Phase.FORWARD)
    assert Kind.OPTIMIZER_STATE not in away.by_kind(Phase.FORWARD)
    gone = here.total(Phase.FORWARD) - away.total(Phase.FORWARD)
    kinds = here.by_kind(Phase.FORWARD)
    held = (Kind.PARAMETERS, Kind.OPTIMIZER_STATE, Kind.GRADIENTS)
    assert gone == sum(kinds[kind] for kind in held)


def test_older_bitsandbytes_keeps_inputs_though_blocks_are_recomputed() -> None:
    """An attribute of a node is no saved tensor: the first forward's graph holds it to the end."""
    asked = {**LORA, "base_format": "nf4", "recompute": "full"}
    options = {"prepare_kbit": False}  # norms in bf16: what they make is read without a cast
    new = ledger(BIG, "h100-sxm", **asked, options=options)
    old = ledger(BIG, "h100-sxm", **asked, options=options | {"bitsandbytes": "0.43"})
    kept = 3 * 4096 + 11008  # inputs of q, k, v; of o; of gate and up; of down
    held = [found.by_kind(Phase.LOSS)[Kind.ACTIVATIONS] for found in (old, new)]
    assert held[0] - held[1] == pytest.approx(32 * ROWS * TOKENS * kept * 2, rel=0.01)


@pytest.mark.parametrize(
    ("options", "each"),
    [
        ({}, 12),  # log-softmax, its gradient and the loss's, in fp32
        ({"keeps_outputs": True}, 14),  # and the logits in bf16
        ({"keeps_outputs": True, "release": "4.38"}, 16),  # or upcast
    ],
)
def test_bytes_of_a_logit(options: dict[str, Any], each: int) -> None:
    long = {"task": {"sequence_length": 512, "global_batch": ROWS, "packing": False}}
    found = ledger(BIG, "h100-sxm", **LORA, **long, recompute="full", options=options)
    logits = found.by_kind(Phase.BACKWARD)[Kind.LOGITS]
    assert logits == pytest.approx(each * 512 * ROWS * 32000, rel=0.005)


def test_a_class_that_computes_attention_itself_does_so_here_too() -> None:
    bloom = {"model_type": "bloom", "vocab_size": 512, "hidden_size": 64, "n_head": 4, "n_layer": 2}
    assert ledger(bloom) == ledger(bloom, attention="math")


def test_all_linear_is_every_projection_of_a_block() -> None:
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    named = ledger(TINY, method="lora", lora={"rank": 4, "targets": every})
    short = ledger(TINY, method="lora", lora={"rank": 4, "targets": ["all-linear"]})
    assert short == named


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "full", "base_format": "nf4"}, "cannot train weights stored as"),
        ({"method": "freeze"}, "`method: freeze` is not described"),
        ({"loss": "fused"}, "head of fp32"),
        (
            {
                "method": "lora",
                "base_format": "nf4",
                "model": GPT2,
                "lora": {"targets": ["c_attn"]},
            },
            "of transposed weights .Conv1D. .`gpt2`. is not described",
        ),
        (
            {"method": "lora", "model": "mixtral-8x7b-v0.1", "lora": {"targets": ["all-linear"]}},
            "`lora.targets: all-linear` of a mixture of experts",
        ),
        ({"offload": "parameters"}, "`offload: parameters` is FSDP's"),
        ({"options": {"pagd": True}}, "`options.pagd` is no knob of `hf-trainer`"),
        ({"options": {"adapter_dtype": "int8"}}, "is not a value of `hf-trainer`'s knob"),
    ],
)
def test_what_the_trainer_has_not(changes: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {
        "framework": "hf-trainer", "model": TINY, "hardware": {"device": "h100-sxm"},
        "task": {"sequence_length": TOKENS, "global_batch": ROWS, "packing": False},
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match=message):
        predict_request(from_data(asked | changes, Request, source="request"))
