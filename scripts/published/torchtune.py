"""pytorch/torchtune's README: the ladder of techniques, and the table of models.

The ladder prints active bytes; the table does not say which of its three counters it prints. Rows
whose dataset is not said to be packed are refused: rows of text are shorter than the maximum then.
"""

from typing import Any

from published import (
    NotExpressible,
    Published,
    Translated,
    hardware_of,
    kind_of,
    llama_config,
    task_of,
)

NAMES = {"output_proj": ("o_proj",), "mlp": ("gate_proj", "up_proj", "down_proj")}


def translate(row: Published) -> Translated:
    config = row["config"]
    if not config.get("packed"):
        raise NotExpressible("the dataset is not said to be packed: lengths are unknown")
    offload, extra = str(config.get("offload") or ""), str(config.get("extra") or "")
    request: dict[str, Any] = {
        "framework": "torchtune",
        "model": llama_config(row),
        "task": task_of(row) | {"packing": True},
        "micro_batch": config["micro_batch"],
        "precision": "bf16",
        "method": "lora" if config.get("lora") else "full",
        "base_format": "nf4" if "nf4" in str(config.get("quant")) else "bf16",
        "recompute": config["recompute"],
        "loss": "chunked" if config.get("fused_ce") or "Llama-3.1" in row["model"]["name"]
        else "plain",
        "compile": "blocks" if config.get("compile") else "none",
        "offload": "activations" if "activations" in offload
        else "parameters" if "params" in offload else "none",
        "optimizer": {"name": "adamw8bit" if "8bit" in config["optimizer"] else "adamw"},
        "options": {
            "optimizer_in_bwd": "fused into backward" in extra,
            "custom_sharded_layers": "params" in offload,  # as its config, 70B_full, has it
        },
        "parallel": {"dp_shard": config["dp"]},
        "hardware": hardware_of(row),
    }  # fmt: skip
    if config.get("lora"):
        said = [name.strip() for name in str(config["lora"]["targets"]).split(",")]
        unknown = set(said) - {"q_proj", "k_proj", "v_proj", *NAMES}
        if unknown:
            raise NotExpressible(f"adapters on `{', '.join(sorted(unknown))}`: not said which")
        targets = [part for name in said for part in NAMES.get(name, (name,))]
        request["lora"] = {"rank": config["lora"]["rank"], "targets": targets}
    return Translated(request=request, kind=kind_of(row))
