"""Mutants: one small fault each, put into the source of memfit as somebody could have typed it.

What only speaks is left as it is: messages of errors, texts, annotations, decorators, `__repr__`.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# plan, certify and train, and where the closed forms and the replay of theirs live
CLOSED_FORMS = ("meta", "allocator", "parallelism", "objectives", "optimizers", "adapters")
GROUPS = {"plan": ("plan",), "certify": ("certify",), "train": ("train",), "forms": CLOSED_FORMS}
COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
}  # fmt: skip
COUNTED = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"), ast.Mod: ("%", "//"),
}  # fmt: skip
SPEAKING = ("print", "warn", "echo", "say", "quote", "debug", "info", "cast", "TypeVar")


class Mutant(NamedTuple):
    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int  # bytes of the file
    end: int
    block: int  # the line with which the innermost function or branch begins
    function: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.start} {self.kind} {self.before} -> {self.after}"

    def put(self, content: bytes) -> bytes:
        return content[: self.start] + self.after.encode() + content[self.end :]


class Sites(ast.NodeVisitor):
    """Every place of a file where a mutant can be put."""

    def __init__(self, file: str, content: bytes) -> None:
        self.file, self.content = file, content
        lines = content.splitlines(keepends=True)
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.block, self.function = 0, ""

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.at(node.lineno, node.col_offset)
        return start, self.at(node.end_lineno, node.end_col_offset)

    def add(self, node: ast.expr | ast.stmt, kind: str, after: str, where: tuple[int, int]) -> None:
        before = self.content[slice(*where)].decode()
        self.found.append(
            Mutant(self.file, node.lineno, kind, before, after, *where, self.block, self.function)
        )

    def between(
        self, node: ast.expr, left: ast.expr, right: ast.expr, kind: str, words: tuple[str, str]
    ) -> None:
        start, end = self.span(left)[1], self.span(right)[0]
        text = self.content[start:end].decode()
        pattern = re.escape(words[0]).replace("\\ ", r"\s+")
        if found := re.search(rf"(?<![\w<>=*/]){pattern}(?![\w<>=*/])", text):
            at = start + len(text[: found.start()].encode())
            self.add(node, kind, words[1], (at, at + len(found.group().encode())))

    # what only speaks
    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    visit_Assert = visit_JoinedStr = visit_Raise  # type: ignore[assignment]
    visit_Import = visit_ImportFrom = visit_Raise  # type: ignore[assignment]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        kept = self.block, self.function
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        self.block, self.function = node.lineno, node.name
        for statement in node.body:
            self.visit(statement)
        self.block, self.function = kept

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:  # `frozen=True` declares what nothing does
            self.visit(statement)

    def branch(self, body: list[ast.stmt]) -> None:
        kept = self.block
        if body and self.function:
            self.block = body[0].lineno
        for statement in body:
            self.visit(statement)
        self.block = kept

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self.condition(node.test)
        self.visit(node.test)
        self.branch(node.body)
        self.branch(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self.branch(node.body)
        self.branch(node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.branch(node.body)
        self.branch(node.orelse)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.branch(node.body)

    def condition(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.NamedExpr):
            text = self.content[slice(*self.span(test))].decode()
            self.add(test, "boolean", f"not ({text})", self.span(test))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.condition(node.test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1 and (words := COMPARED.get(type(node.ops[0]))):
            self.between(node, node.left, node.comparators[0], "comparison", words)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant)
                 and isinstance(side.value, str)) for side in (node.left, node.right))  # fmt: skip
        if any(texts):
            return
        if words := COUNTED.get(type(node.op)):
            self.between(node, node.left, node.right, "arithmetic", words)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self.between(node, node.values[0], node.values[1], "boolean", words)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            operand = self.content[slice(*self.span(node.operand))].decode()
            self.add(node, "boolean", operand, self.span(node))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.add(node, "boolean", str(not node.value), self.span(node))
        elif isinstance(node.value, int | float):
            text = self.content[slice(*self.span(node))].decode()
            self.add(node, "constant", f"({text} + 1)", self.span(node))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        if not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.add(node, "return none", "return None", self.span(node))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            if self.speaks(node.value):
                return
            self.add(node, "dropped call", "pass", self.span(node))
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if not self.speaks(node):
            self.generic_visit(node)

    @staticmethod
    def speaks(node: ast.Call) -> bool:
        called = node.func
        name = getattr(called, "attr", getattr(called, "id", ""))
        return any(word in name for word in SPEAKING) or name.endswith(("Error", "Warning"))


def find_sites(file: str) -> list[Mutant]:
    content = (ROOT / file).read_bytes()
    sites = Sites(file, content)
    sites.visit(ast.parse(content))
    return sites.found


def is_another_program(mutant: Mutant) -> bool:
    content = (ROOT / mutant.file).read_bytes()
    try:
        return ast.dump(ast.parse(mutant.put(content))) != ast.dump(ast.parse(content))
    except SyntaxError:
        return False


def only_speaks(mutant: Mutant) -> bool:
    """A sentence that is not said, or a function that shows something in words."""
    said = re.fullmatch(r"\w+\.append\(f?[\"'(].*", mutant.before, re.S)
    return "show" in mutant.function or mutant.function in ("_reason", "because") or bool(said)


def files_of(group: str) -> Iterator[str]:
    for package in GROUPS[group]:
        for path in sorted((ROOT / "src" / "memfit" / package).rglob("*.py")):
            yield str(path.relative_to(ROOT))


def draw(seed: int, each: int) -> list[Mutant]:
    """So many mutants of each group, of every kind alike, no two in one function."""
    drawn = []
    for group in GROUPS:
        chance = random.Random(f"{seed} {group}")
        by_kind: dict[str, list[Mutant]] = {}
        for file in files_of(group):
            for mutant in find_sites(file):
                by_kind.setdefault(mutant.kind, []).append(mutant)
        for kind in by_kind.values():
            chance.shuffle(kind)
        taken: set[tuple[str, str]] = set()
        kinds = sorted(by_kind)
        turn = found = 0
        while found < each and any(by_kind.values()):
            mutants = by_kind[kinds[turn % len(kinds)]]
            turn += 1
            while mutants:
                mutant = mutants.pop()
                where = mutant.file, mutant.function
                if where in taken or only_speaks(mutant):
                    continue
                if is_another_program(mutant):
                    taken.add(where)
                    drawn.append(mutant)
                    found += 1
                    break
    return drawn
