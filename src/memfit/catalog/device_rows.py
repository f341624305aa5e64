"""Devices: the rows of `devices.toml` with their prices, and the user's own over them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from memfit.catalog import device_names
from memfit.catalog.machines import find_machine
from memfit.catalog.own import own_file, read_own, stamp, wrong
from memfit.catalog.prices import check_own_prices, find_prices
from memfit.catalog.toml_rows import Rows, slug
from memfit.core import units
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.records import from_data
from memfit.records.hardware import Device

_DEVICES = Rows(Path(__file__).with_name("devices.toml"), "device", ("name", "match"), "sources")
OWN, OWN_PRICES = "devices.toml", "prices.toml"
Stamp = tuple[tuple[str, int, int], ...]


def find(name: str) -> Device:
    """A device by id, driver name or alias; see `memfit.catalog.find_device`."""
    now = _now()
    return _device(_find_id(name, now), now)


@lru_cache(maxsize=512)
def _find_id(name: str, now: Stamp) -> str:
    del now  # what the user's own names were read from
    if machine := find_machine(name):
        return machine.device
    try:
        return _DEVICES.find(name, also=_own_names())
    except InvalidRequest:
        if found := device_names.choose(_alike(name)):
            return found
        if instead := device_names.say_instead(name):
            raise UnknownName("device", name, (), see=instead) from None
        raise


def describe(name: str) -> str:
    """Which row is taken for a name that several have, in words; "" for a name of one row."""
    if machine := find_machine(name):
        return f"`{name}` of {machine.seller} has {machine.devices} x `{machine.device}`"
    now = _now()
    try:
        _DEVICES.find(name, also=_own_names())
    except InvalidRequest:
        found = _find_id(name, now)
    else:
        return ""
    others = [f"`{key}`" for key in _alike(name) if key != found]
    if not others:
        return ""
    return f"device `{name}` is taken as `{found}`; it may also be {', '.join(others)}"


def _alike(name: str) -> tuple[str, ...]:
    rows = {}
    for key, row in _named_rows().items():
        sheet = row.get("memory_datasheet", "")  # `36/48/64 GB` is of several devices: none's name
        rows[key] = (row["name"], *row["match"], *([] if "/" in sheet else [sheet]))
    return device_names.find_alike(name, rows)


@cache
def _named_rows() -> dict[str, dict[str, Any]]:
    return {key: _DEVICES.row(key) for key in _DEVICES.ids}


def every() -> tuple[Device, ...]:
    """Every device of the catalogue, then the user's own."""
    return _every(_now())


@lru_cache(maxsize=2)
def _every(now: Stamp) -> tuple[Device, ...]:
    return tuple(_device(key, now) for key in (*_DEVICES.ids, *_own_ids()))


def _own_ids() -> list[str]:
    """Ids of the user's devices that the catalogue does not have."""
    return [key for key in read_own(OWN) if key not in _DEVICES.ids]


def _own_names() -> dict[str, str]:
    """Names of those devices, as the driver says them too -> their ids."""
    found: dict[str, str] = {}
    for key in _own_ids():
        row = read_own(OWN)[key]
        for word in (key, row.get("name", key), *row.get("match", ())):
            found.setdefault(slug(str(word)), key)
    return found


def _now() -> Stamp:
    """What the user's files hold now; each is checked whole, once after a change."""
    now = stamp(OWN), stamp(OWN_PRICES)
    _check_own(now)
    return now


@lru_cache(maxsize=4)
def _check_own(now: Stamp) -> None:
    for key in read_own(OWN):
        _device(key, now)
    check_own_prices((*_DEVICES.ids, *_own_ids()))


@cache
def _sources() -> dict[str, str]:
    return {str(key): str(source) for key, source in _DEVICES.shared().items()}


@lru_cache(maxsize=512)
def _device(key: str, now: Stamp) -> Device:
    """One row; `now` is what it was read from."""
    own = read_own(OWN).get(key)
    listed = _DEVICES.row(key) if key in _DEVICES.ids else None
    place = f"[{key}] of devices.toml"
    if own is not None:
        place = f"[{key}] of {own_file(OWN)}"
        listed = _over(key, listed, own)
    row = {"id": key, **_read(listed or {}, key, None if own is None else own_file(OWN))}
    row["prices"] = find_prices(key)
    return from_data(row, Device, source=place)


def _over(key: str, listed: dict[str, Any] | None, own: dict[str, Any]) -> dict[str, Any]:
    """The user's row over the catalogue's: the same device's, or the one that it is `like`."""
    path = own_file(OWN)
    own = dict(own)
    if (like := own.pop("like", None)) is not None:
        try:
            base = _DEVICES.row(_DEVICES.find(str(like)))
        except (UnknownName, InvalidRequest) as error:
            raise wrong(path, key, "like", error) from None
        listed = {**base, "match": [], "name": key}  # the catalogue's names mean the catalogue's
    if listed is None:
        listed = {"match": [], "sources": [], "unverified": [], "name": key, "checked": ""}
    known = [field for field in listed.get("unverified", []) if field.split(".")[0] not in own]
    rates = {
        field: {**listed.get(field, {}), **own[field]}
        for field in ("flops", "flops_measured")
        if isinstance(own.get(field), dict)
    }
    return {**listed, "unverified": known, **own, **rates, "own": str(path)}


def _read(listed: dict[str, Any], key: str, path: Path | None) -> dict[str, Any]:
    """The row with its quantities in base units and its sources spelled out."""
    row, field = dict(listed), ""
    try:
        for field, parse in _QUANTITIES.items():
            row[field] = parse(row[field]) if field in row else None
        for field in ("flops", "flops_measured"):
            row[field] = _rates(row.get(field, {}))
        field, link = "link", row.get("link", {"name": ""})
        speed = link.get("unidirectional")
        row["link"] = {**link, "unidirectional": speed and units.parse_bandwidth(speed)}
        if "calibration" in row:
            field = "calibration"
            row[field] = _calibration(row[field])
    except (InvalidRequest, AttributeError, TypeError) as error:
        if path is None:
            raise
        if not isinstance(error, InvalidRequest):
            error = InvalidRequest(f"`{listed[field]}` is not a table")
        raise wrong(path, key, field, error) from None
    row["watts"] = row.pop("power")
    row["compute_capability"] = row.get("compute_capability")
    row["notes"] = row.get("notes", "")
    row["sources"] = [_sources().get(source, source) for source in row["sources"]]
    return row


_QUANTITIES: dict[str, Callable[[object], float]] = {
    "memory": units.parse_bytes,
    "memory_driver": units.parse_bytes,
    "bandwidth": units.parse_bandwidth,
    "power": units.parse_watts,
}


def _rates(row: dict[str, Any]) -> dict[str, float]:
    return {dtype: units.parse_flops(rate) for dtype, rate in row.items()}


def _calibration(row: dict[str, Any]) -> dict[str, Any]:
    """`launch` and `context` are text with a unit, as all quantities of these files."""
    made = {key: value for key, value in row.items() if key not in ("launch", "context")}
    if "launch" in row:
        made["launch_seconds"] = units.parse_seconds(row["launch"])
    if "context" in row:
        made["context"] = units.parse_bytes(row["context"])
    return made
