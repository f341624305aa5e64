"""pytorch/torchtitan's benchmark pages, and pytorch/ao's, whose training runs are torchtitan's.

The figure is torchtitan's `max_reserved_gib` (ao prints it as GB), the largest of all ranks. Which
code ran: torchtitan's pages have their month in their names; of ao's page each table states it,
one table a device (H100: 0.0.2 of early March 2025; MI300X and B200: August 2025). Without a
stated number of micro-batches, a pipeline takes as many as it has pieces.
"""

import re

from published import (
    NotExpressible,
    Published,
    Translated,
    device_of,
    hardware_of,
    llama_config,
    number_in,
    task_of,
)

FIRST = 202404  # docs/performance.md, early revision
AO = {"H100": 202503, "MI300X": 202508, "B200": 202508}  # the loss was not yet compiled in 0.0.2
UNSAID = "Whether weights are gathered in FP8 is not stated: taken as not."
PIECES_APART = 202505  # from when on Blackwell takes cuDNN's attention first


def version_of(row: Published) -> int:
    """Year and month of the code that ran."""
    if row["source"].startswith("pytorch/ao"):
        for device, version in AO.items():
            if device in row["hardware"]["gpu"]:
                return version
        raise NotExpressible(f"no table of the page is for `{row['hardware']['gpu']}`")
    found = re.search(r"_(20\d\d)-?(\d\d)(?!\d)", row["source"])
    return int(found[1] + found[2]) if found else FIRST


def translate(row: Published) -> Translated:
    config, version = row["config"], version_of(row)
    framework = str(config.get("framework", ""))
    if "torchtitan" not in framework:
        raise NotExpressible(f"a run of `{framework}`, whose step is not said")
    tp, pp, vp = config["tp"], config.get("pp") or 1, config.get("vp") or 1
    local = config.get("micro_batch") or number_in(config.get("extra"), r"local batch (\d+)")
    if not local:
        raise NotExpressible("the local batch is not stated")
    micro = local // (pp * vp) if pp > 1 else local
    batch = config["dp"] * local * (config.get("grad_accum") or 1)
    said = str(config["recompute"])
    every = number_in(said, r"every (\d+)")
    recompute = (
        {"blocks": row["model"]["n_layers"] // every} if every
        else "selective" if "selective" in said else said
    )  # fmt: skip
    blackwell = device_of(row).startswith(("b200", "gb200", "b300", "gb300"))
    return Translated(
        request={
            "framework": "torchtitan",
            "model": llama_config(row),
            "task": task_of(row) | {"global_batch": batch},
            "micro_batch": micro,
            "precision": "fp8-mixed" if config.get("quant") else "bf16-mixed",
            "recompute": recompute,
            "compile": "blocks" if config.get("compile") else "none",
            "attention": "cudnn" if blackwell and version >= PIECES_APART else "flash",
            "parallel": {
                "dp_shard": config["dp"], "tp": tp, "sequence_parallel": tp > 1,
                "cp": config.get("cp") or 1, "pp": pp, "virtual_pp": vp,
            },
            "options": {"version": version} | clock(row),
            "hardware": hardware_of(row),
        },
        kind="peak_reserved",
        assumed=UNSAID if str(config.get("quant")) in ("float8", "float8-tensorwise") else "",
    )  # fmt: skip


def clock(row: Published) -> dict[str, object]:
    """Options that change a step's time alone, from the row's words."""
    config = row["config"]
    quant, extra = str(config.get("quant")), str(config.get("extra"))
    found: dict[str, object] = {"async_tp": "async TP" in extra}
    recipes = ("rowwise_with_gw_hp", "rowwise", "mxfp8")  # the longer name first
    found["float8_recipe"] = next((word for word in recipes if word in quant), "tensorwise")
    found["float8_all_gather"] = "fp8 all-gather" in quant
    if (config.get("vp") or 1) > 1 or "interleaved" in extra.lower():
        found["pipeline_schedule"] = "Interleaved1F1B"
    return found
