"""Prices of a device-hour: the rows of `prices.toml` and the user's own, and which one is taken.

The rule: the request's price; else the median of the user's own rows; else the median of the
catalogue's. Prices of unlike kinds are never mixed: on demand goes before reserved, a capacity
block and spot, and a price that better sources contradict is taken only where it stands alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from memfit.catalog.own import own_file, read_own, wrong
from memfit.catalog.toml_rows import Rows
from memfit.core import units
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.records import Record, from_data
from memfit.records.hardware import Device, Price, PriceKind

_PRICES = Rows(Path(__file__).with_name("prices.toml"), "device", (), shared="sources")
KINDS: tuple[PriceKind, ...] = ("on-demand", "reserved", "capacity block", "spot")  # as preferred
assert set(KINDS) == set(get_args(PriceKind))


class Chosen(Record, frozen=True, kw_only=True):
    """One price of a device-hour, and why it is that one; None is unknown."""

    usd_per_hour: float | None
    because: str


def find_prices(key: str) -> tuple[Price, ...]:
    """Every price of a device by its id: the user's own first."""
    listed = _PRICES.row(key)["prices"] if key in _PRICES.ids else []
    place = f"[{key}] of prices.toml"
    known = _PRICES.shared() if listed else {}
    rows = [{**row, "source": known[row["source"]]} for row in listed]
    return (*_own_prices(key), *(_price(row, place) for row in rows))


def check_own_prices(devices: Sequence[str]) -> None:
    """Raise InvalidRequest for a row of the user's file that cannot be read, or names no device."""
    for key in read_own("prices.toml"):
        if key not in devices:
            path = own_file("prices.toml")
            error = UnknownName("device", key, devices, see="`memfit devices` lists them")
            raise InvalidRequest(f"[{key}] in `{path}`: {error.message}", hint=error.hint)
        _own_prices(key)


def _own_prices(key: str) -> tuple[Price, ...]:
    path = own_file("prices.toml")
    table = read_own("prices.toml").get(key, {})
    rows = table.get("prices", [])
    if set(table) - {"prices"} or not isinstance(rows, list):
        raise InvalidRequest(
            f"[{key}] in `{path}` does not hold a list of prices",
            hint='write `prices = [{ usd_per_hour = "2.10 USD", seller = "us" }]`',
        )
    found = []
    for row in rows:
        try:
            found.append(_price({**row, "own": True}, f"[{key}] of {path}"))
        except InvalidRequest as error:
            raise wrong(path, key, "prices", error) from None
    return tuple(found)


def _price(row: dict[str, Any], place: str) -> Price:
    if "usd_per_hour" not in row:
        raise InvalidRequest("a price has no `usd_per_hour`", hint='for example "2.10 USD"')
    row = {**row, "usd_per_hour": units.parse_usd(row["usd_per_hour"])}
    if not row["usd_per_hour"] > 0:
        raise InvalidRequest("`usd_per_hour` is not above 0", hint='for example "2.10 USD"')
    return from_data(row, Price, source=place)


def check_price(price: str) -> None:
    """Raise InvalidRequest for a `hardware.price` that is neither an amount nor a kind."""
    if price and price not in KINDS:
        try:
            units.parse_usd(price)
        except InvalidRequest as error:
            raise InvalidRequest(
                f"`hardware.price`: {error.message}",
                hint=f"write an amount such as `2.50 USD`, or one of: {', '.join(KINDS)}",
            ) from None


def choose_price(device: Device, price: str = "") -> Chosen:
    """Return US dollars per device-hour by the rule above; price: an amount, or a kind of price.

    Raises InvalidRequest where `price` is neither.
    """
    check_price(price)
    if price and price not in KINDS:
        usd = units.parse_usd(price)
        return Chosen(usd_per_hour=usd, because=f"{usd:.4g} USD an hour, as asked")
    kinds = [kind for kind in KINDS if price in ("", kind)]
    own = [p for p in device.prices if p.own]
    for rows, whose in ((own, "your own"), (device.prices, "the catalogue's")):
        for weak in (False, True):
            for kind in kinds:
                found = [p for p in rows if p.kind == kind and p.weak == weak]
                if found:
                    return _median(found, whose)
    missing = f"no {price} price" if price else "no price"
    return Chosen(usd_per_hour=None, because=f"{missing} of `{device.id}` is known")


def _median(rows: Sequence[Price], whose: str) -> Chosen:
    """Return the median price."""
    rows = sorted(rows, key=lambda p: p.usd_per_hour)
    half = len(rows) // 2
    low, high = rows[0], rows[-1]
    usd = (rows[half].usd_per_hour + rows[-half - 1].usd_per_hour) / 2
    what = f"{usd:.4g} USD an hour, {whose} {low.kind} price"
    if len(rows) == 1:
        return Chosen(usd_per_hour=usd, because=f"{what} ({_origin(low)})")
    spread = f"{low.usd_per_hour:.4g} ({_origin(low)}) to {high.usd_per_hour:.4g} ({_origin(high)})"
    return Chosen(usd_per_hour=usd, because=f"{what}: the median of {len(rows)} from {spread}")


def _origin(price: Price) -> str:
    """Return who sells at this price, and when: `Lambda, 2026-11-20, weak source`."""
    parts = [price.seller or price.source or "seller unsaid", price.date]
    return ", ".join([p for p in parts if p] + (["weak source"] if price.weak else []))
