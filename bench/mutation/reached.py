"""Which blocks of code each test reaches: `pytest -p reached`, with the file that it writes in
MEMFIT_REACHED.

Modules of memfit are compiled with one mark at the start of every function and of every branch;
files and their lines stay as they are. What processes of their own reach is not seen, and what a
cache answers is counted for the test that filled it.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = str(ROOT / "src" / "memfit") + os.sep
MARKS = bytearray(200_000)
PLACES: list[tuple[str, int]] = []  # of each mark: its file, and the line of its block


class Marking(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self.file = file

    def marked(self, body: list[ast.stmt], line: int) -> list[ast.stmt]:
        mark = ast.parse(f"__reached__[{len(PLACES)}] = 1").body[0]
        for node in ast.walk(mark):
            ast.copy_location(node, body[0])
        PLACES.append((self.file, line))
        first = body[0]
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        return [*body[:is_text], mark, *body[is_text:]]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = self.marked(node.body, node.lineno)
        elif isinstance(node, ast.If | ast.For | ast.While | ast.ExceptHandler):
            node.body = self.marked(node.body, node.body[0].lineno)
            if getattr(node, "orelse", None):
                node.orelse = self.marked(node.orelse, node.orelse[0].lineno)
        return node


def compile_marked(loader: SourceFileLoader, name: str):
    path = loader.get_filename(name)
    if not path.startswith(SOURCE):
        return FROM_FILES(loader, name)
    tree = ast.parse(loader.get_data(path), path)
    return compile(Marking(path[len(str(ROOT)) + 1 :]).visit(tree), path, "exec", dont_inherit=True)


FROM_FILES = SourceFileLoader.get_code
WANTED = os.environ.get("MEMFIT_REACHED", "")
if WANTED:
    builtins.__reached__ = MARKS  # type: ignore[attr-defined]
    SourceFileLoader.get_code = compile_marked  # type: ignore[method-assign, assignment]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    MARKS[:] = bytes(len(MARKS))
    try:
        return (yield)
    finally:
        if WANTED:
            reached: dict[str, list[int]] = {}
            at = MARKS.find(1)
            while at >= 0:
                file, line = PLACES[at]
                reached.setdefault(file, []).append(line)
                at = MARKS.find(1, at + 1)
            with Path(WANTED).open("a", encoding="utf-8") as kept:
                kept.write(json.dumps({"test": item.nodeid, "reached": reached}) + "\n")
