"""Records: how many fields one may have, and which kind stands where (docs/ARCHITECTURE.md)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src" / "memfit"
MOST = 16  # fields of a record
# records with more: what a file spells key by key, or the parts of one running thing
LARGER = {
    "records/recipe.py Recipe",  # recipe.yaml, key by key
    "records/request.py Request",  # request.yaml
    "records/recipe.py Optimizer",  # its key `optimizer`
    "records/request.py OptimizerRequest",
    "records/results.py Run",  # run.json
    "records/results.py Certificate",  # certificate.json
    "records/hardware.py Device",  # a row of devices.toml
    "catalog/__init__.py CatalogModel",  # a row of models.toml
    "records/model.py Architecture",  # config.json, in one family's words for all
    "plan/step_time/work.py Shape",  # the same in numbers, of which a search makes columns
    "families/shared/forward.py Forward",  # what every operation of a simulated forward reads
    "train/generation/settings.py Settings",  # what `memfit generate` and rollouts take, one by one
    "train/run/session.py Session",  # the parts of a running process
}
STRUCTS = {"records", "families", "plan", "ui"}  # where `msgspec.Struct` itself is used
LIVE = {"train", "certify"}  # where a dataclass holds tensors, modules, files and callables


class Found(NamedTuple):
    """A class that declares fields."""

    package: str
    name: str  # its file and its own
    bases: tuple[str, ...]
    decorators: tuple[str, ...]
    fields: int


@cache
def find_classes(source: Path = SOURCE) -> list[Found]:
    """All classes below a folder that declare fields; class variables are none."""
    found = []
    for path in sorted(source.rglob("*.py")):
        relative = path.relative_to(source)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            fields = [
                one
                for one in node.body
                if isinstance(one, ast.AnnAssign) and "ClassVar" not in ast.unparse(one.annotation)
            ]
            if fields:
                found.append(
                    Found(
                        package=relative.parts[0],
                        name=f"{relative.as_posix()} {node.name}",
                        bases=tuple(map(ast.unparse, node.bases)),
                        decorators=tuple(map(ast.unparse, node.decorator_list)),
                        fields=len(fields),
                    )
                )
    return found


def dataclass_of(found: Found) -> str:
    """The decorator that makes it a dataclass; "" for none."""
    return next((one for one in found.decorators if "dataclass" in one), "")


def test_a_record_has_no_more_fields_than_the_exceptions_say():
    larger = {one.name for one in find_classes() if one.fields > MOST}
    assert larger == LARGER, "several records by meaning, or a named exception"


def test_a_dataclass_holds_live_objects_or_changes_or_equals_nothing_else():
    elsewhere = [one for one in find_classes() if dataclass_of(one) and one.package not in LIVE]
    values = [one.name for one in elsewhere if "frozen=True" in dataclass_of(one)]
    equal = [one.name for one in elsewhere if "eq=False" not in dataclass_of(one)]
    assert set(values) & set(equal) == set(), "a `Record` or a `NamedTuple` holds values"


def test_a_struct_that_is_no_record_stands_where_no_verb_hands_it_on():
    structs = [one for one in find_classes() if "msgspec.Struct" in one.bases]
    assert [one.name for one in structs if one.package not in STRUCTS] == []


def test_no_record_is_a_pydantic_model():
    imported = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
    assert "msgspec" in imported
    assert "pydantic" not in imported
