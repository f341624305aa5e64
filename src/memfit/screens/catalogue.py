"""Tables of models and devices; weak figures carry `?`, and what nobody states is `-`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.catalog import CatalogModel
from memfit.catalog.prices import choose_price
from memfit.core import units
from memfit.records import to_data
from memfit.records.hardware import Device, Fabric
from memfit.screens.widgets.layout import WIDE, heading, make_table, next_commands, plain, say, show
from memfit.screens.widgets.terminal import Console
from memfit.workflows.look_up import Exchange

LEGEND = "`?` weak source, to be checked; `-` stated by nobody; `memfit {verb} NAME` shows a row"


def _marked(row: CatalogModel | Device | Fabric, field: str, text: str) -> str:
    weak = () if isinstance(row, Fabric) else row.unverified
    return text + (" ?" if field in weak else "")


def show_models(console: Console, rows: Sequence[CatalogModel], supported: Sequence[str]) -> None:
    """One model a line; those of a family that memfit cannot plan yet are set in brackets."""
    numbers = ("parameters", "layers", "hidden", "sequence")
    table = make_table("model", "family", *numbers, numbers=numbers)
    for m in rows:
        family = m.model_type if m.model_type in supported else f"({m.model_type})"
        parameters = units.show_count(m.parameters)
        if m.active_parameters:
            parameters = f"{units.show_count(m.active_parameters)} of {parameters}"
        table.add_row(
            m.id,
            family,
            _marked(m, "parameters", parameters),
            _marked(m, "layers", str(m.layers)),
            _marked(m, "hidden", str(m.hidden)),
            _marked(m, "max_sequence", f"{m.max_sequence:,}"),
        )
    show(console, table)
    _legend(console, "models", len(rows))
    if any(m.model_type not in supported for m in rows):
        say(console, "(family) has no planner yet; parameters are exact all the same", style="dim")
    if len(rows) == 1:
        _card(console, rows[0])
        if rows[0].model_type in supported:
            next_commands(console, [f"memfit plan {rows[0].id} --device h100-sxm"])


def show_devices(console: Console, rows: Sequence[Device]) -> None:
    """One accelerator a line: what torch can use, what is on the box, speeds, the price."""
    wide = console.width >= WIDE
    numbers = ("memory", "on the box", "bandwidth", "bf16", "fp32", "USD/h")
    shown = numbers if wide else tuple(n for n in numbers if n not in ("on the box", "fp32"))
    table = make_table("device", *shown, numbers=shown)
    for d in rows:
        price = choose_price(d).usd_per_hour
        cells = {
            "memory": _figure(d, "memory", d.memory and units.show_gib(d.memory, digits=1)),
            "on the box": d.memory_datasheet or "-",
            "bandwidth": _figure(d, "bandwidth", d.bandwidth and units.show_bandwidth(d.bandwidth)),
            "bf16": _rate(d, "bf16"),
            "fp32": _rate(d, "fp32"),
            "USD/h": "-" if price is None else f"{price:.2f}",
        }
        table.add_row(d.id, *(cells[n] for n in shown))
    show(console, table)
    _legend(console, "devices", len(rows))
    if len(rows) == 1:
        _card(console, rows[0])
        next_commands(console, [f"memfit plan llama-3.1-8b --device {rows[0].id}"])


def show_networks(
    console: Console, rows: Sequence[Fabric], exchanges: Sequence[Exchange] = ()
) -> None:
    """What joins machines, one a line: adapters, their rate, the share that messages reach."""
    numbers = ("adapters", "of each", "of a machine", "reached")
    table = make_table("network", *numbers, "measured", numbers=numbers)
    for row in rows:
        each = row.bandwidth or 0.0
        measured = {m.machines[-1] for m in row.measured}
        table.add_row(
            row.id, str(row.adapters), units.show_bandwidth(each),
            units.show_bandwidth(each * row.adapters),
            "-" if row.efficiency is None else f"{row.efficiency:.0%}",
            f"up to {max(measured)} machines" if measured else "-",
        )  # fmt: skip
    show(console, table)
    console.write()
    say(console, f"{len(rows)} network{'s' if len(rows) != 1 else ''}", style="dim")
    say(console, "`-` stated by nobody; `hardware.network` of a request names one", style="dim")
    if len(rows) == 1:
        _card(console, rows[0])
    if exchanges:
        _show_exchanges(console, exchanges)


def _show_exchanges(console: Console, exchanges: Sequence[Exchange]) -> None:
    """Milliseconds of one message, a line each number of machines."""
    names = tuple(exchanges[0].seconds)
    table = make_table("machines", *names, numbers=("machines", *names))
    for one in exchanges:
        table.add_row(str(one.machines), *(f"{s * 1e3:.3g} ms" for s in one.seconds.values()))
    size = units.show_gb(exchanges[0].nbytes)
    heading(console, f"{size} among all {exchanges[0].device} of so many machines")
    show(console, table)
    note = "the time of a step rests on the same; beside computing, links reach less of it"
    say(console, note, style="dim")


def _figure(device: Device, field: str, text: str | int | float | None) -> str:
    return _marked(device, field, str(text)) if text else "-"


def _rate(device: Device, dtype: str) -> str:
    rate = device.flops.get(dtype)
    if not rate:
        return "-"
    weak = {"flops", f"flops.{dtype}", dtype} & set(device.unverified)
    return units.show_flops(rate).replace("FLOP/s", "").replace(" ", " ") + (" ?" if weak else "")


def _legend(console: Console, verb: str, count: int) -> None:
    console.write()
    say(console, f"{count} {verb if count != 1 else verb[:-1]}", style="dim")
    say(console, LEGEND.format(verb=verb), style="dim")


def _card(console: Console, row: CatalogModel | Device | Fabric) -> None:
    """Every field of one row as its record holds it."""
    heading(console, row.name)
    table = make_table("", "")
    table.show_header = False
    for field, value in to_data(row).items():
        text = _text(field, value)
        if text:
            table.add_row(field, plain(console, _marked(row, field, text)))
    show(console, table)


def _price(price: dict[str, Any]) -> str:
    """`2.95 USD/h on-demand, Nebius, eu-north1, 2026-11-20 (source)`; weak ones are marked."""
    parts = [f"{price['usd_per_hour']:g} USD/h {price['kind']}" + (" ?" if price["weak"] else "")]
    parts += [price[k] for k in ("seller", "region", "date", "note") if price[k]]
    source = "your own" if price["own"] else price["source"]
    return ", ".join(parts) + (f" ({source})" if source else "")


def _curve(curve: dict[str, Any]) -> str:
    """`matmul bf16: 9 sizes, up to 703 TFLOP/s`."""
    name = " ".join(curve[k] for k in ("work", "kernel", "dtype") if curve[k])
    counted = curve["work"] in ("matmul", "attention")
    best = max(rate for _, rate in curve["points"])
    shown = units.show_flops(best) if counted else units.show_bandwidth(best)
    return f"{name}: {len(curve['points'])} sizes, up to {shown}"


def _bus(found: dict[str, Any]) -> str:
    """`all_gather of 256 MB over h100-sxm: 250 GB/s on 1 machine, 185 GB/s on 2, …`."""
    pairs = zip(found["machines"], found["bus"], strict=True)
    rates = [f"{units.show_bandwidth(bus)} on {machines}" for machines, bus in pairs]
    size = units.show_gb(found["size"])
    return f"{found['collective']} of {size} over {found['device']}: {', '.join(rates)} machines"


LISTS = {"prices": _price, "curves": _curve, "measured": _bus}
NOT_MISSED = {"calibration", "in_switch", "reach", "machine"}  # nothing to say where they are None


def _text(field: str, value: object) -> str:
    """A field in words; empty when it says nothing."""
    if value is None:
        return "" if field in NOT_MISSED else "unknown"
    if field in ("memory", "memory_driver") and isinstance(value, int):
        return f"{units.show_gib(value)} ({value:,} B)"
    if field == "bandwidth" and isinstance(value, float | int):
        return units.show_bandwidth(value)
    if field in ("flops", "flops_measured") and isinstance(value, dict):
        return ", ".join(f"{k} {units.show_flops(v)}" for k, v in value.items())
    if field == "link" and isinstance(value, dict):
        speed = value["unidirectional"]
        speed_text = "speed unknown" if speed is None else f"{units.show_bandwidth(speed)} one way"
        return f"{value['name']}, {speed_text}"
    if field == "watts" and isinstance(value, float | int):
        return f"{value:g} W"
    if field in LISTS and isinstance(value, list | tuple):
        return "; ".join(map(LISTS[field], value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
