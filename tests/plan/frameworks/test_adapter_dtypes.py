"""In which dtype trainers hold adapters, by the base's: what peft makes itself, and TRL's rule."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hf_step import TINY, ledger, make_config
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from memfit.records.ledger import Kind, Phase

LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}}
ADAPTERS = 2 * TINY["num_hidden_layers"] * 2 * 4 * TINY["hidden_size"]  # weights: two a projection
BYTES = {"fp32": 4, "bf16": 2}


def held(framework: str, base: str, precision: str, adapter_dtype: str | None) -> int:
    """Bytes of all parameters on a GPU."""
    options = {} if adapter_dtype is None else {"adapter_dtype": adapter_dtype}
    found = ledger(
        TINY, "h100-sxm", **LORA, framework=framework, base_format=base, precision=precision,
        options=options, task={"sequence_length": 40, "global_batch": 2, "packing": False,
                               "objective": "sft"},
    )  # fmt: skip
    entries = found.at(Phase.FORWARD)
    return sum(e.nbytes for e in entries if e.kind is Kind.PARAMETERS)


def width(framework: str, base: str, precision: str, adapter_dtype: str | None) -> float:
    """Bytes of each weight of the adapters, beside those that are stated to be fp32."""
    wide = held(framework, base, precision, "fp32")
    return 4 - (wide - held(framework, base, precision, adapter_dtype)) / ADAPTERS


@pytest.mark.parametrize("base", ["fp32", "bf16"])
@pytest.mark.parametrize(("knob", "autocast"), [("fp32", True), ("base", False)])
def test_plain_bases_have_adapters_as_peft_makes_them(base: str, knob: str, autocast: bool) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[base]
    model = LlamaForCausalLM(make_config()).to(dtype)
    config = LoraConfig(r=4, target_modules=LORA["lora"]["targets"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft calls what transformers has renamed
        made = get_peft_model(model, config, autocast_adapter_dtype=autocast)
    trained = [p for p in made.parameters() if p.requires_grad]
    assert sum(p.numel() for p in trained) == ADAPTERS
    precision = "fp32" if base == "fp32" else "bf16"
    (theirs,) = {p.element_size() for p in trained}
    assert width("hf-trainer", base, precision, knob) == theirs
    assert width("trl", base, precision, knob) == theirs


@pytest.mark.parametrize(("base", "want"), [
    ("fp32", "fp32"), ("bf16", "fp32"), ("nf4", "bf16"), ("int8", "bf16"),
])  # fmt: skip
def test_trl_leaves_peft_to_cast_but_over_quantised_bases(base: str, want: str) -> None:
    """trainer/sft_trainer.py of 1.16: of a quantised base all that is trained becomes bf16."""
    precision = "fp32" if base == "fp32" else "bf16"
    assert width("trl", base, precision, None) == BYTES[want]
    assert width("trl", base, precision, "auto") == BYTES[want]
    assert width("hf-trainer", base, precision, None) == BYTES["fp32"]
