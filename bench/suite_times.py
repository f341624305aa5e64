"""Where the CPU seconds of the tests go: by folder, by file, by fixture and by test.

`python bench/suite_times.py run FOLDER...` runs each folder or file by itself, in one process, as
`make test` selects its tests, and keeps what each test's set-up, call and clean-up took: CPU
seconds of the process and of the children that it waited for. Other work on the machine makes
these a little larger (its caches are shared) where it makes seconds on a clock several times as
large. `read` prints the tables anew, and writes bench/results/suite_times.json with `--write`.

It is also the plugin of pytest that does the counting: `pytest -p suite_times`, with the file
that it writes in MEMFIT_SUITE_TIMES. A whole run of `make test`, in several processes, writes one
such file: `read FILE --commit COMMIT` takes it. What processes start and do not wait for within a
phase (the page's browser) is counted in the phase in which they end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "suite_times"
RESULT = ROOT / "bench" / "results" / "suite_times.json"
WANTED = "MEMFIT_SUITE_TIMES"
CHOSEN = "not wide"  # as in the Makefile, of `make test` and `make test-journeys`
STARTED: list[str] = []  # what the present phase of a test has started


def of(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def in_children() -> float:
    """CPU seconds of the children that have ended and were waited for."""
    return of(resource.RUSAGE_CHILDREN)


def used() -> float:
    """CPU seconds of this process and of such children."""
    return of(resource.RUSAGE_SELF) + in_children()


def count_starts(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen":
        STARTED.append(" ".join(map(str, list(arguments[1])))[:200])


def note(**row: object) -> None:
    if where := os.environ.get(WANTED):
        with Path(where).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    sys.addaudithook(count_starts)
    note(kind="start", cpu=used(), tests=len(session.items))


def phase(item: pytest.Item, name: str):
    before, children = used(), in_children()
    STARTED.clear()
    try:
        return (yield)
    finally:
        note(
            kind="test", test=item.nodeid, phase=name, cpu=used() - before,
            children=in_children() - children, started=list(STARTED),
        )  # fmt: skip


def pytest_sessionfinish() -> None:
    note(kind="end", cpu=used())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    return (yield from phase(item, "setup"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    return (yield from phase(item, "call"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item):
    return (yield from phase(item, "teardown"))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest):
    before = used()
    result = yield
    where = f"{request.node.nodeid.partition('::')[0] or 'session'}::{fixturedef.argname}"
    note(kind="fixture", fixture=where, scope=fixturedef.scope, cpu=used() - before)
    return result


def run(targets: list[str]) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    python_path = os.pathsep.join(filter(None, (str(ROOT / "bench"), os.environ.get("PYTHONPATH"))))
    for target in targets:
        rows = KEPT / (target.strip("/").replace("/", "+") + ".jsonl")
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        rows.write_text(json.dumps({"kind": "run", "commit": commit}) + "\n", encoding="utf-8")
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "suite_times", "-p", "no:randomly",
             "-m", CHOSEN, target],
            cwd=ROOT, env={**os.environ, WANTED: str(rows), "PYTHONPATH": python_path},
        )  # fmt: skip
        print(f"{target}: pytest ended with {ended.returncode}", flush=True)


def commits(files: list[Path]) -> dict[str, str]:
    """What was run at which commit."""
    found = {}
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("kind") == "run":
                found[file.stem.replace("+", "/")] = row["commit"]
    return found


def totals(files: list[Path]) -> dict[str, dict[str, float]]:
    """CPU seconds by folder, file, fixture and test; and what each run had taken before its first
    test and at its end, pytest's own seconds included."""
    tables: dict[str, dict[str, float]] = {
        name: defaultdict(float) for name in ("folder", "file", "fixture", "test", "start", "end")
    }
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["kind"] == "fixture":
                tables["fixture"][f"{row['fixture']} ({row['scope']})"] += row["cpu"]
            elif row["kind"] == "run":
                continue
            elif row["kind"] in ("start", "end"):
                tables[row["kind"]][file.stem.replace("+", "/")] += row["cpu"]
            else:
                path = row["test"].partition("::")[0]
                tables["folder"][str(Path(path).parent)] += row["cpu"]
                tables["file"][path] += row["cpu"]
                tables["test"][row["test"]] += row["cpu"]
    return tables


def shown(table: dict[str, float], rows: int) -> dict[str, float]:
    """The largest rows, rounded to tenths of a second."""
    largest = sorted(table.items(), key=lambda item: -item[1])
    return {name: round(cpu, 1) for name, cpu in largest[:rows] if cpu >= 0.05}


def read(files: list[Path], rows: int, write: bool, commit: str) -> None:
    tables = totals(files)
    tests = sum(tables["folder"].values())
    print(f"{tests:.0f} CPU seconds in {len(tables['test'])} tests")
    for name, table in tables.items():
        print(f"\nby {name}:")
        for key, cpu in shown(table, rows).items():
            print(f"{cpu:8.1f}  {key}")
    if write:
        kept = {"what": "CPU seconds, of all processes", "tests": len(tables["test"]),
                "cpu_seconds": round(tests, 1),
                "commits": {"tests": commit} if commit else commits(files)}  # fmt: skip
        kept |= {name: shown(table, rows) for name, table in tables.items()}
        RESULT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run", help="run folders or files, one after another")
    running.add_argument("targets", nargs="+")
    reading = verbs.add_parser("read", help="print the tables of what was run")
    reading.add_argument("files", nargs="*", type=Path)
    reading.add_argument("--rows", type=int, default=40)
    reading.add_argument("--write", action="store_true")
    reading.add_argument("--commit", default="", help="of a whole run, whose file does not say it")
    asked = parser.parse_args()
    if asked.verb == "run":
        run(asked.targets)
    else:
        read(asked.files or sorted(KEPT.glob("*.jsonl")), asked.rows, asked.write, asked.commit)


if __name__ == "__main__":
    main()
