"""Trainers of one page each: fms-fsdp, flash-attention's GPT, llm.c, TinyLlama, MaxText.

fms-fsdp: how many blocks its selective checkpointing took is not stated; a third of the ratio of
the printed HFU over MFU above one is a block's share. flash-attention: sequences a device by
training/configs/experiment/pile on 80 GB; states are cut from 760M on. llm.c: flags of
scripts/run_gpt2_*.sh.
"""

from __future__ import annotations

from typing import Any

from published import NotExpressible, Published, Translated, hardware_of, kind_of, llama_config
from published.llm_foundry import gpt2_config

PER_DEVICE = {768: 32, 1024: 32, 1536: 16, 2048: 8, 2560: 4}  # hidden size -> sequences
ZERO_FROM = 1536  # adamw-zero


def translate(row: Published) -> Translated:
    """The request of a row; raises NotExpressible."""
    name = row["config"].get("framework") or row["source"].partition(" ")[0]
    readers = {
        "FSDP1 (fms)": _fms, "flash-attn": _flash, "llm.c": _llm_c,
        "jzhang38/TinyLlama": _tinyllama, "MaxText": _maxtext,
    }  # fmt: skip
    for start, reader in readers.items():
        if name.startswith(start):
            return reader(row)
    raise NotExpressible(f"`{name}` is not described")


def _request(row: Published, micro: int, **others: Any) -> dict[str, Any]:
    batch = row["config"]["global_batch"]
    length = row["model"]["seq_len"]
    return {
        "task": {"sequence_length": length, "global_batch": batch, "packing": False},
        "micro_batch": micro, "hardware": hardware_of(row), **others,
    }  # fmt: skip


def _fms(row: Published) -> Translated:
    c, measured, devices = row["config"], row["measured"], row["hardware"]["n_gpus"]
    blocks, assumed = 0, ""
    if c["recompute"] != "none":
        again = min(1.0, 3 * (measured["hfu"] / measured["mfu"] - 1))
        blocks = round(again * row["model"]["n_layers"])
        assumed = f"Blocks computed again ({blocks}): from the printed HFU and MFU."
    node = row["hardware"]["gpus_per_node"]
    hybrid = c["fsdp"] == "HSDP"
    parallel = {"dp_replicate": devices // node, "dp_shard": node} if hybrid else {}
    request = _request(
        row, c["micro_batch"], framework="fms-fsdp", model=llama_config(row),
        recompute={"blocks": blocks}, compile="model" if c["compile"] else "none",
        parallel=parallel or {"dp_shard": devices},
    )  # fmt: skip
    return Translated(request, kind_of(row), assumed=assumed)


def _flash(row: Published) -> Translated:
    c, hidden = row["config"], row["model"]["hidden"]
    if hidden not in PER_DEVICE or row["hardware"]["mem_gb"] < 80:
        raise NotExpressible("its sequences a device are in no experiment's file")
    cut = hidden >= ZERO_FROM
    request = _request(
        row, PER_DEVICE[hidden], framework="flash-attention", model=gpt2_config(row),
        parallel={"dp_shard" if cut else "dp_replicate": c["dp"], "zero": 1},
    )  # fmt: skip
    assumed = f"Assumed: {PER_DEVICE[hidden]} sequences a device, as its experiment's file."
    return Translated(request, kind_of(row), assumed=assumed)


def _tinyllama(row: Published) -> Translated:
    c = row["config"]
    if c["recompute"] != "none" or not str(c["fsdp"]).startswith("FULL_SHARD"):
        raise NotExpressible(f"recompute {c['recompute']}, shards {c['fsdp']}")
    request = _request(
        row, c["micro_batch"], framework="tinyllama", model=llama_config(row),
        parallel={"dp_shard": c["dp"]},
    )  # fmt: skip
    return Translated(request, kind_of(row))


def _maxtext(row: Published) -> Translated:
    c = row["config"]
    said = c["recompute"].partition(" ")[0]
    known = {"minimal_flash": "selective", "full": "full", "none": "none"}
    if said not in known or not c["precision"].startswith("bf16"):
        raise NotExpressible(f"remat_policy {said}, precision {c['precision']}")
    request = _request(
        row, c["micro_batch"], framework="maxtext", model=llama_config(row), recompute=known[said],
        parallel={"dp_shard": c["dp"], "tp": c["tp"]},
    )  # fmt: skip
    return Translated(request, kind_of(row))


def _llm_c(row: Published) -> Translated:
    c = row["config"]
    if not c["recompute"].startswith("none"):
        raise NotExpressible(f"recompute {c['recompute']}")
    request = _request(
        row, c["micro_batch"], framework="llm-c", model=gpt2_config(row),
        parallel={"dp_shard": c["dp"], "zero": c["zero_stage"]},
    )  # fmt: skip
    return Translated(request, kind_of(row))
