"""Published runs as files in their tools' own keys, for `memfit check`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from memfit import api
from memfit.accuracy.corpus import Row
from memfit.export.settle import restate
from memfit.plan.frameworks import find_framework
from memfit.plan.search.search import predict_request
from memfit.records.request import Request

ROOT = Path(__file__).parents[1]
CORPUS = [ROOT / "measurements" / name for name in ("published.jsonl", "peft_metamathqa.jsonl")]
TITAN = """
[model]
flavor = "{flavor}"
[training]
local_batch_size = {r.micro_batch}
global_batch_size = {r.global_batch}
seq_len = {r.sequence_length}
[parallelism]
data_parallel_shard_degree = {r.parallel.dp_shard}
tensor_parallel_degree = {r.parallel.tp}
context_parallel_degree = {r.parallel.cp}
pipeline_parallel_degree = {r.parallel.pp}
[activation_checkpoint]
mode = "{r.recompute}"
[compile]
enable = {compiled}
"""
# whose keys say the runs of a framework
TOOLS = {
    "torchtitan": "torchtitan", "hf-trainer": "llamafactory", "trl": "trl",
    "deepspeed": "llamafactory",
}  # fmt: skip


def is_told(row: Row) -> bool:
    """Whether a row has memory, and a tool whose file says its recipe whole."""
    recipe, layers = row.recipe, row.recipe.model.config.get("num_hidden_layers")
    if recipe.framework not in TOOLS or not (row.memory or row.out_of_memory):
        return False
    said = recipe.attention == "flash" and recipe.recompute_blocks in (0, layers)
    return said or recipe.framework != "torchtitan"


def write_files(row: Row, folder: Path) -> tuple[list[Path], dict[str, Any], dict[str, str]]:
    """The files of a row, what one says beside them, and the keys that they cannot say.

    Raises InvalidRequest where the tool's files cannot say the row's mesh.
    """
    recipe, world = row.recipe, row.recipe.parallel.world
    each = min(world, recipe.devices_per_node or 8)
    knobs = find_framework(recipe.framework).knobs
    own = {k: v for k, v in recipe.options.items() if k in knobs and v != knobs[k].default}
    if own.get("modules_to_save"):  # LLaMA-Factory trains copies in fp32, the rows' loops do not
        own["copies_dtype"] = recipe.options.get("copies_dtype", "base")
    data: dict[str, Any] = {
        "hardware": {"device": recipe.device, "count": each, "nodes": world // each},
        "options": own,
    }
    model = {**recipe.model.config, "name": recipe.model.name}
    if recipe.framework == "torchtitan":
        if "lama-3" not in recipe.model.name:  # whose flavours have the same names
            data["model"] = model
        data["options"] = {key: recipe.options[key] for key in ("version", "async_tp")}
        text = TITAN.format(
            r=recipe, flavor=recipe.model.name.rpartition("-")[2],
            compiled=str(recipe.compile != "none").lower(),
        )  # fmt: skip
        path = folder / "titan.toml"
        path.write_text(text)
        return [path], data, {}
    stub: Any = SimpleNamespace(recipe=recipe, request=Request(model=model))
    plan = predict_request(restate(stub))
    made = api.export(plan, TOOLS[recipe.framework])
    files = [path for path in api.write_export(made, folder) if path.suffix != ".json"]
    return files, {**data, "model": model}, {**made.left_out, **made.changed}
