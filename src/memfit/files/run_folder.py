"""A run folder's files: whose request it holds, and a plan as a request.

request.json  plan.json  certificate.json  run.json  report.json  report.html  log.jsonl
model.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import is_folder, read_json_file
from memfit.plan.request.wording import restate
from memfit.records import from_data, read_json, to_data
from memfit.records.habits.continued import CHANGEABLE, FLAG
from memfit.records.request import (
    LoraRequest,
    OptimizerRequest,
    RecomputeBlocks,
    Request,
)
from memfit.records.results import Plan

# beside `parallel`, what may change when a run goes on on other ranks
LAYOUT = ("hardware.count", "hardware.nodes", "hardware.network", "micro_batch")


def read_plan(path: Path) -> Plan:
    """Read plan.json; the digest it carries must be its recipe's."""
    found = read_json(path, Plan)
    if found.recipe_digest != found.recipe.digest:
        raise InvalidRequest(
            f"`{path}` carries digest {found.recipe_digest}, its recipe has {found.recipe.digest}",
            hint="the file was edited or is of another memfit version; run `memfit plan` again",
        )
    return found


def find_plan(path: Path) -> Path | None:
    """The plan.json that a path names: itself, or that of a run folder; None of anything else."""
    if is_folder(path):
        path = path if (path / "config.json").exists() else path / "plan.json"
    named = path.suffix == ".json" and path.name != "config.json"
    return path if named and is_plan(path) else None


def is_plan(path: Path) -> bool:
    """Whether a JSON file is a plan rather than a request."""
    try:
        data = read_json_file(path)
    except InvalidRequest:
        return False
    return isinstance(data, dict) and "recipe_digest" in data and "considered" in data


def state(plan: Plan) -> Request:
    """The plan's request with every knob as the plan decided it: planning it gives that recipe."""
    request, made = plan.request, plan.recipe
    if not made.is_own:
        return restate(plan)
    decided: dict[str, Any] = {}
    if made.adapted:
        decided["lora"] = from_data(to_data(made.lora), LoraRequest, source="plan.json")
    if made.parallel.world > 1:
        decided["parallel"] = made.parallel
    names = OptimizerRequest.__struct_fields__
    chosen = {name: getattr(made.optimizer, name) for name in names}
    for name in ("power", "decay_ratio"):
        if not chosen[name]:  # of another schedule: a request has its default there
            del chosen[name]
    return msgspec.structs.replace(
        request,
        weights=made.weights,
        task=msgspec.structs.replace(request.task, sequence_length=made.sequence_length),
        method=made.method,
        base_format=made.base_format,
        precision=made.precision,
        optimizer=OptimizerRequest(**chosen),
        recompute=RecomputeBlocks(blocks=made.recompute_blocks, selective=made.selective_blocks),
        attention=made.attention,
        loss=made.loss,
        loss_chunk=made.loss_chunk,
        micro_batch=made.micro_batch,
        compile=made.compile,
        offload=made.offload,
        **decided,
    )


def check_folder(folder: Path, requests: Sequence[Request], *, continues: bool = False) -> None:
    """Raise InvalidRequest where the folder belongs to another request.

    requests: the request as it was written, and with its length counted. A folder that holds a plan
    accepts the request that it was made of, or the plan itself as a request. A run may continue on
    other ranks: the keys that state the ranks and how each cuts its share may differ together.
    continues: beyond its end, with other steps or another schedule.
    """
    requests = [request.planned for request in requests]
    held: list[Request] = []
    if (folder / "request.json").exists():
        held = [read_json(folder / "request.json", Request).planned]
    if (folder / "plan.json").exists():
        made = read_plan(folder / "plan.json")
        of_plan = [made.request.planned, state(made).planned]
        if not held or any(request in held for request in of_plan):
            held += of_plan
    if not held:
        if continues:
            raise InvalidRequest(
                f"`{folder}` holds no run that could go on",
                hint=f"name the run's folder with `--folder`, or leave `{FLAG}` out",
            )
        return
    if not any(request == old or _moved(old, request) for request in requests for old in held):
        changed = _differences(to_data(held[0]), to_data(requests[-1]))
        goes_on = changed.keys() <= CHANGEABLE
        if goes_on and continues:
            return
        hint = "choose another folder with `--folder`, or remove this one"
        if goes_on:
            hint = f"`{FLAG}` goes on with the run's weights and states; or {hint}"
        raise InvalidRequest(
            f"`{folder}` holds a run of another request: {', '.join(changed.values())} differ",
            hint=hint,
        )


def _moved(old: Request, new: Request) -> bool:
    """Whether a request is another one's on another number of ranks, with the same batch."""
    changed = _differences(to_data(old), to_data(new))
    layout = {key for key in changed if key.partition(".")[0] == "parallel" or key in LAYOUT}
    return old.ranks != new.ranks and layout == set(changed)


def _differences(old: Any, new: Any, path: str = "") -> dict[str, str]:
    """Keys that differ, each with both values in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, str] = {}
        for key in sorted(old.keys() | new.keys()):
            found |= _differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        return found
    return {} if old == new else {path: f"`{path}` ({old} there, {new} here)"}
