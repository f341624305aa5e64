"""peft's own figures: method_comparison/MetaMathQA, and its documentation's launch commands."""

from __future__ import annotations

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
