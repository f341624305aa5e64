"""The table of layers in docs/ARCHITECTURE.md, from the test that enforces it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "memfit"
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
BEGIN, END = "<!-- layers: generated from tests/test_layers.py -->", "<!-- end of layers -->"
# whether a package's modules import torch
TORCH = {"plan": "never", "train": "yes", "certify": "yes"}
LAZY = "only inside functions"


def write_page() -> str:
    """docs/ARCHITECTURE.md with its table made anew."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    """A row for each package and module of the root, by layer."""
    sys.path.insert(0, str(ROOT / "tests"))
    from test_layers import LAYERS

    lines = ["| layer | package | what it is for | imports torch |", "|--:|---|---|---|"]
    for level, names in enumerate(LAYERS):
        for name in sorted(names):
            torch = TORCH.get(name, LAZY)
            lines.append(f"| {level} | `{name}` | {describe(name)} | {torch} |")
    return "\n".join(lines)


def describe(name: str) -> str:
    """The first sentence of a package's docstring."""
    package = SOURCE / name / "__init__.py"
    path = package if package.exists() else SOURCE / f"{name}.py"
    found = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(found.split("\n\n")[0].split())
