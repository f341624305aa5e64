"""A micro-batch of Hugging Face's class on a CPU, beside the ledger of the same."""

from __future__ import annotations

from typing import Any

import torch

from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.request import Request
from size_oracle import Births, highest

TOKENS, ROWS = 40, 2
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 768, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
OUTSIDE = (Kind.PARAMETERS, Kind.OPTIMIZER_STATE, Kind.INPUT, Kind.WORKSPACE)


def ledger(model: dict[str, Any], device: str = "cpu", **changes: Any) -> Ledger:
    asked: dict[str, Any] = {
        "framework": "hf-trainer", "model": model, "hardware": {"device": device},
        "task": {"sequence_length": TOKENS, "global_batch": ROWS, "packing": False},
        "micro_batch": ROWS, "precision": "bf16",
    }  # fmt: skip
    changes["options"] = {"padded": False} | changes.get("options", {})  # as `run` has them
    recipe, described, _ = read_defaults(from_data(asked | changes, Request, source="request"))
    return predict_ledger(recipe, described, find_device(device))


def rise(found: Ledger) -> int:
    """Bytes of the micro-batch's highest instant, above what is there before it."""
    phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
    return max(sum(e.nbytes for e in found.at(p) if e.kind not in OUTSIDE) for p in phases)


def make_config(*, tied: bool = False) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **{k: v for k, v in TINY.items() if k != "model_type"},
        attn_implementation="sdpa", use_cache=False, tie_word_embeddings=tied,
    )  # fmt: skip


def run(model: Any, *known: Any, mixed: bool = False, keeps_outputs: bool = False) -> int:
    """`rise` of a real micro-batch; mixed: with autocast as accelerate has it."""
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    labels = ids.clone()
    with Births(*model.parameters(), *model.buffers(), *known, ids, labels) as births:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            outputs = model(input_ids=ids, labels=labels)
        loss = outputs.loss
        if not keeps_outputs:
            del outputs
        loss.backward()
    return highest(births)
