"""Predicted weak and strong scaling of three models from 8 to about 100,000 GPUs; what binds it.

    python bench/scaling.py        writes bench/results/scaling.json and prints a table

Each point is the plan that memfit's search makes for that many H100s in nodes of 8 over the network
that is usual for them: the fastest mesh, micro-batch, recomputing and kernel of Megatron-LM's step
that fits (`framework: megatron`; the search of memfit's own step tries no stages). Under
weak scaling a GPU's share of the global batch is the same everywhere, under strong scaling the
global batch is. A search may leave devices idle where all of them take longer: `used` says so.

`binding` is what would raise the tokens a second the most if there were twice as much of it: every
resource is doubled in turn. Speeds (products, memory's bandwidth, links inside a machine, network
between machines) are doubled under the chosen configuration; `bubble` is a pipeline without its
wait; memory and batch size are searched anew, because more of them allows other configurations.
These are predictions of a model of time whose median error on published runs is in
docs/accuracy_time.md; nothing here was measured, and no published run has this many GPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from msgspec import structs

from memfit import __version__, api
from memfit.core.errors import Error
from memfit.core.units import GIB
from memfit.families import read_model
from memfit.plan.step_time.arrays import change
from memfit.plan.step_time.rates import Setting
from memfit.plan.step_time.read import read_setting
from memfit.plan.step_time.step import predict_step
from memfit.records import from_data, write_atomically
from memfit.records.hardware import Device
from memfit.records.recipe import Recipe
from memfit.records.request import Request
from memfit.records.results import Plan

RESULTS = Path(__file__).resolve().parent / "results" / "scaling.json"
DEVICE, NODE, FRAMEWORK = "h100-sxm", 8, "megatron"
SIZES = (8, 64, 512, 4096, 16384, 98304)  # the last: 12,288 machines, which meshes divide
SEQUENCE = 8192
MODELS = {  # sequences a GPU under weak scaling; of the whole step under strong scaling
    "llama-3.1-8b": (2, 1024),
    "llama-3.1-70b": (1, 2048),
    "llama-3.1-405b": (1, 4096),
}
SPEEDS = ("compute", "memory bandwidth", "intra-node link", "network", "bubble")


def ask(model: str, gpus: int, batch: int, memory: int | None = None) -> Request:
    """The request of one point; memory: bytes of a GPU that may be used, where not its own."""
    stated: dict[str, Any] = {
        "model": model,
        "framework": FRAMEWORK,
        "hardware": {"device": DEVICE, "count": NODE, "nodes": gpus // NODE},
        "task": {"sequence_length": SEQUENCE, "global_batch": batch},
    }
    if memory is not None:
        stated["limits"] = {"memory": f"{memory} B"}
    return from_data(stated, Request, source="bench/scaling.py")


def plan(request: Request, device: Device | None = None) -> Plan | None:
    """The plan; None where no configuration is left. device: in place of the request's own."""
    try:
        found = api.plan(request, device=device, levers=False)
    except Error:
        return None
    return found if found.memory.verdict != "does_not_fit" else None


def faster(setting: Setting, what: str) -> float:
    """Seconds of the same step with twice of a speed, or without the pipeline's wait."""
    machine, layout = setting.machine, setting.layout
    links = machine.links
    if what == "compute":
        machine = machine._replace(
            products=2 * machine.products, wide_products=2 * machine.wide_products,
            wide_peak=2 * machine.wide_peak, eight=2 * machine.eight,
        )  # fmt: skip
    elif what == "memory bandwidth":
        machine = machine._replace(memory=2 * machine.memory)
    elif what == "intra-node link":
        machine = machine._replace(links=links._replace(inside=2 * links.inside))
    elif what == "network":
        double = {"outside", "gather_bus", "scatter_bus", "reduce_bus"}
        wider = {name: 2 * getattr(links, name) for name in double}
        machine = machine._replace(links=links._replace(**wider))
    elif what == "bubble":
        layout = change(layout, bubble=0.0)
    changed = setting._replace(machine=machine, layout=layout)
    return float(predict_step(changed).total)


