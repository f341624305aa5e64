"""peft's own figures: method_comparison/MetaMathQA, and its documentation's launch commands."""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of, llama_config

WORDS = {"all-linear": "all-linear"}


def translate(row: Published) -> Translated:
    """See the package."""
    if "MetaMathQA" in row["source"]:
        return Translated(metamath(row), kind_of(row))
    raise NotExpressible("no translator for these rows of peft's documentation")


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
