"""What joins devices and machines: the rows of `links.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from memfit.catalog.toml_rows import Rows
from memfit.core import units
from memfit.core.errors import InvalidRequest
from memfit.records import from_data
from memfit.records.hardware import Device, Fabric

_LINKS = Rows(Path(__file__).with_name("links.toml"), "network", ("name", "match"), "sources")


@cache
def fabrics() -> tuple[Fabric, ...]:
    """Every row, in the file's order."""
    return tuple(_fabric(key) for key in _LINKS.ids)


def find_link(device: Device) -> Fabric | None:
    """What joins this device to others of its machine; None where no row describes it."""
    name = device.link.name
    found = map(_fabric, _LINKS.mentioning(name))
    return next((f for f in found if f.joins == "devices" and name in (f.name, *f.match)), None)


@cache
def find_network(name: str) -> Fabric:
    """What joins machines, by id, name or alias (case does not matter).

    Raises UnknownName with the nearest names; InvalidRequest for what joins devices.
    """
    found = _fabric(_LINKS.find(name))
    if found.joins != "machines":
        known = ", ".join(f"`{f.id}`" for f in fabrics() if f.joins == "machines")
        raise InvalidRequest(
            f"`{name}` joins the devices of a machine, not machines", hint=f"known: {known}"
        )
    return found


@cache
def _fabric(key: str) -> Fabric:
    row, sources = dict(_LINKS.row(key)), _LINKS.shared()
    if "bandwidth" in row:
        row["bandwidth"] = units.parse_bandwidth(row["bandwidth"])
    row["measured"] = [_measured(found, sources) for found in row.get("measured", [])]
    row["sources"] = [sources[source] for source in row["sources"]]
    return from_data({"id": key, **row}, Fabric, source=f"[{key}] of links.toml")


def _measured(row: dict[str, Any], sources: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "size": units.parse_bytes(row["size"]),
        "bus": [units.parse_bandwidth(bus) for bus in row["bus"]],
        "source": sources[row["source"]],
    }
