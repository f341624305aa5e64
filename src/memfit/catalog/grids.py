"""Carbon of electricity: the rows of `grids.toml`, or a figure of one's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from memfit.catalog.toml_rows import Rows
from memfit.core import units
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.records import Record

_GRIDS = Rows(Path(__file__).with_name("grids.toml"), "grid", ("name", "code"), shared="sources")


class Grid(Record, frozen=True, kw_only=True):
    """Where electricity comes from."""

    kg_per_kwh: float  # of CO2 equivalents
    because: str


@cache
def find_grid(text: str) -> Grid:
    """A grid by a country's name or ISO 3166 code of three letters, or by `0.4 kg/kWh`.

    Raises InvalidRequest: neither, with the nearest names.
    """
    if text[:1].isdigit():
        try:
            kg = units.parse_carbon(text)
        except InvalidRequest as error:
            raise InvalidRequest(f"`hardware.grid`: {error.message}", hint=error.hint) from None
        return Grid(kg_per_kwh=kg, because=f"{kg:.3g} kg/kWh, as asked")
    try:
        row = _GRIDS.row(_GRIDS.find(text))
    except UnknownName as error:
        known = ", ".join(_GRIDS.ids)
        hint = f"a grid, or a figure such as `0.4 kg/kWh`; known: {known}"
        raise InvalidRequest(f"`hardware.grid`: {error.message}", hint=hint) from None
    source = _GRIDS.shared()[row["source"]]
    because = f"{row['kg_per_kwh']:g} kg/kWh in {row['name']}, mean of {row['year']} ({source})"
    return Grid(kg_per_kwh=row["kg_per_kwh"], because=because)
