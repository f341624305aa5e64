"""What `memfit calibrate` measured, beside what the vendor's sheet says."""

from __future__ import annotations

from memfit.core import units
from memfit.records.hardware import Curve, Device
from memfit.screens.widgets.layout import heading, make_table, next_commands, plain, say, show
from memfit.screens.widgets.terminal import Console

SPREAD = 0.1  # of a point's repeats: above it the device was busy, or slowed itself down


def show_calibration(console: Console, device: Device) -> None:
    """One line a curve: its smallest and largest size, its best rate, the spread."""
    heading(console, f"{device.name} ({device.id})")
    names = ("smallest", "largest", "best", "sheet", "spread")
    table = make_table("", *names, numbers=names)
    for curve in device.curves:
        shown = units.show_flops if _counts_flop(curve) else units.show_bandwidth
        sheet = _sheet(device, curve)
        table.add_row(
            plain(console, " ".join(n for n in (curve.work, curve.kernel, curve.dtype) if n)),
            shown(curve.points[0][1]),
            shown(curve.points[-1][1]),
            shown(curve.best),
            "-" if sheet is None else shown(sheet),
            f"{curve.spread:.0%}",
        )
    show(console, table)
    made = device.calibration
    if made is not None and made.launch_seconds is not None:
        say(console, f"one launch after another: {units.show_seconds(made.launch_seconds)}")
    if made is not None and made.context is not None:
        say(console, f"outside the caching allocator: {units.show_bytes(made.context)}")
    if any(curve.spread > SPREAD for curve in device.curves):
        note = "repeats differ by more than a tenth: was the device doing something else?"
        say(console, note, style="dim")
    next_commands(console, [f"memfit plan llama-3.2-1b --device {device.id}"])


def _counts_flop(curve: Curve) -> bool:
    return curve.work in ("matmul", "attention")


def _sheet(device: Device, curve: Curve) -> float | None:
    """The vendor's peak of the same thing; a processor's row has none but the measured one."""
    if device.is_cpu:
        return None
    if _counts_flop(curve):
        return device.flops.get(curve.dtype)
    return device.bandwidth if curve.work == "memory" else None
