"""modelscope/ms-swift's benchmark: its trainer is Hugging Face's, batches of one.

Its counter is torch's `max_memory_reserved` (swift/trainers/trainers.py of January 2024). Its rows
are an article each, 91 to 19,548 tokens cut at the printed length and never padded, so the figure
holds what the allocator keeps after steps of many lengths; a recipe has one. The rows stand apart
(confidence low): their figure bounds the peak of the longest row from above, and judges no more.
"""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of
from published._qwen1 import config, targets

LIKE_QWEN = ("Qwen-", "Yi-", "mistral", "baichuan2-7b")  # gated blocks with rotary positions


def translate(row: Published) -> Translated:
    """See the package."""
    c, name = row["config"], row["model"]["name"]
    if c.get("quant"):
        raise NotExpressible(f"weights stored as {c['quant']} are not described")
    if row["hardware"]["n_gpus"] > 1:
        raise NotExpressible("layers spread over devices (device_map) are not described")
    if c.get("attention") == "eager":
        raise NotExpressible("attention computed by the class itself (eager) is not described")
    if not name.startswith(LIKE_QWEN):
        raise NotExpressible(f"the family of `{name}` is not described")
    request: dict[str, Any] = {
        "framework": "hf-trainer",
        "model": config(row) | {"model_type": "qwen2" if name.startswith("Qwen-") else "llama"},
        "hardware": hardware_of(row),
        "task": {
            "objective": "sft", "sequence_length": row["model"]["seq_len"], "packing": False,
            "global_batch": c["global_batch"],
        },
        "micro_batch": c["micro_batch"],
        "precision": "bf16-mixed" if c.get("lora") else "bf16",
        "method": "lora" if c.get("lora") else "full",
        "base_format": "bf16",
        "recompute": "full" if c["recompute"] == "full" else "none",
        "optimizer": {"implementation": "foreach"},
    }  # fmt: skip
    if c.get("lora"):
        asked = targets(c["lora"]["targets"])
        request["lora"] = {"rank": c["lora"]["rank"], "targets": asked, "dropout": 0.05}
    return Translated(
        request, "peak_reserved", confidence="low",
        assumed="By swift/trainers/trainers.py (97e4d198b): max_memory_reserved. Each row is an"
        " article of its own length, never padded: what the allocator keeps after steps of many"
        " lengths is counted with the peak of the longest.",
    )  # fmt: skip
