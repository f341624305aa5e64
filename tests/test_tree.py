"""The package's tree: few modules in a folder, and no imports that go in circles."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "memfit"
AT_ROOT = {"__init__", "__main__", "api"}
MOST = 13  # modules of a folder, its __init__ included
# folders with one file an entry: a family, an optimizer, a tool, a verb's screen
ENTRIES = {"families", "plan/frameworks", "export/targets", "screens"}
# the tensors without data and their derivatives are one idea in several files
TENSOR_CORE = "memfit.meta"


def name_of(path: Path) -> str:
    parts = ("memfit", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in SOURCE.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """The package's own modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(MODULES)


def find_circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules of which each reaches each other (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(set(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_the_root_holds_the_interface_alone():
    assert {path.stem for path in SOURCE.glob("*.py")} == AT_ROOT


def test_no_folder_holds_more_modules_than_one_can_look_over():
    counts = Counter(str(path.parent.relative_to(SOURCE)) for path in MODULES.values())
    assert {at: n for at, n in counts.items() if n > MOST and at not in ENTRIES} == {}


def test_imports_do_not_go_in_circles():
    circles = find_circles({name: imported(path) for name, path in MODULES.items()})
    assert [c for c in circles if not all(n.startswith(TENSOR_CORE) for n in c)] == []


@pytest.mark.parametrize(
    ("graph", "circles"),
    [
        ({"a": {"b"}, "b": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [{"a", "b", "c"}]),
    ],
)
def test_circles_are_found(graph, circles):
    assert find_circles(graph) == circles