def gains(made: Plan, model: str, gpus: int, batch: int, device: Device) -> dict[str, float]:
    """By what factor twice as much of each would raise the tokens a second."""
    recipe: Recipe = made.recipe
    setting = read_setting(recipe, read_model(recipe.model), device)
    now = float(predict_step(setting).total)
    found = {what: now / faster(setting, what) for what in SPEEDS}
    assert device.memory is not None
    for what, request, sequences in (
        ("memory", ask(model, gpus, batch, 2 * device.memory), batch),
        ("batch size", ask(model, gpus, 2 * batch), 2 * batch),
    ):
        other = plan_with(request, device)
        if other is not None:
            found[what] = sequences / batch * now / other
    return {what: round(gain, 4) for what, gain in found.items()}


def plan_with(request: Request, device: Device) -> float | None:
    """Seconds of a request's plan, on a device that has as much memory as the request may use."""
    limit = request.limits.memory_bytes
    if limit is None:
        other = plan(request)
        return None if other is None else other.time.step_seconds
    larger = structs.replace(device, memory=limit, memory_driver=limit)
    other = plan(request, larger)
    return None if other is None else other.time.step_seconds


def point(model: str, gpus: int, batch: int, device: Device) -> dict[str, Any]:
    """One row of the results."""
    row: dict[str, Any] = {"model": model, "gpus": gpus, "global_batch": batch}
    made = plan(ask(model, gpus, batch))
    if made is None:
        return row | {"fits": False, "binding": "memory"}
    recipe, parallel, time = made.recipe, made.recipe.parallel, made.time
    assert time.step_seconds is not None
    assert time.mfu is not None
    doubled = gains(made, model, gpus, batch, device)
    best = max(doubled, key=lambda what: doubled[what])
    mesh = {k: getattr(parallel, k) for k in ("tp", "cp", "pp", "virtual_pp", "dp_shard")}
    mesh["dp_shard"] = parallel.dp
    parts = {span.op: round(span.duration, 5) for span in made.timeline.spans}
    tokens = batch * SEQUENCE / time.step_seconds
    used = parallel.world
    return row | {
        "fits": True,
        "used": used,
        "mesh": mesh,
        "micro_batch": recipe.micro_batch,
        "recompute_blocks": recipe.recompute_blocks,
        "recompute": recipe.recompute,
        "peak_allocated_gib": round((made.memory.peak_allocated or 0) / GIB, 2),
        "step_seconds": round(time.step_seconds, 4),
        "tokens_per_second": round(tokens),
        "tokens_per_second_per_gpu": round(tokens / gpus, 1),
        "mfu": round(time.mfu * used / gpus, 4),  # of all GPUs, idle ones too
        "parts": parts,
        "doubled": doubled,
        "binding": best,
    }


def main() -> None:
    only = sys.argv[1:]
    device = api.find_device(DEVICE)
    rows = []
    for model, (each, whole) in MODELS.items():
        if only and model not in only:
            continue
        for scaling in ("weak", "strong"):
            for gpus in SIZES:
                batch = each * gpus if scaling == "weak" else whole
                row = {"scaling": scaling, **point(model, gpus, batch, device)}
                rows.append(row)
                said = f"{model:15} {scaling:6} {gpus:7} GPUs  batch {batch:7}"
                if row["fits"]:
                    said += f"  {row['step_seconds']:9.3f} s  MFU {row['mfu']:.3f}"
                print(f"{said}  {row['binding']}", flush=True)
    found = {
        "versions": {"memfit": __version__},
        "framework": FRAMEWORK, "device": DEVICE, "sequence_length": SEQUENCE, "rows": rows,
    }  # fmt: skip
    if not only:
        write_atomically(RESULTS, (json.dumps(found, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
