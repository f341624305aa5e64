"""Rows of a record as a pandas DataFrame, for those who have pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memfit.core.errors import InvalidRequest, UnknownName
from memfit.records import Record, to_data

Rows = Sequence[Record | Mapping[str, Any]]


class Tabled(Record, frozen=True, kw_only=True):
    """A record that holds tables; pandas is imported when one is first read."""

    def tables(self) -> Mapping[str, Rows]:
        """Each table's name and its rows; the first is the one that is meant without a name."""
        raise NotImplementedError

    def to_pandas(self, table: str = "") -> Any:
        """One of its tables as a DataFrame; bytes and seconds are numbers.

        Raises InvalidRequest where pandas is missing, and UnknownName for a table it has not.
        """
        tables = self.tables()
        name = table or next(iter(tables))
        if name not in tables:
            raise UnknownName("table", name, list(tables), see="docs/api.md lists them")
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise InvalidRequest(
                "`.to_pandas()` needs `pandas`, which is not installed",
                hint="pip install pandas; without it `.to_dict()` holds the same rows",
            ) from None
        return pandas.DataFrame([to_data(row) for row in tables[name]])
