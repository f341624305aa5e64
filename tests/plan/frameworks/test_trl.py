"""TRL's step: the Trainer's, but for its defaults."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.core.errors import InvalidRequest
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.request import Request

MODEL: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}  # fmt: skip
LORA: dict[str, Any] = {
    "method": "lora", "lora": {"rank": 256, "targets": ["q_proj"]}, "base_format": "nf4",
}  # fmt: skip
TRAINED = 8 * 2 * 256 * 1024


def ledger(framework: str, **changes: Any) -> Ledger:
    asked: dict[str, Any] = {
        "framework": framework, "model": MODEL, "hardware": {"device": "h100-sxm"},
        "task": {"sequence_length": 512, "global_batch": 4, "packing": False}, "micro_batch": 4,
    }  # fmt: skip
    recipe, model, _ = read_defaults(from_data(asked | changes, Request, source="request"))
    return predict_ledger(recipe, model, find_device("h100-sxm"))


BEFORE: dict[str, Any] = {"options": {"version": 0.29}}


def test_blocks_are_recomputed_unless_told_otherwise() -> None:
    assert ledger("trl", **BEFORE) == ledger("hf-trainer", recompute="full")
    assert ledger("trl", **BEFORE, recompute="none") == ledger("hf-trainer")


@pytest.mark.parametrize("changes", [{}, LORA, {"precision": "bf16"}], ids=["full", "lora", "bf16"])
def test_the_loss_is_made_from_tiles_of_the_logits(changes: dict[str, Any]) -> None:
    now, before = ledger("trl", **changes), ledger("trl", **changes, **BEFORE)
    for phase in (Phase.LOAD, Phase.FORWARD, Phase.OPTIMIZER_STEP):
        assert now.by_kind(phase) == before.by_kind(phase)
    # whole ones are upcast, and their log-softmax has a gradient; a tile is of all these tokens
    saved = 2048 * 32000 * (4 + 4) - 2044 * 32768 * 2
    assert now.total(Phase.LOSS) <= before.total(Phase.LOSS) - saved


def test_adapters_over_a_quantised_base_are_bf16() -> None:
    found = ledger("trl", **LORA).by_kind(Phase.FORWARD)
    assert found[Kind.OPTIMIZER_STATE] == pytest.approx(TRAINED * 2 * 2, rel=0.01)
    wide = ledger("hf-trainer", **LORA).by_kind(Phase.FORWARD)
    assert wide[Kind.OPTIMIZER_STATE] == pytest.approx(TRAINED * 2 * 4, rel=0.01)


def test_the_rest_of_a_quantised_base_stays_in_16_bits() -> None:
    found = {e.owner: e.nbytes for e in ledger("trl", **LORA).at(Phase.LOAD)}
    assert found["head"] == pytest.approx(32000 * 1024 * 2, rel=0.02)
    wide = {e.owner: e.nbytes for e in ledger("hf-trainer", **LORA).at(Phase.LOAD)}
    assert wide["head"] == pytest.approx(32000 * 1024 * 4, rel=0.02)


def test_memfits_chunked_loss_is_none_of_its() -> None:
    with pytest.raises(InvalidRequest, match="`loss: chunked` is not described"):
        ledger("trl", loss="chunked")
