"""Tests run in a copy of the tree, each time in a new process that has imported the libraries."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mutants import ROOT, Mutant

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "hypothesis", "numpy", "safetensors")
LATE = "it took too long"


class Told:
    """A plugin of pytest that writes down what failed first, and how many tests ran before."""

    def __init__(self, answer: Path) -> None:
        self.answer, self.ran = answer, 0

    def tell(self, failed: str) -> None:
        self.answer.write_text(json.dumps({"by": failed, "ran": self.ran}), encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.tell(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell(f"{report.nodeid} (not even collected)")


def import_libraries() -> None:
    """As conftest.py has them: no network, one thread."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name in LIBRARIES:
        importlib.import_module(name)


def copy_tree(folder: Path) -> Path:
    """What git tracks, in its present state; with the page's tools, which some tests use."""
    tree = folder / "tree"
    tree.mkdir()
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    packed = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"],
        cwd=ROOT, input=files, capture_output=True, check=True,
    ).stdout  # fmt: skip
    subprocess.run(["tar", "--extract"], cwd=tree, input=packed, check=True)
    if (ROOT / "ui" / "node_modules").exists():
        (tree / "ui" / "node_modules").symlink_to((ROOT / "ui" / "node_modules").resolve())
    compiled = [sys.executable, "-m", "compileall", "-q", "src", "tests"]
    subprocess.run(compiled, cwd=tree, check=True)
    return tree


def run_tests(tree: Path, tests: list[str], seconds: float) -> dict[str, Any]:
    """What of the tests fails first; "by" is empty where nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.setsid()
            in_child(tree, tests, answer)
        late = False
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            late = time.monotonic() - began > seconds
            if late:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a test has left
        said = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None
    took = round(time.monotonic() - began, 1)
    if said is None:
        said = {"by": LATE if late else "the process died", "ran": 0}
    return {**said, "seconds": took}


def in_child(tree: Path, tests: list[str], answer: Path) -> None:
    try:
        os.chdir(tree)
        source = str(tree / "src")
        sys.path[:] = [source, *(p for p in sys.path if p != str(ROOT / "src"))]
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        told = Told(answer)
        code = pytest.main(
            [
                "-x",
                "-q",
                "-W",
                "ignore::pytest.PytestAssertRewriteWarning",
                "-p",
                "no:randomly",
                "-p",
                "no:cacheprovider",
                *tests,
            ],
            plugins=[told],
        )
        if not answer.exists():
            told.tell("" if code == 0 else f"pytest ended with {int(code)}")
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        raise
    finally:
        os._exit(0)


class Put:
    """A mutant in the tree, meanwhile. Its file is newer than what was compiled of it."""

    def __init__(self, tree: Path, mutant: Mutant) -> None:
        self.path, self.mutant = tree / mutant.file, mutant
        self.content, self.times = self.path.read_bytes(), self.path.stat()

    def __enter__(self) -> None:
        self.path.write_bytes(self.mutant.put(self.content))
        os.utime(self.path, (self.times.st_atime, self.times.st_mtime + 100))

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(self.content)
        os.utime(self.path, ns=(self.times.st_atime_ns, self.times.st_mtime_ns))
