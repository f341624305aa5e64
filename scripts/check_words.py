"""Check that names and docstrings of src/memfit use the field's terms; `make lint` runs it.

The words below stood for many things each: a request, a saved tensor, a recomputed block.

`because` may be a field, which says why a number is what it is, but no module.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "memfit"
WORDS = frozenset(
    ["told", "said", "asked", "kept", "stow", "stows", "again", "coded", "lack", "lacks", "lacking",
     "given"]
)  # fmt: skip
OF_NAMES = WORDS | {"where"}  # a conjunction in a sentence, no name of a thing
OF_MODULES = OF_NAMES | {"because"}
OF_SENTENCES = re.compile(rf"\b(?:{'|'.join(sorted(WORDS))}|so many)\b", re.IGNORECASE)
EXCEPTIONS = {
    ("plan/step_time/arrays.py", "where"),  # numpy's function, on plain numbers too
    ("records/results.py", "where"),  # a field of run.json
}


class Use(NamedTuple):
    """One word in a name or a docstring."""

    file: str
    line: int
    word: str
    text: str


def split_name(name: str) -> list[str]:
    """Return the words of an identifier in lower case."""
    return [part.lower() for part in re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name) if part]


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of every name that a module defines or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def find_uses(file: str, text: str) -> Iterator[Use]:
    """Yield the words of the list in a module's names and docstrings."""
    tree = ast.parse(text)
    for word in OF_MODULES.intersection(*[split_name(Path(file).stem)]):
        yield Use(file, 1, word, "the module's name")
    for line, name in sorted(set(bound_names(tree))):
        for word in OF_NAMES.intersection(split_name(name)):
            if (file, name) not in EXCEPTIONS:
                yield Use(file, line, word, f"`{name}`")
    lines = text.splitlines()
    for node in ast.walk(tree):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            sentence = node.body[0]
            for number in range(sentence.lineno, (sentence.end_lineno or 0) + 1):
                for found in OF_SENTENCES.findall(lines[number - 1]):
                    yield Use(file, number, found.lower(), lines[number - 1].strip())


def find_all() -> list[Use]:
    """Return the uses in all modules of the package."""
    found: list[Use] = []
    for path in sorted(SOURCE.rglob("*.py")):
        found += find_uses(path.relative_to(SOURCE).as_posix(), path.read_text())
    return found


def main() -> int:
    """Print the uses that are not allowed; return 1 where there are some."""
    found = find_all()
    for use in found:
        print(f"src/memfit/{use.file}:{use.line}: {use.word}: {use.text}")
    if found:
        print(
            "hint: name what it stands for, such as `requested`, `saved`, `recomputed`, `quantised`"
        )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
