"""InternLM/InternEvo's table of throughputs and its two tables of FLOPS: 7B on 8 to 1,024 A100.

`pack_sample_into_one` is a matter of data alone: with it attention ends at each 2,048th token of a
pack (PackedDatasetWithoutCuSeqlen in internlm/data/tokenized/packed_dataset.py), without it where a
document does. Groups of `zero1` hold one copy of the states each.
"""

from __future__ import annotations

from typing import Any

from published import (
    NotExpressible,
    Published,
    Translated,
    hardware_of,
    kind_of,
    llama_config,
    number_in,
    task_of,
)


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    c = row["config"]
    extra = str(c.get("extra"))
    group = c["dp"] if "group size = dp" in extra else number_in(extra, r"group size (\d+)")
    if not group or c["dp"] % group:
        raise NotExpressible(f"the group of ZeRO-1 in `{extra}`")
    whole = "pack_sample_into_one=True" in extra
    request: dict[str, Any] = {
        "framework": "internevo",
        "model": llama_config(row, attention_bias=True),
        "task": task_of(row) | {"packing": not whole},
        "micro_batch": c["micro_batch"],
        "precision": c["precision"],
        "recompute": c["recompute"],
        "attention": "flash",
        "parallel": {
            "dp_shard": group, "dp_replicate": c["dp"] // group, "zero": 1, "tp": c["tp"],
            "pp": c.get("pp") or 1,
        },
        "hardware": hardware_of(row),
    }  # fmt: skip
    assumed = "" if whole else "Assumed: rows of the data are as long as documents are; unknown."
    return Translated(request, kind_of(row), assumed=assumed)
