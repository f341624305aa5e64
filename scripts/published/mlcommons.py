"""MLCommons training results v5.0: NeMo on GB200 and B200, allocated bytes of one rank.

What the logs leave out is in the submissions' folders (config_*.sh, train.py): adapters of rank 16
beside linear_qkv and linear_proj with a dropout of 0.1, weights and attention in FP8, tokens and
heads exchanged among cp ranks; on one cp rank the activation's input is kept in FP8 too.
"""

from __future__ import annotations

from published import (
    NotExpressible,
    Published,
    Translated,
    hardware_of,
    kind_of,
    llama_config,
    task_of,
)


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c = row["config"]
    if not c.get("lora"):
        raise NotExpressible(
            "one rank of a pipeline whose stage is not said, with FP8 weights and user buffers"
        )
    targets = [name.strip() for name in c["lora"]["targets"].split(",")]
    request = {
        "model": llama_config(row),
        "framework": "megatron",
        "task": task_of(row),
        "method": "lora",
        "lora": {
            "rank": c["lora"]["rank"], "alpha": c["lora"]["alpha"], "dropout": 0.1,
            "targets": targets,
        },
        "precision": "fp8-mixed" if "fp8" in c["precision"] else "bf16-mixed",
        "micro_batch": c["micro_batch"],
        "attention": "cudnn",
        "recompute": c["recompute"],
        "parallel": {
            "dp_shard": c["dp"], "zero": 1, "tp": c["tp"], "pp": c["pp"], "cp": c["cp"],
            "sequence_parallel": bool(c["sp"]),
        },
        "hardware": hardware_of(row),
        "options": {
            "cp_comm_type": "a2a", "fp8_dot_product_attention": "fp8" in c["attention"],
            "activation_func_fp8_input_store": c["cp"] == 1,
            "accumulate_allreduce_grads_in_fp32": False,
        },
    }  # fmt: skip
    return Translated(request, kind_of(row))
