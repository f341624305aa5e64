"""How many files the calls of `memfit plan` enter, read off the source, and how many climb back."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from test_layers import LAYERS
from test_tree import MODULES

MOST_FILES = 40  # outside of the layer that every module may use
MOST_CLIMBS = 8
CLASS = "class C:\n  def g(): ..."

Place = tuple[str, str]  # module, function


class File(NamedTuple):
    """What a module's names stand for: others' functions and modules, and functions of its own."""

    imports: dict[str, Place]
    functions: dict[str, ast.AST]


class Calls:
    """The calls that follow from one function: of functions, and of classes' own by name.

    Imports are followed wherever they stand. What an object's method does is not: which object it
    is shows at run time alone. A function that is passed on counts where it is called by name.

    modules: name -> file.
    """

    def __init__(self, modules: Mapping[str, Path], start: Place) -> None:
        self.modules = modules
        self.files: dict[str, File] = {}
        self.made: list[tuple[str, str]] = []  # from file, to file
        seen, left = {start}, [start]
        while left:
            at = left.pop()
            for other in self._called(at):
                self.made.append((at[0], other[0]))
                if other not in seen:
                    seen.add(other)
                    left.append(other)
        self.distance = find_distances(start[0], self.made)

    @property
    def climbs(self) -> list[tuple[str, str]]:
        """Calls into a file that is nearer to the start than the one that calls."""
        return [(a, b) for a, b in self.made if self.distance[b] < self.distance[a]]

    def _called(self, at: Place) -> Iterator[Place]:
        for node in ast.walk(self._file(at[0]).functions[at[1]]):
            if isinstance(node, ast.Call) and (found := self._find(at[0], node.func)):
                yield found

    def _find(self, module: str, called: ast.expr) -> Place | None:
        if isinstance(called, ast.Name):
            return self._resolve(module, called.id)
        if not (isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name)):
            return None
        return self._resolve(module, f"{called.value.id}.{called.attr}")

    def _resolve(self, module: str, name: str) -> Place | None:
        """Where the name's function is defined; None of what is no function of the package."""
        while module in self.modules and name not in self._file(module).functions:
            first, _, rest = name.partition(".")
            if first not in self._file(module).imports:
                return None
            module, inner = self._file(module).imports[first]
            name = ".".join(filter(None, (inner, rest)))
        return (module, name) if module in self.modules else None

    def _file(self, module: str) -> File:
        if module not in self.files:
            tree = ast.parse(self.modules[module].read_text())
            imports = dict(find_imports(tree, self.modules))
            self.files[module] = File(imports, dict(find_functions(tree)))
        return self.files[module]


def find_functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from (
                (f"{node.name}.{inner.name}", inner)
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            )


def find_imports(tree: ast.Module, modules: Container[str]) -> Iterator[tuple[str, Place]]:
    """Names that stand for a module ("" as the name within it) or for something of one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner, known = f"{node.module}.{alias.name}", alias.asname or alias.name
                yield known, (inner, "") if inner in modules else (node.module, alias.name)


def find_distances(start: str, made: list[tuple[str, str]]) -> dict[str, int]:
    distance, left = {start: 0}, deque([start])
    while left:
        at = left.popleft()
        for a, b in made:
            if a == at and b not in distance:
                distance[b] = distance[at] + 1
                left.append(b)
    return distance


def test_a_plan_enters_few_files_and_seldom_climbs_back():
    calls = Calls(MODULES, ("memfit.api", "plan"))
    entered = {name for name in calls.distance if name.split(".")[1] not in LAYERS[0]}
    assert {"memfit.plan.search.search", "memfit.plan.request.problem"} <= entered
    assert len(entered) <= MOST_FILES, sorted(entered)
    assert len(calls.climbs) <= MOST_CLIMBS, calls.climbs


@pytest.mark.parametrize(
    ("sources", "entered", "climbs"),
    [
        ({"a": "def f(): g()\ndef g(): ..."}, 1, []),
        ({"a": "from p.b import g\ndef f(): g()", "b": "def g(): ..."}, 2, []),
        ({"a": "from p import b\ndef f(): b.g()", "b": "def g(): ..."}, 2, []),
        ({"a": "def f():\n  from p.b import C as D\n  D.g()", "b": f"{CLASS}"}, 2, []),
        ({"a": "from p.b import C\ndef f(x: C): x.g()", "b": f"{CLASS}"}, 1, []),
        ({"a": "from p.b import g\ndef f(): g()", "b": "from p.c import g",
          "c": "def g(): ..."}, 2, []),
        (
            {  # b and c lie one call from the start, d two, and d calls c
                "a": "from p import b, c\ndef f(): b.g(); c.h()",
                "b": "from p.d import i\ndef g(): i()",
                "c": "def h(): ...",
                "d": "from p.c import h\ndef i(): h()",
            },
            4,
            [("p.d", "p.c")],
        ),
    ],
)  # fmt: skip
def test_calls_are_followed(tmp_path, sources, entered, climbs):
    modules = {f"p.{name}": tmp_path / f"{name}.py" for name in sources}
    for name, text in sources.items():
        modules[f"p.{name}"].write_text(text)
    calls = Calls(modules, ("p.a", "f"))
    assert (len(calls.distance), calls.climbs) == (entered, climbs)
