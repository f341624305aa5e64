"""ZeRO's shares by hand, and DeepSpeed's own estimate of a model's states."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.errors import InvalidRequest
from memfit.ledger import Kind, Ledger, Phase
from memfit.nouns import from_data
from memfit.plan.foreign import predict_ledger, read_foreign
from memfit.plan.problem import find_device
from memfit.request import Request

LLAMA_7B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip
P = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096


def ledger(stage: int, ranks: int = 8, **changes: Any) -> Ledger:
    asked: dict[str, Any] = {
        "framework": "deepspeed", "model": LLAMA_7B,
        "hardware": {"device": "h100-sxm", "count": ranks},
        "task": {"sequence_length": 128, "global_batch": ranks, "packing": False},
        "micro_batch": 1, "method": "full", "parallel": {"dp_shard": ranks, "zero": stage},
    }  # fmt: skip
    recipe, model, _ = read_foreign(from_data(asked | changes, Request, where="request"))
    return predict_ledger(recipe, model, find_device("h100-sxm"))


def states(found: Ledger, phase: Phase) -> int:
    kinds = (Kind.PARAMETERS, Kind.GRADIENTS, Kind.OPTIMIZER_STATE)
    return sum(n for kind, n in found.by_kind(phase).items() if kind in kinds)


def test_stage_2_is_what_deepspeed_estimates() -> None:
    """2 P + 18 P / N (stage_1_and_2.py, estimate_zero2_model_states_mem_needs)."""
    found = ledger(2)
    wide = 4 * P // 8  # fp32 gradients, beside a 16-bit copy that the estimate leaves out
    temporary = found.by_kind(Phase.OPTIMIZER_STEP)[Kind.TEMPORARY]
    assert temporary == pytest.approx(wide + 2 * P / 8, rel=1e-3)
    total = states(found, Phase.OPTIMIZER_STEP) + wide
    assert total == pytest.approx(2 * P + 18 * P / 8, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_shares_of_each_stage(ranks: int) -> None:
    one, two, three = (ledger(stage, ranks) for stage in (1, 2, 3))
    step = Phase.OPTIMIZER_STEP
    assert states(one, step) == pytest.approx(2 * P + 2 * P + 12 * P / ranks, rel=0.01)
    assert states(two, step) == pytest.approx(2 * P + 2 * P / ranks + 12 * P / ranks, rel=0.01)
    assert states(three, step) == pytest.approx(16 * P / ranks, rel=0.01)


def test_stage_3_zeroes_whole_gradients_for_its_first_states() -> None:
    """stage3.py, initialize_optimizer_states: ds_numel is the whole parameter's."""
    first = ledger(3).by_kind(Phase.FIRST_STEP)
    assert first[Kind.TEMPORARY] == pytest.approx(4 * P, rel=1e-3)
    few = ledger(3, options={"sub_group_size": 100_000_000}).by_kind(Phase.FIRST_STEP)
    assert few[Kind.TEMPORARY] == 4 * 100_000_000 * 8


def test_stage_3_keeps_gathered_weights_up_to_a_limit() -> None:
    assert ledger(3).by_kind(Phase.FORWARD)[Kind.ALL_GATHER] == 2 * 1_050_000_000
    options = {"max_live_parameters": 10**8, "prefetch_bucket_size": 10**7}
    assert ledger(3, options=options).by_kind(Phase.FORWARD)[Kind.ALL_GATHER] == 2 * 110_000_000
    assert Kind.ALL_GATHER not in ledger(2).by_kind(Phase.FORWARD)


def test_adapters_have_the_shares_of_what_is_trained() -> None:
    lora = {"method": "lora", "lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}
    found, trained = ledger(3, **lora), 32 * 2 * 8 * 2 * 4096
    held = found.by_kind(Phase.FORWARD)
    assert held[Kind.OPTIMIZER_STATE] == pytest.approx(12 * trained / 8, rel=0.01)
    assert held[Kind.REDUCE_SCATTER] == 2 * trained  # no bucket is larger than what it takes
    assert held[Kind.PARAMETERS] == pytest.approx(2 * (P + trained) / 8, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_format": "nf4"}, "cannot train weights stored as"),
        (
            {
                "method": "lora", "lora": {"targets": ["q_proj"]}, "base_format": "int8",
            },
            "cannot be partitioned",
        ),
        ({"precision": "fp32"}, "`precision: fp32` is not described"),
    ],
)  # fmt: skip
def test_what_it_has_not(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ledger(3, **changes)
