"""litgpt's tables: tutorials/resource-tables.md and config_hub/finetune/README.md.

Both print `torch.cuda.max_memory_allocated() / 1e9`. Sequences are the longest sample's, which is
placed first. Dropout of the adapters, and what the tables leave out, as in the scripts and yaml
files that they name.
"""

from __future__ import annotations

import re
from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of, llama_config

WORDS = {"q": "query", "k": "key", "v": "value", "proj": "projection", "mlp": "mlp", "head": "head"}


def translate(row: Published) -> Translated:
    """See the package: the request of `litgpt finetune lora` or `litgpt finetune full`."""
    config, hub = row["config"], "config_hub" in row["source"]
    if "thunder" in row["source"]:
        return pretraining(row)
    if "Adapter" in row["source"]:
        raise NotExpressible("litgpt's adapters are no method of memfit's")
    devices = row["hardware"]["n_gpus"]
    micro = config["micro_batch"]
    accumulated = config.get("grad_accum") or config["global_batch"] // (micro * devices)
    batch = max(accumulated, 1) * micro * devices
    request: dict[str, Any] = {
        "framework": "litgpt",
        "model": model(row),
        "hardware": hardware_of(row),
        "task": {
            "objective": "sft", "sequence_length": row["model"]["seq_len"], "packing": False,
            "global_batch": batch,
        },
        "micro_batch": micro,
        "precision": "bf16",
        "method": "lora" if config.get("lora") else "full",
        "options": {
            "release": "0.4" if hub else "0.5",
            # resource-tables.md trains on whole samples, of which one is the longest; the hub's
            # yaml files cut samples at a length that many have
            "longest_samples": "many" if hub else "one",
        },
    }  # fmt: skip
    if config.get("lora"):
        asked = [WORDS[word] for word in config["lora"]["targets"].split(",")]
        gemma = "gemma" in row["model"]["name"].lower()
        request["lora"] = {
            "rank": config["lora"]["rank"], "targets": asked, "dropout": 0.1 if gemma else 0.05,
        }  # fmt: skip
    quantised = re.match(r"bnb\.(nf4|fp4)(-dq)?", config.get("quant") or "")
    if quantised:
        request["base_format"] = quantised[1]
        request["options"]["double_quantisation"] = bool(quantised[2])
    if devices > 1:
        request |= {"parallel": {"dp_shard": devices}, "recompute": "full"}
    return Translated(request, kind_of(row))


def pretraining(row: Published) -> Translated:
    """extensions/thunder/pretrain.py, as it runs without Thunder; its time is a micro-batch's."""
    c, devices = row["config"], row["hardware"]["n_gpus"]
    if c.get("compile") not in ("eager", False, None):
        raise NotExpressible(f"what `{c['compile']}` fuses is not described")
    whole = c.get("global_batch") == c["micro_batch"] * devices
    request: dict[str, Any] = {
        "framework": "litgpt",
        "model": model(row),
        "hardware": hardware_of(row),
        "task": {
            "sequence_length": row["model"]["seq_len"], "packing": False,
            # the README's commands lower the script's own 512 for the sharded runs alone
            "global_batch": c.get("global_batch") or 512,
        },
        "micro_batch": c["micro_batch"],
        "precision": "bf16",
        "method": "full",
        "loss": "plain",
        "options": {"release": "0.4"},
    }  # fmt: skip
    if devices > 1:
        sharded = (c.get("zero_stage") or 0) == 3
        request["parallel"] = {"dp_shard" if sharded else "dp_replicate": devices}
    lost = "" if whole else "the time of a micro-batch, and what a step has more is not stated"
    return Translated(request, kind_of(row), time_lost=lost)


def model(row: Published) -> dict[str, Any] | str:
    """config.json of the row's model, with the vocabulary that litgpt pads to."""
    m, name = row["model"], row["model"]["name"].lower()
    same = {
        "name": m["name"], "vocab_size": m["vocab"], "hidden_size": m["hidden"],
        "num_hidden_layers": m["n_layers"], "num_attention_heads": m["heads"],
        "intermediate_size": m["ffn"], "max_position_embeddings": m["seq_len"],
    }  # fmt: skip
    if name.startswith(("phi-1", "phi-2")):
        part = 0.5 if name.startswith("phi-1") else 0.4
        return same | {"model_type": "phi", "partial_rotary_factor": part}
    if name.startswith("stablelm-alpha"):
        return same | {"model_type": "gpt_neox", "rotary_pct": 0.25, "use_parallel_residual": True}
    if name.startswith("falcon"):
        grouped = m["kv_heads"] > 1
        return same | {
            "model_type": "falcon", "alibi": False, "bias": False, "parallel_attn": True,
            "multi_query": not grouped, "new_decoder_architecture": grouped,
            "num_kv_heads": m["kv_heads"], "ffn_hidden_size": m["ffn"],
        }  # fmt: skip
    if name.startswith("gemma"):
        return re.sub(r"^gemma2", "gemma-2", name)
    if name.startswith("phi-3"):
        return "phi-3-mini-4k-instruct"
    if name.startswith(("llama", "tinyllama", "mistral")):
        return llama_config(row)
    raise NotExpressible(f"no config.json is known of `{m['name']}`")
