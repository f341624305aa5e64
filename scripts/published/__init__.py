"""Published measurements as rows of the corpus: what all translators share.

One module a source says how its rows are to be read: `translate(row) -> Translated`, or it raises
NotExpressible with the reason. It reads fields and notes of the row, never its id, so that rows of
the same source which nobody has seen yet are read by the same rules.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from memfit.core.units import GIB, MIB

Published = dict[str, Any]  # one line of published.jsonl

DEVICES = {  # how sources write a device -> id of the catalogue
    "A100-SXM-80GB": "a100-sxm-80", "A100-80GB": "a100-sxm-80", "A100-SXM-40GB": "a100-sxm-40",
    "A100-40GB (2x40GB)": "a100-sxm-40", "A800/A100-SXM-80GB": "a100-sxm-80", "A10G": "a10g",
    "H100-SXM-80GB": "h100-sxm", "H100-SXM-96GB-HBM2e(500W)": "h100-sxm-96",
    "H800-SXM-80GB": "h800-sxm", "H200-SXM-141GB": "h200-sxm", "H200-NVL-141GB (PCIe)": "h200-nvl",
    "B200-SXM-180GB": "b200-sxm", "B300-288GB": "b300-sxm", "GB200-186GB": "gb200",
    "GB300-288GB": "gb300", "V100-SXM2-16GB": "v100-sxm2-16", "V100-16GB": "v100-sxm2-16",
    "L40S-48GB": "l40s", "RTX-4090": "rtx-4090", "RTX-3090": "rtx-3090",
    "RTX-6000-Ada": "rtx-6000-ada", "RTX-A6000": "rtx-a6000", "MI300X-192GB": "mi300x",
    "MI325X-256GB": "mi325x",
}  # fmt: skip
UNITS = {"GiB": GIB, "GB10": 10**9, "MiB": MIB, "GB?": GIB}  # `GB?`: printed GB, base unknown


class NotExpressible(Exception):
    """A row that no recipe of memfit's describes, and why."""


class Translated(NamedTuple):
    """A published row in memfit's words."""

    request: dict[str, Any]  # the content of a request.yaml
    kind: str  # what its memory figure counts: one of `memfit.accuracy.corpus.MEMORY_KINDS`
    memory_lost: str = ""  # why its memory figure judges no recipe; "" where it does
    time_lost: str = ""  # the same of its step time
    assumed: str = ""  # what its step takes and neither row nor page says; for the row's notes
    unit: int = 0  # bytes of the printed unit where the source's code says so; 0: the row's own
    confidence: str = ""  # of the row where the source's code says more than its page


def kind_of(row: Published) -> str:
    """What the printed memory figure counts, by the source's own words."""
    said = str(row["measured"].get("peak_mem_kind", ""))
    for start, kind in (
        ("allocated", "peak_allocated"),
        ("active", "peak_active"),
        ("reserved-like", "unspecified"),  # read off a shape of numbers, not off a tool
        ("reserved", "peak_reserved"),
        ("nvidia-smi", "device_total"),
    ):
        if said.startswith(start):
            return kind
    return "unspecified"


def device_of(row: Published) -> str:
    """The catalogue's id of the row's device."""
    name = row["hardware"]["gpu"]
    if name not in DEVICES:
        raise NotExpressible(f"the device `{name}` is in no catalogue row")
    return DEVICES[name]


def hardware_of(row: Published) -> dict[str, Any]:
    """`hardware:` of a request."""
    hardware = row["hardware"]
    count, node = int(hardware["n_gpus"]), int(hardware.get("gpus_per_node") or 1)
    if count <= node or count % node:
        return {"device": device_of(row), "count": count}
    return {"device": device_of(row), "count": node, "nodes": count // node}


def llama_config(row: Published, **changes: Any) -> dict[str, Any]:
    """config.json of a gated decoder with grouped attention and the row's sizes."""
    m = row["model"]
    config = {
        "name": m["name"],
        "model_type": "llama",
        "vocab_size": m["vocab"],
        "hidden_size": m["hidden"],
        "intermediate_size": m["ffn"],
        "num_hidden_layers": m["n_layers"],
        "num_attention_heads": m["heads"],
        "num_key_value_heads": m["kv_heads"],
        "max_position_embeddings": m["seq_len"],
        "tie_word_embeddings": bool(row["config"].get("tied_embeddings")),
    }
    if m.get("head_dim"):
        config["head_dim"] = m["head_dim"]
    return config | changes


def task_of(row: Published) -> dict[str, Any]:
    """`task:` of a request: the sequence and the global batch, one of which may follow."""
    config, devices = row["config"], row["hardware"]["n_gpus"]
    micro = config.get("micro_batch") or 1
    model_ranks = (config.get("tp") or 1) * (config.get("pp") or 1) * (config.get("cp") or 1)
    ranks = config.get("dp") or max(1, devices // model_ranks)
    batch = config.get("global_batch") or micro * ranks * (config.get("grad_accum") or 1)
    batch = max(micro * ranks, batch // (micro * ranks) * micro * ranks)
    return {"sequence_length": row["model"]["seq_len"], "global_batch": batch, "packing": False}


def number_in(text: object, pattern: str) -> int | None:
    """The first group of a pattern in a text, as a whole number."""
    found = re.search(pattern, str(text))
    return int(found[1]) if found else None
