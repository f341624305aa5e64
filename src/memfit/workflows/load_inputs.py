"""What a user names, read: a request with its options, a certificate; and what a file holds."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from memfit.catalog.machines import find_machine
from memfit.core.devices_as_written import read_devices
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import is_file, read_json_file
from memfit.records import from_data
from memfit.records.recipe import OWN_STEP
from memfit.records.request import Request, read_yaml
from memfit.records.request import change as change
from memfit.records.request import put as put
from memfit.records.results import Certificate

OPTIONS = "the options"
OWN = ("auto", OWN_STEP)  # of `framework`
PROGRAMS = (".py", ".ipynb", ".sh", ".bash")  # which `memfit check` reads
# keys of other trainers' files that no request has
TRAINERS = frozenset(("model_name_or_path", "base_model", "per_device_train_batch_size"))
SCHEMA = 1  # of certificates that this memfit reads
# a key that only this file of a run folder has, the most telling first
TELLING = {
    "comparisons": "a report", "at_peak": "a certificate", "considered": "a plan",
    "measurements": "a run", "hardware": "a request", "model": "a request",
}  # fmt: skip


def read(target: str | Path, *, changes: Mapping[str, Any] | None = None, **keys: Any) -> Request:
    """A request from request.yaml, or from a model's name; `changes` are dotted keys that override.

    Raises InvalidRequest or UnknownName, each with a hint.
    """
    if not str(target).strip():
        raise InvalidRequest(
            "the model's name is empty", hint="`memfit models` lists names: `llama-3.1-8b`"
        )
    path = Path(target)
    written = path.suffix in (".yaml", ".yml", ".json") and path.name != "config.json"
    data = read_yaml(path) if written else {"model": str(target)}
    if (path.suffix in PROGRAMS and is_file(path)) or TRAINERS & data.keys():
        raise InvalidRequest(
            f"`{target}` is another trainer's {'file' if written else 'program'}, not a request",
            hint=f"`memfit check {shlex.quote(str(target))}` answers for it, with `--device NAME`",
        )
    if "model_type" in data:  # a model's config.json, under another name
        data = {"model": {"name": path.stem, **data}}
    put_all(data, {**(changes or {}), **_dotted(keys)})
    return read_data(data, source=str(target) if written else OPTIONS)


def put_all(data: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Set dotted keys in a request's data; `8xH100` takes the place of a count that is there."""
    device = changes.get("hardware.device")
    if isinstance(device, str) and (read_devices(device).number or find_machine(device)):
        hardware = data.get("hardware")
        if isinstance(hardware, dict):
            data["hardware"] = {k: v for k, v in hardware.items() if k not in ("count", "nodes")}
    for key, value in changes.items():
        put(data, key, value)


def read_data(data: Mapping[str, Any], *, source: str = "") -> Request:
    """Return the request of a request.yaml's content; source: its name in errors."""
    return from_data(fill_mesh(place_devices(data)), Request, source=source or OPTIONS)


def place_devices(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data with `8xH100` as a device and a count, in machines as large as the catalogue's.

    Raises InvalidRequest where the text and `hardware.count` or `hardware.nodes` disagree, or the
    devices make no whole number of machines.
    """
    hardware = data.get("hardware")
    device = hardware.get("device") if isinstance(hardware, Mapping) else None
    if not isinstance(hardware, Mapping) or not isinstance(device, str):
        return data
    written = read_devices(device)
    machine = find_machine(written.name)
    if machine:
        placed = {"count": machine.devices, "nodes": written.number or hardware.get("nodes", 1)}
    elif not written.number:
        return data
    elif written.nodes or "nodes" in hardware:
        placed = {"count": written.number, "nodes": written.nodes or hardware["nodes"]}
    else:
        from memfit.plan.questions.compare import place  # its search imports numpy
        from memfit.plan.request.problem import find_device

        found = place(find_device(written.name), written.number, 0)
        placed = {"count": found.count, "nodes": found.nodes}
    for key, value in placed.items():
        if str(hardware.get(key, value)) not in (str(value), str(written.number)):
            raise InvalidRequest(
                f"`hardware.device: {device}` and `hardware.{key}: {hardware[key]}` disagree",
                hint=f"write `{machine.device if machine else written.name}` and keep"
                f" `hardware.{key}`, or leave that key out",
            )
    return {**data, "hardware": {**hardware, "device": written.name, **placed}}


def fill_mesh(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data with `parallel.dp_shard` of all devices that other axes leave, where neither it nor
    `dp_replicate` is named: `parallel.tp: 2` on 8 devices are 4 shards. Of memfit's own step."""
    mesh, hardware = data.get("parallel"), data.get("hardware")
    if not isinstance(mesh, Mapping) or not isinstance(hardware, Mapping):
        return data
    if "dp_shard" in mesh or "dp_replicate" in mesh or data.get("framework", "auto") not in OWN:
        return data
    ranks = [mesh.get(axis, 1) for axis in ("tp", "cp", "pp")]
    devices = [hardware.get(key, 1) for key in ("count", "nodes")]
    if not all(type(n) is int and n > 0 for n in (*ranks, *devices)):
        return data  # which the request's reader refuses
    left, rest = divmod(math.prod(devices), math.prod(ranks))
    return data if rest or left < 2 else {**data, "parallel": {**mesh, "dp_shard": left}}


def _dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Short names of the few options that have one."""
    short = {"device": "hardware.device", "memory": "limits.memory"}
    return {short.get(k, k): v for k, v in keys.items() if v is not None}


def what_is(path: Path) -> str:
    """What a JSON file of memfit's holds: "a certificate", "a plan", …; "" for anything else."""
    try:
        data = read_json_file(path)
    except InvalidRequest:
        return ""
    keys: Iterable[str] = data if isinstance(data, dict) else ()
    return next((word for key, word in TELLING.items() if key in keys), "")


def read_certificate(path: Path) -> Certificate:
    """Read certificate.json; raises InvalidRequest for anything else, or another schema."""
    data = read_json_file(path)
    hint = "`memfit certify` writes certificate.json beside plan.json"
    if (kind := what_is(path)) != "a certificate":
        held = f"; it holds {kind}" if kind else ""
        raise InvalidRequest(f"`{path}` is not a certificate{held}", hint=hint)
    if data.get("schema") != SCHEMA:
        raise InvalidRequest(
            f"`{path}` is a certificate of schema {data.get('schema')}, and this memfit reads "
            f"schema {SCHEMA}",
            hint=f"certify again: {hint}",
        )
    return from_data(data, Certificate, source=str(path))
