"""FlagOpen/FlagPerf: Megatron-core 0.6 and FlagScale on A800, H100 and H800 (nvidia-smi).

What the tables leave out is in the launch scripts of training/benchmarks: the Llama-3 ones keep
Megatron's defaults (dropout of 0.1, biases, learned positions, a tied head); FlagScale's Llama-2
one turns dropout and biases off.
"""

from __future__ import annotations

from typing import Any

from published import (
    NotExpressible,
    Published,
    Translated,
    hardware_of,
    kind_of,
    llama_config,
    task_of,
)
from published.llm_foundry import gpt2_config


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    framework = row["config"]["framework"]
    if "Paddle" in framework:
        return _paddle(row)
    if framework.startswith("Megatron-core") and not row["model"].get("n_experts"):
        return _megatron(row, _llama3(row))
    if framework == "FlagScale/Megatron":
        return _megatron(row, {"transformer_impl": "legacy"})
    if framework == "Megatron-DeepSpeed":
        return _deepspeed(row)
    if framework.startswith("DeepSpeed") and row["model"]["name"].startswith("Llama"):
        return _zero(row)
    raise NotExpressible(f"{framework}: optimizer's sharding or recompute are not stated")


def _llama3(row: Published) -> dict[str, Any]:
    """Megatron's defaults, which the Llama-3 scripts leave as they are."""
    return {
        "hidden_dropout": 0.1, "attention_dropout": 0.1,
        "position_embedding_type": "learned_absolute",
    }  # fmt: skip


def _megatron(row: Published, options: dict[str, Any]) -> Translated:
    c = row["config"]
    defaults = "hidden_dropout" in options
    fp32 = c["precision"].startswith("fp32")
    request = {
        "model": llama_config(
            row, attention_bias=defaults, mlp_bias=defaults, tie_word_embeddings=defaults
        ),
        "framework": "megatron",
        "task": task_of(row),
        "precision": "fp32" if fp32 else "fp8-mixed" if "fp8" in c["precision"] else "bf16-mixed",
        "micro_batch": c["micro_batch"],
        "attention": "eager" if fp32 else "flash",  # its FlashAttention takes 16 bits alone
        "recompute": "selective" if fp32 else "none",  # --recompute-activations
        "parallel": {
            "dp_shard": c["dp"], "zero": 1, "tp": c["tp"], "pp": c["pp"],
            "sequence_parallel": c["tp"] > 1,
        },
        "hardware": hardware_of(row),
        "options": options | {"in_place_loss": False},  # core 0.6 and FlagScale of early 2024
    }  # fmt: skip
    return Translated(request, kind_of(row))


def _deepspeed(row: Published) -> Translated:
    c = row["config"]
    request = {
        "model": llama_config(row, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
        "framework": "megatron-deepspeed",
        "task": task_of(row),
        "precision": "bf16-mixed",
        "micro_batch": c["micro_batch"],
        "attention": "flash",
        "recompute": "none",
        "parallel": {"dp_shard": c["dp"], "zero": 1, "tp": c["tp"], "pp": c["pp"]},
        "hardware": hardware_of(row),
        # grad_accum_dtype: bf16 and a bucket of 5e6, from the script's ds_config.json; what stands
        # behind the `#` of the launch command never reaches it: RMSNorm, no biases
        "options": {
            "fp32_gradients": False, "reduce_bucket_size": 5_000_000, "normalization": "LayerNorm",
        },
    }  # fmt: skip
    return Translated(request, kind_of(row))


def _paddle(row: Published) -> Translated:
    """PaddleNLP 2.6 on Paddle 2.5.1, by the configurations of training/nvidia/*-paddle."""
    c, m = row["config"], row["model"]
    if not c["precision"].startswith("fp16"):
        raise NotExpressible(f"Paddle's precision {c['precision']}")
    request = {
        "model": gpt2_config(row) if m.get("arch") == "gpt" else llama_config(row),
        "framework": "paddlenlp",
        "task": task_of(row),
        "precision": "fp16-mixed",
        "micro_batch": c["micro_batch"],
        "attention": "flash",
        "recompute": c["recompute"],
        "parallel": {
            "dp_shard": c["dp"], "zero": c["zero_stage"], "tp": c["tp"], "pp": c["pp"],
        },
        "hardware": hardware_of(row),
        "options": {"use_fused_rms_norm": "fused_rms_norm 1" in str(c.get("extra"))},
    }  # fmt: skip
    return Translated(request, kind_of(row), memory_lost="PaddlePaddle")


def _zero(row: Published) -> Translated:
    """Hugging Face's class under ZeRO-3; bucket sizes from llama2_7b/deepspeed/ds_config.json.

    config/requirements.txt pins transformers 4.34.1, whose class upcasts and shifts whole logits.
    """
    c = row["config"]
    request = {
        "model": llama_config(row),
        "framework": "deepspeed",
        "task": task_of(row),
        "precision": "bf16-mixed",
        "micro_batch": c["micro_batch"],
        "attention": "flash",
        "recompute": c["recompute"],
        "parallel": {"dp_shard": c["dp"], "zero": c["zero_stage"]},
        "hardware": hardware_of(row),
        "options": {
            "prefetch_bucket_size": 10**7, "allgather_bucket_size": 10**8,
            "reduce_bucket_size": 10**7, "release": "4.38",
        },
    }  # fmt: skip
    return Translated(request, kind_of(row))
