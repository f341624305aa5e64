"""bigscience-workshop/bigscience: sizing BLOOM on A100-80GB with Megatron-DeepSpeed.

What the tables leave out is in the same repository: train/tr11-176B-ml (ALiBi, dropout of 0.1 by
default, activation checkpointing, ZeRO-1) and the text between the tables, which says when the
bf16 optimizer began to add up in fp32 and when the embeddings began to count as blocks.
"""

from __future__ import annotations

import re

from published import Published, Translated, hardware_of, kind_of, task_of

REBALANCED = (2, 28)  # month and day of 2022 from which the embeddings count as blocks


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c, m, notes = row["config"], row["model"], row["notes"]
    day = re.search(r"test date (\d+)-(\d+)", notes)
    rebalanced = "mbedding-aware" in notes or (
        day is not None and (int(day[1]), int(day[2])) >= REBALANCED
    )
    fp32 = "fp32" in c["grad_dtype"] and "predate" not in notes and rebalanced
    request = {
        "model": {
            "name": m["name"], "model_type": "bloom", "vocab_size": m["vocab"],
            "hidden_size": m["hidden"], "n_layer": m["n_layers"], "n_head": m["heads"],
        },
        "framework": "megatron-deepspeed",
        "task": task_of(row),
        "precision": c["precision"],
        "micro_batch": c["micro_batch"],
        "attention": "eager",
        "recompute": c["recompute"],
        "parallel": {
            "dp_shard": c["dp"] if c["zero_stage"] else 1, "zero": 1, "tp": c["tp"],
            "dp_replicate": 1 if c["zero_stage"] else c["dp"], "pp": c["pp"],
        },
        "hardware": hardware_of(row),
        "options": {
            "hidden_dropout": 0.1, "attention_dropout": 0.1, "fp32_gradients": fp32,
            "pp_partition_method": "type:transformer|embedding" if rebalanced
            else "type:transformer",
        },
    }  # fmt: skip
    return Translated(request, kind_of(row))
