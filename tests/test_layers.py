"""The import contract of docs/ARCHITECTURE.md, read off the source."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "memfit"
LAYERS = [
    {"core", "records", "base_formats", "objectives"},
    {
        "allocator",
        "meta",
        "catalog",
        "families",
        "optimizers",
        "adapters",
        "parallelism",
    },
    {"plan", "train"},
    {"certify"},
    {"accuracy", "check", "export", "files", "report", "workflows", "api"},
    {"cli", "screens", "ui"},
]
SIBLINGS = {"plan", "train"}  # may not import each other
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
HEAVY = {
    "torch",
    "transformers",
    "peft",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "bitsandbytes",
}
FILES = sorted(SOURCE.rglob("*.py"))


def part(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Every absolute import and whether it runs when the module is imported."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(n)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
        for n in ast.walk(test)
    }
    lazy = {
        id(n)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for n in ast.walk(function)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
        else:
            continue
        found += [(name, id(node) not in lazy | typing_only) for name in names]
    return found


def test_every_module_has_a_layer():
    assert {part(f) for f in FILES} - {"__init__", "__main__"} <= set(LEVEL)


def is_allowed(own: str, name: str) -> bool:
    pieces = name.split(".")
    if pieces[0] != "memfit" or len(pieces) < 2 or pieces[1] not in LEVEL:
        return True
    other = pieces[1]
    return LEVEL[other] <= LEVEL[own] and {own, other} != SIBLINGS


def test_imports_point_up_the_table():
    against = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in FILES
        if part(path) not in {"__init__", "__main__"}
        for name, _ in imports(path)
        if not is_allowed(part(path), name)
    ]
    assert len(FILES) > 300
    assert not against


def test_torch_is_imported_only_where_it_belongs():
    heavy = [
        f"{path.relative_to(SOURCE)} imports {name}"
        for path in FILES
        if part(path) not in {"train", "certify"}
        for name, at_import in imports(path)
        if at_import and name.split(".")[0] in HEAVY
    ]
    assert not heavy


def test_planning_imports_no_torch():
    code = (
        "import sys, memfit.api; "
        "memfit.api.plan(memfit.api.read('llama-3.1-8b', device='h100-sxm')); "
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
