"""huggingface/nanotron: the Ultrascale Playbook's chart, one point a run of `run_train.py`.

What the chart does not say is taken from `scripts/scaling_benchmarks.py` at the same commit: tensor
parallelism in `REDUCE_SCATTER` mode with asynchronous communication, gradients accumulated in fp32,
no recomputing. The figure is
`Mem Res (GB)` of helpers.py (max_memory_reserved / 1024^3), which rank 0 alone writes: with
pipeline parallelism that is the first stage.
"""

from published import Published, Translated, hardware_of, llama_config, task_of


def translate(row: Published) -> Translated:
    config = row["config"]
    dp, tp = config["dp"], config["tp"]
    sharded = bool(config["zero_stage"])
    recompute = config.get("recompute") or "none"
    return Translated(
        request={
            "framework": "nanotron",
            "model": llama_config(row),
            "task": task_of(row),
            "micro_batch": config["micro_batch"],
            "recompute": recompute,
            "parallel": {
                "dp_shard" if sharded else "dp_replicate": dp,
                "zero": 1,
                "tp": tp,
                "sequence_parallel": tp > 1,
                "pp": config["pp"],
            },
            "options": {"rank": "first", "async_communication": tp > 1},
            "hardware": hardware_of(row),
        },
        kind="peak_reserved",
    )
