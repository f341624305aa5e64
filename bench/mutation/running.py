"""Tests run in a copy of the tree, each time in a new process that has imported the libraries."""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mutants import ROOT, Mutant

CHOSEN = "not wide and not journey"  # as in the Makefile, of `make test`

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "hypothesis", "numpy", "safetensors")
LATE = "it took too long"
# CPU seconds beyond those of all its tests, of a test that does not end; seconds on a clock, and
# times the CPU seconds, that beside other work are enough
LONGEST, STARTING, PATIENCE = 100, 300, 25


class Told:
    """A plugin of pytest that orders tests, stops when they have taken enough CPU seconds, and
    writes down what failed first, and how many tests ran before."""

    def __init__(self, answer: Path, first: list[str], seconds: float) -> None:
        self.answer, self.ran, self.skipped = answer, 0, 0
        self.first = {test: at for at, test in enumerate(first)}
        self.seconds, self.session = seconds, None

    def tell(self, failed: str) -> None:
        said = {"by": failed, "ran": self.ran, "cpu": round(used() - self.began, 1)}
        self.answer.write_text(json.dumps(said), encoding="utf-8")

    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        """Those that reach the mutant; then of each function one case, and so on; slow ones last.
        Of a file named twice each test once."""
        self.session, self.began = session, used()
        turns: Counter[str] = Counter()
        places = {}
        for at, item in enumerate(dict.fromkeys(items)):
            function = item.nodeid.partition("[")[0]
            turns[function] += 1
            slow = item.get_closest_marker("slow") is not None
            file = item.nodeid.partition("::")[0]
            known = self.first.get(item.nodeid, self.first.get(file, len(self.first)))
            places[item] = (known, slow, turns[function], at)
        items[:] = sorted(places, key=places.__getitem__)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += report.when == "call"
        if report.failed:
            self.tell(report.nodeid)
        elif report.when == "teardown" and used() - self.began > self.seconds and self.session:
            self.session.shouldstop = "enough"
            self.tell("")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.began = used()
            self.tell(f"{report.nodeid} (not even collected)")


def used() -> float:
    """CPU seconds of this process and of children that it waited for."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def used_by(process: int) -> float:
    """The same of another process."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


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


def run_tests(tree: Path, files: list[str], first: list[str], seconds: float) -> dict[str, Any]:
    """What of these files' tests fails first, as far as one gets in so many CPU seconds; "by" is
    empty where nothing does. first: the tests, and files, that are to be run before others."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.setsid()
            in_child(tree, files, Told(answer, first, seconds))
        late = False
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            waited = time.monotonic() - began
            late = used_by(child) > seconds + LONGEST or waited > STARTING + PATIENCE * seconds
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
        said = {"by": LATE if late else "the process died", "ran": 0, "cpu": seconds}
    return {**said, "seconds": took}


def in_child(tree: Path, files: list[str], told: Told) -> None:
    try:
        os.chdir(tree)
        source = str(tree / "src")
        sys.path[:] = [source, *(p for p in sys.path if p != str(ROOT / "src"))]
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        words = ["-x", "-q", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        words += [] if any("::" in name for name in files) else ["-m", CHOSEN]
        words += ["-p", "no:randomly", "-p", "no:cacheprovider", "--timeout", "0"]
        code = pytest.main([*words, *files], plugins=[told])
        if not told.answer.exists():
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
