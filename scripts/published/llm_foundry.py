"""mosaicml/llm-foundry's benchmark tables: MPT of 125M to 70B on A100 and H100 under FSDP1.

What the tables leave out is in scripts/train/benchmarking at the commits that brought them. The
models have learned positions (the stated number of parameters grows with the sequence), biases and
a tied head: GPT-2's sizes. `submit_benchmarks.py` of October 2023 takes Triton's attention unless
the precision is fp8, for which it installs flash-attn 1.0.7; `sweep.py` of January 2024, which the
large-scale table came with, names `--attn_impl flash`.
"""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of, task_of

SHARDING = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}  # whether weights go after the forward
PRECISIONS = {"bf16-mixed": "bf16-mixed", "fp16-mixed": "fp16-mixed", "fp8": "fp8-mixed"}


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c = row["config"]
    if c["fsdp"] not in SHARDING:
        raise NotExpressible(f"the sharding strategy {c['fsdp']}")
    if c["precision"].split(" ")[0].split("(")[0] not in PRECISIONS:
        raise NotExpressible(f"precision {c['precision']}")
    precision = PRECISIONS[c["precision"].split(" ")[0].split("(")[0]]
    large = "Large Scale" in row["source"]
    flash = large or precision == "fp8-mixed"
    request: dict[str, Any] = {
        "framework": "composer",
        "model": gpt2_config(row),
        "task": task_of(row),
        "micro_batch": c["micro_batch"],
        "precision": precision,
        "recompute": c["recompute"],
        "attention": "flash",
        "parallel": {"dp_shard": c["dp"], "reshard_after_forward": SHARDING[c["fsdp"]]},
        "hardware": hardware_of(row),
        "options": {
            "version": 202401 if large else 202310,
            "attn_impl": "flash" if flash else "triton",
            "mixed_precision": "PURE" if "bf16" in c["grad_dtype"] else "DEFAULT",
        },
    }  # fmt: skip
    whose = "flash-attn" if flash else "Triton"
    return Translated(
        request, kind_of(row), assumed=f"Assumed: attention by {whose}, as the sweep's script."
    )


def gpt2_config(row: Published, **changes: Any) -> dict[str, Any]:
    """config.json of a decoder with learned positions, biases and the row's sizes."""
    m = row["model"]
    return {
        "name": m["name"], "model_type": "gpt2", "vocab_size": m["vocab"], "n_embd": m["hidden"],
        "n_layer": m["n_layers"], "n_head": m["heads"], "n_inner": m["ffn"],
        "n_positions": m["seq_len"], "tie_word_embeddings": True,
    } | changes  # fmt: skip
