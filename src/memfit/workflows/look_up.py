"""Searching the catalogues: every word must occur, bounds narrow, no hit is explained."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain

from memfit import catalog
from memfit.catalog import CatalogModel, links
from memfit.catalog.machines import find_machine
from memfit.core import units
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.plan.step_time.communication.collectives import Collective, Group, collective_seconds
from memfit.plan.step_time.communication.network import lay_out
from memfit.records import Record
from memfit.records.hardware import Device, Fabric

GB = 10**9
_SIZES = re.compile(r"\b(\d+) ?(?:gib|gb|g)\b", re.IGNORECASE)
TIMED: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def find_models(search: str = "", *, family: str = "", up_to: str = "") -> tuple[CatalogModel, ...]:
    """Catalogue rows in which every word of `search` occurs; UnknownName when there is none."""
    most = units.parse_count(up_to) if up_to else None
    rows = [
        row
        for row in catalog.models()
        if _holds(search, row.id, row.name, row.hub, row.label, row.model_type, *row.aliases)
        and (not family or row.model_type == family)
        and (most is None or row.parameters <= most)
    ]
    if not rows:
        known = {row.model_type for row in catalog.models()} if family else ()
        _nothing("model", search, (row.id for row in catalog.models()), family, known)
    return tuple(rows)


def find_devices(search: str = "", *, vendor: str = "", at_least: str = "") -> tuple[Device, ...]:
    """Catalogue rows in which every word of `search` occurs; UnknownName when there is none.

    Of a seller's machine, such as `p4d.24xlarge`, the row of its devices.
    """
    least = units.parse_bytes(at_least) if at_least else 0
    if machine := find_machine(search):
        search = machine.device
    rows = [
        row
        for row in catalog.devices()
        if _holds_device(search, row)
        and (not vendor or row.vendor.lower() == vendor.lower())
        and (row.memory or 0) >= least
    ]
    if not rows:
        known = {row.vendor for row in catalog.devices()} if vendor else ()
        _nothing("device", search, (row.id for row in catalog.devices()), vendor, known)
    return tuple(rows)


def find_networks(search: str = "") -> tuple[Fabric, ...]:
    """What joins machines, where every word of `search` occurs; UnknownName when there is none."""
    every = [row for row in links.fabrics() if row.joins == "machines"]
    rows = [row for row in every if _holds(search, row.id, row.name, *row.match)]
    if not rows:
        _nothing("network", search, (row.id for row in every), "", ())
    return tuple(rows)


class Exchange(Record, frozen=True, kw_only=True):
    """How long the devices of several machines take to send each other one message."""

    device: str
    machines: int
    nbytes: int
    seconds: dict[str, float]  # by collective; a step's are these, longer by what computing takes


def time_exchanges(network: Fabric) -> tuple[Exchange, ...]:
    """1 GB over the devices of 2, 8 and 64 machines, of the first device that usually has it.

    `plan/step_time/communication/collectives.py` says how long, as for a step. None where a
    device's links, or the network's bandwidth, are unknown.
    """
    usual = (d for d in catalog.devices() if d.network == network.id)
    measured = (catalog.find_device(m.device) for m in network.measured)
    device = next(chain(measured, usual), None) or catalog.find_device("h100-sxm")
    found = []
    each = max(map(int, re.findall(r"\d+", device.devices_per_node)))
    for machines in (2, 8, 64):
        cluster = lay_out(device, each, machines, network.id)
        group = Group(cluster.per_machine * cluster.machines, cluster.per_machine)
        try:
            reached = cluster.links
        except InvalidRequest:
            return ()
        seconds: dict[str, float] = {}
        for kind in TIMED:
            seconds[kind] = float(collective_seconds(kind, GB, group, reached))
        found.append(
            Exchange(device=device.id, machines=cluster.machines, nbytes=GB, seconds=seconds)
        )
    return tuple(found)


def _holds_device(search: str, row: Device) -> bool:
    """Whether every word stands in the row; `24 GB` is the memory of its data sheet."""
    sizes = _SIZES.findall(search)
    sheet = re.findall(r"\d+", row.memory_datasheet)
    return all(size in sheet for size in sizes) and _holds(
        _SIZES.sub(" ", search), row.id, row.name, row.vendor, row.architecture, *row.match
    )


def _holds(search: str, *texts: str) -> bool:
    joined = " ".join(texts).lower()
    return all(word in joined for word in search.lower().split())


def _nothing(what: str, search: str, ids: Iterable[str], group: str, known: Iterable[str]) -> None:
    """Say which of the words is unknown, or that each is known and no row has all of them."""
    ids, known = list(ids), list(known)
    if group and group.lower() not in {k.lower() for k in known}:
        word = "family" if what == "model" else "vendor"
        raise UnknownName(word, group, known, see=f"known: {', '.join(sorted(known))}")
    if search:
        raise UnknownName(what, search, ids, see=f"`memfit {what}s` lists them all")
    raise InvalidRequest(f"no {what} is within these bounds", hint=f"`memfit {what}s` lists all")
