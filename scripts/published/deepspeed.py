"""deepspeedai/DeepSpeed's blogs and examples: Hugging Face's classes under ZeRO.

Qwen3's rows are of examples/sdma_allgather, whose script and configuration say what the page leaves
out: train_qwen3_zero3.py and ds_config_zero3.json.
"""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of, llama_config


def translate(row: Published) -> Translated:
    """See the package."""
    c, name = row["config"], row["model"]["name"]
    if not name.startswith("Qwen3"):
        raise NotExpressible(f"the family of `{name}` is not described")
    request: dict[str, Any] = {
        "framework": "deepspeed",
        "model": llama_config(row, model_type="qwen3"),
        "hardware": hardware_of(row),
        "task": {
            "sequence_length": row["model"]["seq_len"], "packing": False,
            "global_batch": c["global_batch"],
        },
        "micro_batch": c["micro_batch"],
        "precision": "bf16-mixed",
        "method": "full",
        "recompute": "full" if c.get("recompute") == "full" else "none",
        "parallel": {"dp_shard": c["dp"], "zero": c["zero_stage"]},
    }  # fmt: skip
    if "sdma_allgather" not in row["source"]:
        return Translated(request, kind_of(row))
    request["options"] = {
        "prefetch_bucket_size": 5 * 10**7, "reduce_bucket_size": 5 * 10**7,
        "allgather_bucket_size": 5 * 10**7, "sub_group_size": 10**12, "keeps_outputs": True,
    }  # fmt: skip
    return Translated(
        request, "peak_allocated", unit=10**9,
        assumed="By train_qwen3_zero3.py: max_memory_allocated() / 1e9, reset after"
        " deepspeed.initialize; nothing is recomputed; attention is torch's own (its `eager` is set"
        " where transformers does not look). Buckets by ds_config_zero3.json.",
    )  # fmt: skip
