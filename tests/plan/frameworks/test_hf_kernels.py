"""Liger's operations and losses without logits, as bench/hf_kernels.py measured their own code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit import meta
from memfit.meta import Meter
from memfit.meta.losses.fused import cut_loss, liger_loss, shift_labels
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.request import Request

MEASURED = json.loads(
    (Path(__file__).parents[3] / "bench" / "results" / "hf_kernels.json").read_text("utf-8")
)
OUTSIDE = (Kind.PARAMETERS, Kind.OPTIMIZER_STATE, Kind.INPUT, Kind.WORKSPACE)
LORA = {"method": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
SCALARS = 64  # bytes


def predict(model: dict[str, Any], device: str = "cpu", **changes: Any) -> Any:
    rows, tokens = MEASURED["rows"], MEASURED["tokens"]
    requested: dict[str, Any] = {
        "framework": "hf-trainer", "model": model, "hardware": {"device": device},
        "task": {"sequence_length": tokens, "global_batch": rows, "packing": False},
        "micro_batch": rows, "precision": "bf16", "method": "full",
    }  # fmt: skip
    changes["options"] = {"padded": False} | changes.get("options", {})  # as it was measured
    recipe, described, _ = read_defaults(from_data(requested | changes, Request, source="request"))
    return predict_ledger(recipe, described, find_device(device))


@pytest.mark.parametrize("case", MEASURED["blocks"], ids=str)
def test_a_micro_batch_holds_what_liger_s_own_code_holds(case: dict[str, Any]) -> None:
    model = MEASURED["model"] | {
        "model_type": case.get("family", "llama"),
        "vocab_size": case.get("vocab_size", MEASURED["model"]["vocab_size"]),
        "tie_word_embeddings": False,
    }
    if model["model_type"] == "qwen3":
        model["head_dim"] = 16
    found = predict(
        model, options={"liger": case["liger"]}, attention="flash",
        recompute="full" if case.get("checkpointing") else "none",
        **LORA if case.get("lora") else {},
        **{"precision": "fp32"} if case.get("dtype") else {},
    )  # fmt: skip
    phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
    mine = max(sum(e.nbytes for e in found.at(p) if e.kind not in OUTSIDE) for p in phases)
    # peft's adapters differ by as much without Liger: see test_hf_trainer.py
    assert mine == pytest.approx(case["rise"], abs=1024 if case.get("lora") else SCALARS)


def play_cut_loss(rows: int, tokens: int) -> list[int]:
    """Bytes that the loss without logits takes and gives back, in turn."""
    meter = Meter(cuda=True)
    count = rows * (tokens - 1)
    hidden = meta.parameter(meter, (count, 16), "bfloat16", trainable=True)
    head = meta.parameter(meter, (40, 16), "bfloat16", trainable=True)
    labels = meta.parameter(meter, (rows, tokens), "int64", trainable=False)
    start = len(meter.events)
    meta.backward(cut_loss(hidden, head, labels))
    sizes = meter.requested
    return [sizes[e] if e >= 0 else -sizes[~e] for e in meter.events[start:]]


def test_the_first_token_of_each_row_has_no_loss() -> None:
    """64 rows of 3 tokens learn what a row of 129 does; its log-sum-exps are 128 fp32 numbers."""
    many = play_cut_loss(64, 3)
    assert many == play_cut_loss(1, 129)
    assert many[:2] == [128, 128 * 2 * 8]  # which labels count, and where they are


@pytest.mark.parametrize("case", MEASURED["losses"], ids=str)
def test_a_loss_adds_what_its_own_code_adds(case: dict[str, Any]) -> None:
    meter = Meter(cuda=True)
    dtype = case.get("dtype", "bfloat16")
    shape = (case["tokens"], case["hidden"])
    hidden = meta.parameter(meter, shape, dtype, trainable=True)
    head = meta.parameter(
        meter, (case["vocab"], case["hidden"]), dtype, trainable=case.get("head", True)
    )
    labels = meta.parameter(meter, (1, case["tokens"]), "int64", trainable=False)
    start = len(meter.events)
    with meter.with_autocast(case.get("autocast", False)):
        if case["loss"] == "chunked":
            loss = liger_loss(hidden, head, shift_labels(labels))
        else:
            loss = cut_loss(hidden, head, labels)
        meta.backward(loss)
    level = top = 0
    for event in meter.events[start:]:
        level += meter.requested[event] if event >= 0 else -meter.requested[~event]
        top = max(top, level)
    assert top == pytest.approx(case["rise"], abs=1024)
