"""The corpus of measured runs: one JSON line a row, under measurements/.

A row is a recipe, what was measured, where it comes from and in which environment. Rows of other
people's runs carry their source; memfit's own come from `memfit measure`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from memfit.accuracy.plausible import check_run
from memfit.base_formats import list_base_formats
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import read_json_file, read_text
from memfit.records import Record, from_data, to_data, write_atomically
from memfit.records.recipe import Recipe
from memfit.records.results import Measurement, Plan, Run

OWN = "memfit measure"  # the source of rows that memfit measured itself
# What a memory figure counted; `unspecified` where its source does not say.
MEMORY_KINDS = ("peak_allocated", "peak_active", "peak_reserved", "device_total", "unspecified")
Split = Literal["fit", "test"]


class Source(Record, frozen=True, kw_only=True):
    """Where a row comes from, and how far it is to be trusted."""

    name: str  # `memfit measure`, or the repository and page
    url: str = ""
    year: int = 0
    confidence: Literal["high", "medium", "low"] = "high"
    group: str = ""  # rows of one group share a measurement or a configuration
    notes: str = ""  # what was inferred, and from what


class Row(Record, frozen=True, kw_only=True):
    """One measured run."""

    schema: int = 1
    id: str
    source: Source
    recipe_digest: str
    recipe: Recipe
    measurements: dict[str, Measurement]  # `memory.KIND` in B, `time.…`; {} where it only ran out
    out_of_memory: bool = False
    split: Split = "test"  # a constant may be fitted on `fit` rows alone
    phases: dict[str, int] = {}  # noqa: RUF012 (msgspec gives each its own)  measured peaks, B
    predicted_phases: dict[str, int] = {}  # noqa: RUF012  as predicted when it was measured
    environment: dict[str, str] = {}  # noqa: RUF012

    @property
    def memory(self) -> dict[str, Measurement]:
        """The memory figures, by kind."""
        found = {kind: self.measurements.get(f"memory.{kind}") for kind in MEMORY_KINDS}
        return {kind: figure for kind, figure in found.items() if figure is not None}


def split_of(name: str) -> Split:
    """Half of all names may be fitted on, whichever they are: by the first bit of SHA-256."""
    return "fit" if hashlib.sha256(name.encode()).digest()[0] < 128 else "test"


def own_row(plan: Plan, run: Run) -> Row:
    """The row of a run that memfit measured; raises InvalidRequest for an impossible time."""
    check_run(plan, run)
    content = json.dumps([to_data(run.measurements), run.environment], sort_keys=True)
    return Row(
        id=f"memfit-{run.recipe_digest}-{hashlib.sha256(content.encode()).hexdigest()[:8]}",
        source=Source(name=OWN),
        recipe_digest=run.recipe_digest,
        recipe=run.recipe,
        measurements=run.measurements,
        phases=run.phases,
        predicted_phases={str(p): plan.ledger.total(p) for p in plan.ledger.phases},
        environment=run.environment,
        split=split_of(run.recipe_digest),
    )


def append_row(path: Path, plan: Plan, run: Run) -> None:
    """Add a measured run: recipe, counters, what was predicted, environment. Atomic."""
    old = path.read_bytes() if path.exists() else b""
    write_atomically(path, old + line(own_row(plan, run)).encode())


def submit_row(folder: Path, plan: Plan, run: Run) -> Path:
    """Write a measured run as a file of one row, ready for a pull request; its path.

    What names the user's own files is left out: a model from a folder keeps its sizes alone.
    """
    row = own_row(plan, run)
    model = row.recipe.model
    if Path(model.source).is_absolute():
        model = replace(model, source="", name=Path(model.name).name)
        recipe = replace(row.recipe, model=model)
        row = replace(row, recipe=recipe, recipe_digest=recipe.digest)
    path = folder / f"{row.id}.jsonl"
    write_atomically(path, line(row).encode())
    return path


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write a file of the corpus; atomic."""
    write_atomically(path, "".join(map(line, rows)).encode())


def line(row: Row) -> str:
    """A row as the corpus stores it: what equals its default is left out."""
    read = msgspec.convert(_lean(row), Row)  # so that a whole number of bytes is a float already
    return json.dumps(_lean(read), sort_keys=True, ensure_ascii=False) + "\n"


def _lean(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {"schema": 1} if isinstance(record, Row) else {}
    for field in msgspec.structs.fields(type(record)):
        value = getattr(record, field.name)
        made = field.default_factory is not msgspec.NODEFAULT
        default = field.default_factory() if made else field.default
        if value == default and default is not msgspec.NODEFAULT:
            continue
        if isinstance(value, Record):
            found[field.name] = _lean(value)
        elif isinstance(value, dict):
            found[field.name] = {
                k: _lean(v) if isinstance(v, Record) else to_data(v) for k, v in value.items()
            }
        else:
            found[field.name] = to_data(value)
    return found


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of one file; raises InvalidRequest naming the file, the line and the key."""
    text = read_text(path)
    for number, content in enumerate(text.splitlines(), 1):
        if not content.strip():
            continue
        place = f"{path}, line {number}"
        try:
            data = msgspec.json.decode(content)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{place} is not JSON: {error}") from None
        yield from_data(data, Row, source=place)


def read_corpus(paths: Iterable[Path] = ()) -> tuple[Row, ...]:
    """All rows of these files and folders; without any, of the corpus that memfit comes with.

    Raises InvalidRequest: a row that does not read, or an id that stands there twice.
    """
    files: list[Path] = []
    for path in paths or (home(),):
        files += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise InvalidRequest(f"no rows: `{home()}` holds no .jsonl files")
    rows = tuple(row for file in files for row in read_rows(file))
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise InvalidRequest(f"two rows of the corpus have the id `{row.id}`")
        seen.add(row.id)
    return rows


class Refused(Record, frozen=True, kw_only=True):
    """Rows of a source that no recipe describes, and why."""

    reason: str
    source: str
    rows: int
    use: Literal["memory", "time"] = "memory"  # what the rows would have judged


def read_refused(paths: Iterable[Path] = ()) -> tuple[Refused, ...]:
    """What the imports beside these files could not express; see `scripts/import_published.py`."""
    files: list[Path] = []
    for path in paths or (home(),):
        beside = path.with_suffix(".refused.json")
        files += sorted(path.glob("*.refused.json")) if path.is_dir() else [beside]
    found: list[Refused] = []
    for file in files:
        if file.exists():
            data = read_json_file(file)
            found += [from_data(one, Refused, source=str(file)) for one in data]
    return tuple(found)


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of one row."""
    (root,), components = msgspec.json.schema_components([Row], ref_template="#/$defs/{name}")
    described = components.pop(root["$ref"].rsplit("/", 1)[-1])
    names = [declared.name for declared in list_base_formats()]
    components["Recipe"]["properties"]["base_format"]["enum"] = names
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **described,
        "title": "memfit corpus row",
        "$defs": components,
    }


def home() -> Path:
    """measurements/ of an installed memfit, or of the checkout it runs from."""
    installed = Path(__file__).parents[1] / "measurements"
    return installed if installed.is_dir() else Path(__file__).parents[3] / "measurements"
