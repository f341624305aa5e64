"""Marks at the start of every function and branch of memfit, in a file that processes share.

MEMFIT_REACHED names where. Files and their lines stay as they are.
"""

from __future__ import annotations

import ast
import builtins
import marshal
import mmap
import os
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any
from zlib import crc32

ROOT = Path(__file__).resolve().parents[2]
SOURCE = str(ROOT / "src" / "memfit") + os.sep
WANTED = os.environ.get("MEMFIT_REACHED", "")
COUNT = 1 << 22  # so many that hardly two blocks share a mark
FROM_FILES = SourceFileLoader.get_code


def number(file: str, line: int) -> int:
    """Of a block's mark: the same in every process."""
    return crc32(f"{file}:{line}".encode()) % COUNT


class Marking(ast.NodeTransformer):
    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: list[int] = []

    def marked(self, body: list[ast.stmt], line: int) -> list[ast.stmt]:
        mark = ast.parse(f"__reached__[{number(self.file, line)}] = 1").body[0]
        for node in ast.walk(mark):
            ast.copy_location(node, body[0])
        self.lines.append(line)
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


def compile_marked(loader: SourceFileLoader, name: str) -> Any:
    path = loader.get_filename(name)
    if not path.startswith(SOURCE):
        return FROM_FILES(loader, name)
    file, content = path[len(str(ROOT)) + 1 :], loader.get_data(path)
    kept = Path(WANTED + ".compiled") / f"{crc32(file.encode())}-{crc32(content)}"
    with suppress(OSError, EOFError, ValueError):
        return marshal.loads(kept.read_bytes())
    tree = Marking(file).visit(ast.parse(content, path))
    code = compile(tree, path, "exec", dont_inherit=True)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(marshal.dumps(code))
    unfinished.replace(kept)
    return code


def find_places() -> dict[int, tuple[str, int]]:
    """Of each mark: its file, and the line of its block."""
    places = {}
    for path in sorted(Path(SOURCE).rglob("*.py")):
        marking = Marking(str(path.relative_to(ROOT)))
        marking.visit(ast.parse(path.read_bytes()))
        places |= {number(marking.file, line): (marking.file, line) for line in marking.lines}
    return places


def begin() -> None:
    """In this process, modules of memfit are marked from here on."""
    marks = Path(WANTED + ".marks")
    Path(WANTED + ".compiled").mkdir(parents=True, exist_ok=True)
    with marks.open("ab") as file:
        file.truncate(COUNT)
    with marks.open("r+b") as file:
        builtins.__reached__ = mmap.mmap(file.fileno(), COUNT)  # type: ignore[attr-defined]
    SourceFileLoader.get_code = compile_marked  # type: ignore[method-assign, assignment]


if WANTED and not hasattr(builtins, "__reached__"):
    begin()
