"""One rank of worlds that are published: certified as typed, predicted, beside what was measured.

    python bench/big_worlds.py        writes bench/results/big_worlds.json and prints a table

The claims: each certificate within 60 s and 6 GB on 2 cores, but for rows of 131,072 tokens shared
by 16 ranks, whose attention is 16 turns in each block (about 90 s); predictions within 2 % of
allocated bytes. Published figures are torchtitan's reserved memory (pytorch/torchtitan, benchmarks/
llama3_h100_202412_torchtitan.md) of the nearest layout, which is never the same step: `differs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks import certify, record

from memfit import api
from memfit.records import from_data
from memfit.records.request import Request

RESULTS = Path(__file__).resolve().parent / "results" / "big_worlds.json"
COMMON = {
    "hardware.device": "h100-sxm", "hardware.count": 8, "precision": "bf16-mixed",
    "method": "full", "attention": "flash", "task.packing": "false",
}  # fmt: skip
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    (
        "llama-3.1-8b",
        {"hardware.nodes": 8, "parallel.dp_shard": 64, "task.global_batch": 128, "micro_batch": 2,
         "task.sequence_length": 8192, "recompute": "selective", "loss": "plain"},
        {"id": "titan-l31-8b-h100x128-bs2-eager", "reserved_gib": 67.0,
         "differs": "128 GPUs; torchtitan's selective recomputation keeps every second product"},
    ),
    (
        "llama-3.1-70b",
        {"hardware.nodes": 64, "parallel.dp_shard": 64, "parallel.tp": 8,
         "task.global_batch": 1024, "micro_batch": 16, "task.sequence_length": 8192,
         "recompute": "full", "loss": "plain"},
        {"id": "titan-l31-70b-h100x256-tp8-fp8-asynctp", "reserved_gib": 67.6,
         "differs": "256 GPUs; products in fp8, compiled, asynchronous tensor parallelism"},
    ),
    # first and last: meshes of table 4 of The Llama 3 Herd of Models (2407.21783), which gives no
    # memory
    (
        "llama-3.1-405b",
        {"hardware.nodes": 2048, "parallel.pp": 16, "parallel.dp_shard": 128, "parallel.tp": 8,
         "task.global_batch": 2048, "micro_batch": 1, "task.sequence_length": 8192,
         "recompute": "full", "loss": "plain"},
        {"id": "", "reserved_gib": None, "differs": "none published"},
    ),
    (
        "llama-3.1-405b",
        {"hardware.nodes": 2048, "parallel.pp": 16, "parallel.dp_shard": 64, "parallel.cp": 2,
         "parallel.tp": 8, "task.global_batch": 1024, "micro_batch": 1,
         "task.sequence_length": 16384, "recompute": "full", "loss": "plain"},
        {"id": "", "reserved_gib": None, "differs": "none published"},
    ),
    (
        "llama-3.1-405b",
        {"hardware.nodes": 2048, "parallel.pp": 16, "parallel.dp_shard": 8, "parallel.cp": 16,
         "parallel.tp": 8, "task.global_batch": 128, "micro_batch": 1,
         "task.sequence_length": 131072, "recompute": "full", "loss": "plain"},
        {"id": "", "reserved_gib": None, "differs": "none published"},
    ),
)  # fmt: skip


def request_of(model: str, stated: dict[str, Any]) -> Request:
    found: dict[str, Any] = {"model": model}
    for key, value in stated.items():
        group, _, name = key.rpartition(".")
        (found.setdefault(group, {}) if group else found)[name] = (
            False if value == "false" else value
        )
    return from_data(found, Request, source="bench/big_worlds.py")


def main() -> None:
    rows = []
    for model, own, published in CASES:
        stated = COMMON | own
        row = {"model": model, "asks": own, **certify(model, stated)}
        memory = api.predict(request_of(model, stated)).memory
        row["predicted_allocated"] = memory.peak_allocated
        row["error"] = round(memory.peak_allocated / row["peak_allocated"] - 1, 5)
        row["published"] = published
        rows.append(row)
        print(
            f"{model:15} {row['wall_seconds']:5.1f} s wall  {row['cpu_seconds']:5.1f} s CPU"
            f"  {row['largest_rss_mb']:5} MB  {row['peak_allocated'] / 2**30:6.2f} GiB allocated"
            f"  {row['peak_reserved'] / 2**30:6.2f} reserved  {row['error']:+.2%} predicted"
            f"  {published['reserved_gib'] or 'none'} published",
            flush=True,
        )
    record(rows, RESULTS)


if __name__ == "__main__":
    main()
