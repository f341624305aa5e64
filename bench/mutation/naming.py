"""Which files of tests are near a module: by what they name of it, and how many imports away."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from mutants import ROOT, Mutant

FARTHEST = 3  # imports; beyond, nearly every file of tests reaches nearly every module
# It holds figures of plans, whatever module makes them.
HOLDS_ALL = "tests/plan/test_figures.py"


def name_module(path: Path) -> str:
    """src/memfit/plan/space.py -> memfit.plan.space"""
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, modules: frozenset[str]) -> set[str]:
    """Modules of memfit, or helpers of tests, that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


@cache
def find_importers() -> dict[str, set[str]]:
    """Of each module: the modules, and the files of tests, that import it."""
    paths = {name_module(p): p for p in sorted((ROOT / "src" / "memfit").rglob("*.py"))}
    tests = sorted((ROOT / "tests").rglob("*.py"))
    helpers = {p.stem: p for p in tests if not p.name.startswith("test_")}
    paths |= helpers
    paths |= {str(p.relative_to(ROOT)): p for p in tests if p.name.startswith("test_")}
    modules = frozenset(paths)
    importers: dict[str, set[str]] = defaultdict(set)
    for name, path in paths.items():
        for other in imported(path, modules):
            importers[other].add(name)
    return importers


@cache
def words_of_tests() -> dict[str, frozenset[str]]:
    """Of each file of tests: the words in it."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return {
        str(p.relative_to(ROOT)): frozenset(re.findall(r"\w{4,}", p.read_text(encoding="utf-8")))
        for p in files
    }


def score_names(path: Path, mutant: Mutant) -> dict[str, float]:
    """Of each file of tests: how much it names the module, what is defined in it, and what stands
    beside the fault, each name by how few files have it."""
    tree = ast.parse(path.read_bytes())
    defined = (ast.FunctionDef, ast.ClassDef)
    found = {node.name for node in ast.walk(tree) if isinstance(node, defined)}
    names = {name for name in found if not name.startswith("_")} | {path.stem}
    lines = path.read_text(encoding="utf-8").splitlines()[mutant.line - 2 : mutant.line + 1]
    names |= {word for word in re.findall(r"\w{4,}", " ".join(lines)) if not word.isdigit()}
    scores: dict[str, float] = defaultdict(float)
    for name in names:
        files = [file for file, words in words_of_tests().items() if name in words]
        for file in files:
            scores[file] += 1 / len(files)
    return scores


def find_near(mutant: Mutant, most: int) -> list[str]:
    """The nearest files of tests: those first that mirror the module, name what few others name of
    it, import it, lie in the folder that mirrors the module's, and are short."""
    path = ROOT / mutant.file
    distances = {name_module(path): 0}
    ahead = [name_module(path)]
    while ahead:
        module = ahead.pop(0)
        for other in find_importers().get(module, ()):
            if other not in distances and distances[module] < FARTHEST:
                distances[other] = distances[module] + 1
                ahead.append(other)
    folder = Path("tests", *Path(mutant.file).parts[2:-1])
    scores = score_names(path, mutant)
    own = (ROOT / "tests" / folder.parts[1]).rglob("test_*.py")
    known = {*distances, *scores, *(str(p.relative_to(ROOT)) for p in own)}

    def order(file: str) -> tuple[bool, float, int, int, int]:
        apart = len(set(folder.parts) - set(Path(file).parts))
        length = len(words_of_tests()[file])
        mirrors, distance = (
            Path(file).stem == f"test_{path.stem}",
            distances.get(file, FARTHEST + 1),
        )
        score = round(scores.get(file, 0.0) / distance, 1)
        return not mirrors, -score, distance, apart, length

    elsewhere = ("tests/gpu/", "tests/ui/")  # skipped, or seen through a browser
    known = {file for file in known if file in words_of_tests() and not file.startswith(elsewhere)}
    near = sorted(known, key=order)
    package = Path(mutant.file).parts[2]
    held = [HOLDS_ALL] if package not in ("train", "certify") else []
    return list(dict.fromkeys([*held, *near]))[:most]
