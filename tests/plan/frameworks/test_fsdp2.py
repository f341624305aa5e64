"""A rank of accelerate's FSDP2, predicted, against what its own code and torch's hold on a CPU."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from memfit.certify.world import fake_world
from memfit.errors import InvalidRequest
from memfit.ledger import Kind, Ledger, Phase
from memfit.nouns import from_data
from memfit.plan.foreign import predict_ledger, read_foreign
from memfit.plan.problem import find_device
from memfit.recipe import Parallel
from memfit.request import Request
from size_oracle import Births

TOKENS, ROWS, RANKS = 40, 2, 2
SCALARS = 16  # bytes
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 768, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
HELD = (Kind.PARAMETERS, Kind.OPTIMIZER_STATE, Kind.INPUT, Kind.WORKSPACE)
LORA = {"method": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}


def ledger(accumulation: int = 1, **changes: Any) -> Ledger:
    asked: dict[str, Any] = {
        "framework": "hf-trainer", "model": TINY, "micro_batch": ROWS,
        "hardware": {"device": "cpu", "count": RANKS}, "parallel": {"dp_shard": RANKS},
        "task": {
            "sequence_length": TOKENS, "global_batch": RANKS * ROWS * accumulation,
            "packing": False,
        },
        "precision": "bf16-mixed", "options": {"fsdp_version": 2},
    }  # fmt: skip
    recipe, model, _ = read_foreign(from_data(asked | changes, Request, where="request"))
    return predict_ledger(recipe, model, find_device("cpu"))


def rise(found: Ledger) -> int:
    phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE)
    return max(sum(e.nbytes for e in found.at(p) if e.kind not in HELD) for p in phases)


class Level(Births):
    """Bytes of storages as large as they are now: FSDP2 empties them and fills them again."""

    highest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return func(*args, **(kwargs or {}))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        alive = [one() for one in self.alive.values() if one is not None]
        self.highest = max(self.highest, sum(s.nbytes() for s in alive if s is not None))
        return out


def real_rise(*, lora: bool, accumulation: int) -> int:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{k: v for k, v in TINY.items() if k != "model_type"},
        attn_implementation="sdpa", use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    if lora:
        model = model.to(torch.bfloat16)
        wanted = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        with warnings.catch_warnings():  # peft calls what transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            model = get_peft_model(model, wanted)
    model.train()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    plugin.set_mixed_precision("bf16")
    told = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="bf16",
        is_main_process=False, device=torch.device("cpu"),
    )  # fmt: skip
    model = fsdp2_prepare_model(told, model)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    labels = ids.clone()
    known = [p.to_local() for p in model.parameters()] + list(model.buffers())
    with Level(*known, ids, labels) as level:
        for _ in range(2):  # the first makes what is only filled later
            level.highest = 0
            for at in range(accumulation):
                model.set_requires_gradient_sync(at == accumulation - 1)
                loss = model(input_ids=ids, labels=labels).loss
                loss.backward()
                del loss
            model.zero_grad()
    return level.highest


@pytest.mark.parametrize(
    ("lora", "accumulation", "vocab"),
    [(False, 1, 96), (False, 2, 96), (False, 1, 768), (True, 1, 96), (True, 2, 768)],
)
def test_a_rank_holds_what_accelerates_own_units_hold(
    monkeypatch: pytest.MonkeyPatch, lora: bool, accumulation: int, vocab: int
) -> None:
    """At the highest instant: in a block, or, with many words, in the loss."""
    monkeypatch.setitem(TINY, "vocab_size", vocab)
    changes = (LORA | {"base_format": "bf16"}) if lora else {"method": "full"}
    mine = rise(ledger(accumulation, **changes))
    with fake_world(Parallel(dp_shard=RANKS), 0, "cpu", lambda _: None, lambda *_: None):
        theirs = real_rise(lora=lora, accumulation=accumulation)
    assert mine == pytest.approx(theirs, abs=SCALARS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (LORA | {"base_format": "nf4"}, "leaves 4-bit weights whole or cuts them"),
        (LORA | {"offload": "parameters"}, "`offload: parameters` under accelerate's FSDP2"),
        ({"precision": "fp16-mixed"}, "`precision: fp16-mixed` under accelerate's FSDP2"),
    ],
)
def test_what_is_not_described_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ledger(**changes)
