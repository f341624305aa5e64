"""The slices in the order of their value, and how a unit of one is measured."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from on_gpu.paths import lacking
from on_gpu.rows import Place, Row, Unit

MOST_MINUTES = 8.0  # of any slice in one run of the command


class Slice(NamedTuple):
    """A module of this package with `list_units(place)` and `measure(name, place)`."""

    name: str
    module: str
    title: str
    minutes: float  # its share, of all chosen slices'; what is left over goes to whoever needs more
    alone: bool  # each unit in a process of its own, as the allocator's counters are a process's
    lanes: int = 1  # units that run side by side: of slices that ask neither clock nor driver


SLICES = (
    Slice("recipes", "recipes", "recipes end to end, by phase and component", 5.0, True),
    Slice("rollouts", "rollouts", "iterations that sample: bytes and seconds by phase", 4.0, True),
    Slice("allocator", "recordings", "recordings of the caching allocator", 3.5, True, 4),
    Slice("rates", "rates", "products, attention, memory, copies, launches", 2.5, False),
    Slice("kernels", "kernels", "contexts, and memory inside kernels", 2.0, True),
    Slice("speed", "speed", "step times beside Hugging Face's Trainer", 5.0, True),
    Slice("trainers", "trainers", "peaks of Hugging Face's Trainer", 2.0, True),
    Slice("tests", "marked", "every test marked gpu", 2.0, False),
    Slice("cards", "cards", "cards of 24 and 16 GB, imitated", 3.0, True, 3),
    Slice("grid", "grid", "the rest of the grid", 0.0, False),
)
NAMES = tuple(one.name for one in SLICES)


def list_units(one: Slice, place: Place) -> list[Unit]:
    """What the slice measures on this device."""
    units: list[Unit] = importlib.import_module(f"on_gpu.{one.module}").list_units(place)
    return units


def missing(unit: Unit) -> str:
    """Why a unit cannot be measured here; "" where it can."""
    names = lacking(unit.needs)
    return f"not installed: {', '.join(names)}" if names else ""


def measure(name: str, unit: str, place: Place) -> Row:
    """The row of one unit, in this process; what it raises becomes a row whose reason it is."""
    one = next(one for one in SLICES if one.name == name)
    head: dict[str, Any] = {"slice": name, "name": unit, "device": place.row}
    from memfit.core.errors import InvalidRequest

    try:
        found: Row = importlib.import_module(f"on_gpu.{one.module}").measure(unit, place)
    except InvalidRequest as refusal:  # of what libraries of these versions cannot do
        return head | {"skipped": refusal.message}
    except Exception as error:  # of any kind: the row is the report
        message = (str(error).strip().splitlines() or [""])[0]
        return head | {"failed": f"{type(error).__name__}: {message}"[:400], "at": _where(error)}
    return head | found


def _where(error: BaseException) -> str:
    """The innermost lines of this project that an error came through, outermost first."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if any(part in path for part in ("/memfit/", "/on_gpu/", "/bench/")):
            lines.append(f"{'/'.join(path.split('/')[-2:])}:{trace.tb_lineno}")
        trace = trace.tb_next
    return " > ".join(lines[-3:])
