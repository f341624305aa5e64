"""MLCommons training results v5.0: NeMo on H100, GB200 and B200, allocated bytes of rank 0.

What the logs leave out is in the submissions' folders (config_*.sh, train.py, pretrain.py).
Fine-tuning: adapters of rank 16 beside linear_qkv and linear_proj with a dropout of 0.1, weights
and attention in FP8, tokens and heads exchanged among cp ranks; on one cp rank the activation's
input is kept in FP8 too. Pretraining: weights stored in FP8, 16-bit gradients, the embedding and
the head counted as blocks of the pipeline; rank 0, which writes the log, is of its first stage.
"""

from __future__ import annotations

import re

from published import (
    NotExpressible,
    Published,
    Translated,
    hardware_of,
    kind_of,
    llama_config,
    task_of,
)

ROUNDS = {"v4.0": 202404, "v4.1": 202410, "v5.0": 202504}  # of submission
UNSAID = "CUDA graphs and tp's overlap, which MLPerf's runs may have, are not in the recipe."


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c = row["config"]
    if not c.get("lora"):
        return _pretraining(row)
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
            "accumulate_allreduce_grads_in_fp32": False, "version": version_of(row),
        },
    }  # fmt: skip
    return Translated(request, kind_of(row), assumed=UNSAID)


def version_of(row: Published) -> int:
    """Year and month of the container in the submission's name, or of the round."""
    named = re.search(r"ngc(\d\d)\.(\d\d)", row["source"])
    if named:
        return int(f"20{named[1]}{named[2]}")
    return next((date for start, date in ROUNDS.items() if start in row["source"]), 0)


def _pretraining(row: Published) -> Translated:
    c = row["config"]
    if "fp8" not in c["precision"] or not c["recompute"].startswith("none"):
        raise NotExpressible(f"precision {c['precision']}, recompute {c['recompute']}")
    split = c["pp"] > 1
    request = {
        "model": llama_config(row),
        "framework": "megatron",
        "task": task_of(row),
        "precision": "fp8-mixed",
        "micro_batch": c["micro_batch"],
        "attention": "cudnn",
        "recompute": "none",
        "parallel": {
            "dp_shard": c["dp"], "zero": 1, "tp": c["tp"], "pp": c["pp"], "cp": c["cp"],
            "virtual_pp": c.get("vp") or 1, "sequence_parallel": bool(c["sp"]),
        },
        "hardware": hardware_of(row),
        "options": {
            "rank": "first", "fp8_param_gather": True, "accumulate_allreduce_grads_in_fp32": False,
            "cross_entropy_loss_fusion": "native",
            "account_for_embedding_in_pipeline_split": split,
            "account_for_loss_in_pipeline_split": split,
            "create_attention_mask_in_dataloader": False, "version": version_of(row),
        },
    }  # fmt: skip
    return Translated(request, kind_of(row), assumed=UNSAID)
