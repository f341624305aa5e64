"""`memfit calibrate`: what was measured of this machine becomes a row that the user owns."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memfit import catalog
from memfit.catalog.own import put_row, read_own
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.records import to_data
from memfit.records.hardware import Calibration, Curve, Device

if TYPE_CHECKING:
    import torch

FILE, CPU = "devices.toml", "cpu-x86"


def calibrate(
    name: str = "auto", *, row: str = "", quick: bool = False, say: Callable[[str], None]
) -> Device:
    """Measure a device of this machine, write its row and return it as the catalogue now has it.

    name: auto, cpu, cuda or cuda:1. row: an id; by default the catalogue's own row of this device
    is overridden, or one of its own made where the catalogue has none.
    Raises InvalidRequest: no such device here, or a file of the user's that cannot be read.
    """
    from memfit.train.measure import calibrate as measuring

    device = measuring.find_torch_device(name)
    key, base = _base(device, row)
    read_own(FILE)  # a file that cannot be read is told of before two minutes, not after
    measured = measuring.measure(device, quick=quick, say=say)
    sheet = device.type == "cuda" and (not base or "like" in base)
    put_row(FILE, key, {**base, **_figures(measured.curves, measured.calibration, sheet=sheet)})
    return catalog.find_device(key)


def _base(device: torch.device, row: str) -> tuple[str, dict[str, Any]]:
    """The id of the row, and what it starts with besides measured figures."""
    if row and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", row):
        raise InvalidRequest(
            f"`{row}` cannot be a device's id", hint="small letters, digits and -: `my-box`"
        )
    if row and "." in row:
        raise InvalidRequest(f"`{row}` cannot be a device's id", hint="without dots")
    listed = CPU if device.type == "cpu" else _listed(device)
    if listed and row in ("", listed):
        return listed, {}
    if listed:
        return row, {"like": listed}
    return row or _slug(_cuda_name(device)), _describe(device)


def _listed(device: torch.device) -> str:
    """The id of the catalogue's row of this GPU; "" where it has none."""
    try:
        return catalog.find_device(_cuda_name(device)).id
    except UnknownName:
        return ""


def _cuda_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device)


def _slug(name: str) -> str:
    return "my-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _describe(device: torch.device) -> dict[str, Any]:
    """A row of a GPU that the catalogue does not know: what its driver says of it."""
    import torch

    known = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    version = f"{known.major}.{known.minor}"
    return {
        "name": known.name,
        "vendor": "AMD" if hip else "NVIDIA",
        "architecture": getattr(known, "gcnArchName", "") if hip else f"CUDA {version}",
        "compute_capability": version,
        "match": [known.name],
        "memory": f"{known.total_memory} B",
        "memory_datasheet": "unknown",
        "flops": {},
        "link": {"name": "unknown"},
        "devices_per_node": str(torch.cuda.device_count()),
        "multiprocessors": known.multi_processor_count,
        "sources": ["the driver"],
    }  # fmt: skip


def _figures(curves: tuple[Curve, ...], made: Calibration, *, sheet: bool) -> dict[str, Any]:
    """The measured fields of the row. A GPU keeps its data sheet's peaks beside what it was seen
    to reach; of a processor, and of a GPU without a sheet here, what was measured is the peak."""
    best = {c.dtype: f"{c.best:.6g} FLOP/s" for c in curves if c.work == "matmul"}
    memory = [c.best for c in curves if c.work == "memory"]
    versions = {k: v for k, v in made.versions.items() if v}
    calibration = {"date": made.date, "devices": made.devices, "versions": versions}
    if made.launch_seconds is not None:
        calibration["launch"] = f"{made.launch_seconds * 1e6:.6g} us"
    if made.context is not None:
        calibration["context"] = f"{made.context} B"
    rows = [
        {**to_data(c), "points": [[float(f"{x:.6g}"), float(f"{y:.6g}")] for x, y in c.points]}
        for c in curves
    ]
    figures: dict[str, Any] = {
        "checked": made.date,
        "flops_measured": best,
        "calibration": calibration,
        "curves": [{k: v for k, v in row.items() if v != ""} for row in rows],
    }
    if not sheet:
        beyond = [c.points[-1][1] for c in curves if c.work == "memory"]  # beyond any cache
        figures |= {"flops": best, "bandwidth": f"{min(memory + beyond):.6g} B/s"}
        figures["notes"] = "peaks and bandwidth are what was measured, not a data sheet's"
    return figures
