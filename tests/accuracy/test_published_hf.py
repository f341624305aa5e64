"""Published rows of litgpt's and Hugging Face's trainers become requests that memfit predicts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from memfit.plan.request.defaults import read_defaults
from memfit.records import from_data
from memfit.records.recipe import Recipe
from memfit.records.request import Request

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from import_peft import make_row
from import_published import translate
from published import NotExpressible

LLAMA_7B = {
    "name": "Llama-2-7B", "n_layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32,
    "ffn": 11008, "vocab": 32000, "seq_len": 512,
}  # fmt: skip
LITGPT = "Lightning-AI/litgpt tutorials/resource-tables.md: Finetuning with LoRA on 1 GPU"
HUB = "Lightning-AI/litgpt config_hub/finetune/README.md"
THUNDER = "Lightning-AI/litgpt extensions/thunder/README.md"
QWEN = "QwenLM/Qwen README.md profiling table"
QLORA = "AnswerDotAI/fsdp_qlora benchmarks_03_2024.md"


def row(source: str, *, name: str = "Llama-2-7B", gpus: int = 1, **config: Any) -> dict[str, Any]:
    return {
        "source": source,
        "model": LLAMA_7B | {"name": name},
        "hardware": {"gpu": "A100-SXM-40GB", "n_gpus": gpus, "gpus_per_node": gpus},
        "config": {"micro_batch": 2, "grad_accum": 4, "global_batch": 8 * gpus} | config,
        "measured": {"peak_mem_kind": "allocated", "peak_mem_gb": 1.0, "peak_mem_unit": "GB10"},
    }  # fmt: skip


def recipe_of(published: dict[str, Any]) -> Recipe:
    return read_defaults(from_data(translate(published).request, Request, source="row"))[0]


def test_litgpts_switches_and_quantisation() -> None:
    lora = {"rank": 16, "targets": "q,k,v,proj,mlp,head"}
    found = recipe_of(row(HUB, lora=lora, quant="bnb.nf4-dq"))
    assert found.framework == "litgpt"
    assert found.lora.targets == ("query", "key", "value", "projection", "mlp", "head")
    assert (found.base_format, found.options["double_quantisation"]) == ("nf4", True)
    assert (found.micro_batch, found.accumulation) == (2, 4)
    assert found.options["longest_samples"] == "many"
    assert recipe_of(row(LITGPT, lora=lora)).options["longest_samples"] == "one"


def test_litgpt_on_more_devices_recomputes_and_shards() -> None:
    found = recipe_of(row(HUB, gpus=4))
    assert (found.method, found.parallel.dp_shard, found.recompute_blocks) == ("full", 4, 32)


def test_what_thunder_fuses_is_not_expressible() -> None:
    assert recipe_of(row(THUNDER, compile="eager")).loss == "plain"
    with pytest.raises(NotExpressible, match="what `thunder"):
        translate(row(THUNDER, compile="thunder (sdpa)"))


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("StableLM-alpha-3B", "gpt_neox"), ("falcon-7b", "falcon"), ("mistral-7b", "llama"),
        ("TinyLlama-1.1B", "llama"), ("gemma-2b", "gemma"), ("Phi-3-mini", "phi3"),
    ],
)  # fmt: skip
def test_litgpts_models_by_name(name: str, family: str) -> None:
    published = row(LITGPT, name=name, lora={"rank": 8, "targets": "q,v"})
    published["model"]["kv_heads"] = 1 if family == "falcon" else 32
    assert recipe_of(published).model.config["model_type"] == family


def test_qwens_fused_projection_is_three_of_its_successor() -> None:
    published = row(
        QWEN, name="Qwen-7B", recompute="full",
        lora={"rank": 64, "targets": "c_attn,c_proj,w1,w2"}, optimizer="AdamW", zero_stage=0,
    )  # fmt: skip
    found = recipe_of(published)
    assert found.framework == "hf-trainer"
    assert set(found.lora.targets) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "up_proj", "gate_proj",
    }  # fmt: skip
    assert recipe_of(row(QWEN, recompute="full", zero_stage=3, gpus=2)).framework == "deepspeed"
    quantised = translate(row(QWEN, recompute="full", quant="gptq int4"))
    assert "gptq" in quantised.memory_lost  # it stands for its time alone
    with pytest.raises(NotExpressible, match="aqlm"):
        translate(row(QWEN, recompute="full", quant="aqlm 2 bit"))


def test_fsdp_qlora_shards_or_copies() -> None:
    lora = {"rank": 64, "targets": "all"}
    sharded = recipe_of(row(QLORA, gpus=2, lora=lora, quant="bnb nf4", zero_stage=3))
    assert (sharded.parallel.dp_shard, sharded.base_format) == (2, "nf4")
    assert sharded.options["bitsandbytes"] == "0.43"
    copied = recipe_of(row(QLORA, gpus=2, lora=lora, zero_stage=0))
    assert (copied.parallel.dp_replicate, copied.base_format) == (2, "bf16")
    by_name = row(QLORA, gpus=2, lora=lora, fsdp="FULL_SHARD", recompute=True)
    assert recipe_of(by_name).parallel.dp_shard == 2
    assert recipe_of(by_name).recompute_blocks == 32
    away = row(QLORA, gpus=2, lora=lora, zero_stage=3, offload="params (FSDP CPU offload)")
    assert recipe_of(away).offload == "parameters"
    with pytest.raises(NotExpressible, match="HQQ"):
        translate(row(QLORA, gpus=2, lora=lora, quant="hqq 4 bit"))


def test_peft_experiments() -> None:
    rest = ["AdamW", False, 4, 768, 0, 13.4, 20.76, 6.5, 7000]
    found = make_row(["lora/llama-3.2-3B-rank32", *rest])
    assert (found.recipe.lora.rank, found.recipe.sequence_length) == (32, 768)
    assert found.memory["peak_reserved"].value == pytest.approx(20.76 * 2**30)
    mlp = make_row(["lora/llama-3.2-3B-rank10-target-mlp", *rest])
    assert mlp.recipe.lora.targets == ("up_proj", "gate_proj", "down_proj")
    for name in ("ia3/llama-3.2-3B-default", "lora/llama-3.2-3B-rank32-dora"):
        with pytest.raises(NotExpressible, match="is no method of memfit's"):
            make_row([name, *rest])
