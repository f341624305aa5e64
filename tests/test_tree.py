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


def is_data(decorator: ast.expr) -> bool:
    """Whether it makes a frozen dataclass that is compared by its values."""
    call = decorator if isinstance(decorator, ast.Call) else None
    if ast.unparse(call.func if call else decorator).rpartition(".")[2] != "dataclass":
        return False
    said = {k.arg: ast.unparse(k.value) for k in call.keywords} if call else {}
    return said.get("frozen") == "True" and said.get("eq") != "False"


def find_frozen(source: str) -> list[str]:
    """Classes of a source that are data, but no records."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and any(map(is_data, node.decorator_list))
    ]


def test_data_is_a_record_where_it_holds_no_tensors():
    """The rule of docs/ARCHITECTURE.md, `Records`."""
    live = {"train", "certify"}
    apart = [p for p in MODULES.values() if p.relative_to(SOURCE).parts[0] not in live]
    found = {path.name: find_frozen(path.read_text()) for path in apart}
    assert {name: classes for name, classes in found.items() if classes} == {}
    assert find_frozen("@dataclass(frozen=True)\nclass A: ...\n@dataclass\nclass B: ...") == ["A"]


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


def test_no_two_files_of_tests_have_one_name():
    """pytest would collect the first one alone, and every run of the whole suite ends with an
    error."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, n in names.items() if n > 1] == []
