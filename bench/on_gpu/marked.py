"""Every test marked `gpu`, a file a unit: what passed, what failed and why, what was skipped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from on_gpu.paths import ROOT
from on_gpu.rows import Place, Row, Unit

TESTS = ROOT / "tests"
# the slices `allocator` and `recipes` measure the same and keep more of it: these come last
ELSEWHERE = ("test_allocator_on_gpu.py", "test_certified_on_gpu.py")


def list_units(place: Place) -> list[Unit]:
    marked = [
        path for path in sorted(TESTS.rglob("test_*.py"))
        if re.search(r"mark\.gpu\b", path.read_text(encoding="utf-8"))
    ]  # fmt: skip
    marked.sort(key=lambda path: path.name in ELSEWHERE)
    if place.rehearsal:
        marked = [path for path in marked if path.name == "test_varlen_on_gpu.py"]
    return [Unit(str(path.relative_to(ROOT)), 400.0) for path in marked]


def measure(name: str, place: Place) -> Row:
    """Run one file's tests; a test that fails is told of with its last line."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", name, "-m", "gpu", "-q", f"--junitxml={report}"]
        command += [
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
        ]  # others warn of other things
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        if not report.exists():
            said = (done.stderr or done.stdout).strip().splitlines()
            return {"failed": f"pytest: {said[-1] if said else done.returncode}"[:300]}
        return read_report(ElementTree.parse(report).getroot())


def read_report(root: ElementTree.Element) -> Row:
    """The tests of a JUnit report by outcome; `broken` and `left_out` carry reasons."""
    passed, broken, left_out = [], {}, {}
    for case in root.iter("testcase"):
        name = case.get("name", "")
        bad = case.find("failure") if case.find("error") is None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            broken[name] = (bad.get("message") or bad.text or "").strip()[:400]
        elif skip is not None:
            left_out[name] = (skip.get("message") or "").strip()[:200]
        else:
            passed.append(name)
    return {"passed": passed, "broken": broken, "left_out": left_out}
