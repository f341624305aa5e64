"""peft's own figures: method_comparison/MetaMathQA, and its documentation's launch commands."""

from __future__ import annotations

import re
from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of, llama_config


def translate(row: Published) -> Translated:
    """See the package."""
    if "MetaMathQA" in row["source"]:
        return Translated(metamath(row), kind_of(row))
    return Translated(documented(row), kind_of(row))


def metamath(row: Published) -> dict[str, Any]:
    """The comparison's own loop: bf16 weights, no autocast, adapters of fp32, padded batches."""
    config = row["config"]
    request: dict[str, Any] = {
        "framework": "hf-trainer",
        "model": llama_config(row),
        "hardware": hardware_of(row),
        "task": {
            "objective": "sft", "sequence_length": row["model"]["seq_len"], "packing": False,
            "global_batch": config["global_batch"],
        },
        "micro_batch": config["micro_batch"],
        "precision": "bf16",
        "method": "full",
        "recompute": "none",
        "options": {"padded": True, "keeps_outputs": True},
    }  # fmt: skip
    lora = config.get("lora")
    if lora:
        targets = lora["targets"].partition(" ")[0]
        if "(" in lora["targets"]:
            raise NotExpressible(
                f"`{lora['targets'].partition('(')[2][:-1]}` is no method of memfit's"
            )
        if config["optimizer"] != "AdamW":
            raise NotExpressible(f"the optimizer `{config['optimizer']}` is not described")
        request["method"] = "lora"
        request["lora"] = {"rank": lora["rank"], "targets": targets.split(",")}
    return request


def documented(row: Published) -> dict[str, Any]:
    """A launch command of the documentation: TRL's SFTTrainer through accelerate."""
    c, devices = row["config"], row["hardware"]["n_gpus"]
    if c.get("offload") not in (None, "none"):
        raise NotExpressible(f"offload of {c['offload']} is not described")
    if not c.get("zero_stage"):
        raise NotExpressible("accelerate's FSDP is not described")
    request: dict[str, Any] = {
        "framework": "deepspeed",
        "model": llama_config(row),
        "hardware": hardware_of(row),
        "task": {
            "objective": "sft", "sequence_length": row["model"]["seq_len"], "packing": False,
            "global_batch": c["global_batch"],
        },
        "micro_batch": c["micro_batch"],
        "precision": "bf16-mixed",
        "method": "lora",
        "lora": {"rank": c["lora"]["rank"], "targets": [c["lora"]["targets"]]},
        "recompute": "full" if c["recompute"] == "full" else "none",
        "parallel": {"dp_shard": devices, "zero": c["zero_stage"]},
    }  # fmt: skip
    if "nf4" in (c.get("quant") or ""):
        request["base_format"] = "nf4"
        request["options"] = {"double_quantisation": "double-quant" in c["quant"]}
    return request


LLAMA_3_2_3B = {
    "name": "Llama-3.2-3B", "n_layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8,
    "ffn": 8192, "vocab": 128256,
}  # fmt: skip


def experiment(record: list[Any]) -> Published:
    """A record of the comparison's results as a published row; raises NotExpressible."""
    name, optimizer, autocast, rows, tokens = record[:5]
    method, _, variant = str(name).partition("/")
    if autocast:
        raise NotExpressible("autocast over fp32 adapters (use_amp) is not described")
    config: dict[str, Any] = {
        "micro_batch": rows, "global_batch": rows, "optimizer": optimizer, "tied_embeddings": True,
    }  # fmt: skip
    if method == "lora":
        said = re.fullmatch(r"llama-3\.2-3B-rank(\d+)(-rslora|-target-mlp)?", variant)
        if said is None:
            raise NotExpressible(f"`{variant}` of LoRA is no method of memfit's")
        mlp = said[2] == "-target-mlp"
        targets = "up_proj,gate_proj,down_proj" if mlp else "q_proj,v_proj"
        config["lora"] = {"rank": int(said[1]), "targets": targets}
    elif method != "full-finetuning":
        raise NotExpressible(f"`{method}` is no method of memfit's")
    return {
        "model": LLAMA_3_2_3B | {"seq_len": tokens},
        "hardware": {"gpu": "L40S-48GB", "n_gpus": 1, "gpus_per_node": 1},
        "config": config,
        "measured": {},
    }
