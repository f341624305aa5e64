"""Do the tests of `make test` notice small faults in what plans, certifies and trains?

`python bench/mutation run` draws mutants from a seed (mutants.py), puts one after another into a
copy of the tree, and runs tests until one fails, or so many CPU seconds are over: those that reach
its block, as far as `python bench/mutation map FOLDER...` has found out which do, then those of the
files of tests that are fewest imports away from its module (naming.py). It goes on where it was;
`--again` puts survivors to tests anew. Results stand in bench/results/mutation.json, `read` sums
them up, and `check` runs all tests that killed something without a mutant: what fails there kills
nothing.

A mutant is put to some of the tests that could notice it: the share of killed ones is a lower
bound. Survivors are judged in judged.toml: those whose program does what the original does, and
those that are open. `--killed` puts mutants to tests anew that some test killed, to that one first:
does `make test` notice them after tests and sources have changed?
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parent))
from choosing import REACHED, choose, find_costs, find_reaching
from mutants import GROUPS, ROOT, Mutant, draw, find_sites
from naming import HOLDS_ALL, find_near
from running import LATE, Put, copy_tree, import_libraries, run_tests

from share import is_journey

RESULT = ROOT / "bench" / "results" / "mutation.json"
JUDGED = Path(__file__).parent / "judged.toml"
NEAR, FILES = 30, 10  # files of tests: that are ranked, and to which a mutant is put


def find_map(targets: list[str]) -> None:
    REACHED.mkdir(parents=True, exist_ok=True)
    for target in targets:
        file = REACHED / (target.strip("/").replace("/", "+") + ".jsonl")
        file.unlink(missing_ok=True)
        python_path = os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", str(ROOT / "src"))]
        )
        asked = {"MEMFIT_REACHED": str(file), "PYTEST_ADDOPTS": "-p reached",
                 "PYTHONPATH": python_path}  # fmt: skip
        subprocess.run(
            [sys.executable, str(ROOT / "bench" / "suite_times.py"), "run", target],
            cwd=ROOT, env={**os.environ, **asked}, check=False,
        )  # fmt: skip


def read_rows() -> dict[str, dict[str, Any]]:
    if not RESULT.exists():
        return {}
    return {row["mutant"]: row for row in json.loads(RESULT.read_text())["mutants"]}


def write_rows(rows: dict[str, dict[str, Any]]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    kept = {"commit": commit, "counts": count(rows), "survivors": judge(rows),
            "mutants": [rows[name] for name in sorted(rows)]}  # fmt: skip
    unfinished = RESULT.with_suffix(".partial")
    unfinished.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(RESULT)


def group_of(mutant: Mutant) -> str:
    package = Path(mutant.file).parts[2]
    return next(group for group, packages in GROUPS.items() if package in packages)


def find_survivors(rows: dict[str, dict[str, Any]]) -> list[Mutant]:
    """Those that no test noticed, or that took too long, perhaps for other reasons."""
    reasons = read_reasons()
    return find_anew(rows, lambda row: row["by"] in ("", LATE) and row["mutant"] not in reasons)


def read_reasons(judgement: str = "equivalent") -> dict[str, str]:
    """What was found of mutants that survived, by name: why one is equivalent, or is open."""
    found: dict[str, str] = tomllib.loads(JUDGED.read_text(encoding="utf-8"))[judgement]
    return found


def judge(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Of each survivor: equivalent or open, and why."""
    left = {name for name, row in rows.items() if not row["by"]}
    judged = {name: "not judged yet" for name in sorted(left)}
    for word in ("equivalent", "open"):
        judged |= {n: f"{word}: {why}" for n, why in read_reasons(word).items() if n in left}
    return judged


def count(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By group, kind and seed, and of all: how many were killed, survived and are equivalent, and
    the share of killed ones among those that are not."""
    reasons, counts = read_reasons(), dict[str, Counter[str]]()
    for name, row in rows.items():
        outcome = "killed" if row["by"] else "equivalent" if name in reasons else "survived"
        for key in (row["group"], row["kind"], f"seed {row['seed']}", "all"):
            counts.setdefault(key, Counter())[outcome] += 1
    found: dict[str, dict[str, float]] = {}
    for key, each in sorted(counts.items()):
        share = each["killed"] / max(1, each["killed"] + each["survived"])
        found[key] = {word: each[word] for word in ("killed", "survived", "equivalent")}
        found[key]["share"] = round(share, 3)
    return found


def run(asked: argparse.Namespace) -> None:
    rows = read_rows()
    if asked.killed:
        killed = find_anew(rows, lambda row: row["by"] not in ("", LATE))
        left = [m for m in killed if asked.only in m.file]
    elif asked.again:
        left = [m for m in find_survivors(rows) if asked.only in m.file]
    else:
        drawn = [m for m in draw(asked.seed, asked.each) if group_of(m) in asked.groups.split(",")]
        left = [m for m in drawn if m.name not in rows and asked.only in m.file]
    seeds = {name: row["seed"] for name, row in rows.items()}
    print(f"{len(left)} mutants to run", flush=True)
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="memfit-mutation-") as folder:
        tree = copy_tree(Path(folder))
        os.environ["PYTHONPATH"] = str(tree / "src")
        costs = find_costs()
        reaching = find_reaching({(m.file, m.block) for m in left})
        for mutant in left:
            reached = [
                test
                for test in reaching.get((mutant.file, mutant.block), [])
                if not is_journey(ROOT / test.partition("::")[0])
            ]
            near = [file for file in find_near(mutant, NEAR) if not is_journey(ROOT / file)]
            first = choose(reached, costs, asked.seconds, near)
            files = dict.fromkeys(test.partition("::")[0] for test in first)
            chosen = [*dict.fromkeys([*near[:2], *files, *near])][:FILES]
            known = [rows[mutant.name]["by"]] if asked.killed else []
            known = [test for test in known if is_here(test)]
            first = asked.first + known + [file for file in near if file == HOLDS_ALL] + first
            wanted = (test.partition("::")[0] for test in asked.first + known)
            chosen = [*dict.fromkeys([*wanted, *chosen])]
            with Put(tree, mutant):
                said = run_tests(tree, chosen, first, asked.seconds)
            rows = read_rows()  # another process may have written
            rows[mutant.name] = {
                "mutant": mutant.name, "seed": seeds.get(mutant.name, asked.seed),
                "group": group_of(mutant), "file": mutant.file, "line": mutant.line,
                "function": mutant.function, "kind": mutant.kind, "files": len(chosen), **said,
            }  # fmt: skip
            write_rows(rows)
            print(f"{said['by'] or 'SURVIVED'}  <- {mutant.name}  {said['seconds']} s", flush=True)


def check() -> None:
    """Tests that killed a mutant, in the tree as it is."""
    rows = read_rows()
    tests = sorted({row["by"] for row in rows.values() if "::" in row["by"]})
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="memfit-mutation-") as folder:
        tree = copy_tree(Path(folder))
        while tests:
            said = run_tests(tree, tests, tests, 3600)
            if not said["by"]:
                break
            print(f"fails without a mutant: {said['by']}", flush=True)
            tests.remove(said["by"])
    print(f"{len(tests)} tests that killed pass without a mutant")


def read() -> None:
    rows = read_rows()
    write_rows(rows)  # what was judged since they ran
    for name, why in judge(rows).items():
        print(f"{name} in {rows[name]['function'] or 'the module'}: {why}")
    for key, found in count(rows).items():
        print(
            f"{key:14} {found['killed']:4} killed {found['survived']:4} survived "
            f"{found['equivalent']:4} equivalent  {found['share']:.1%}"
        )


def is_here(test: str) -> bool:
    """Whether the file of a test is one of `make test`."""
    file = ROOT / test.partition("::")[0]
    return file.suffix == ".py" and file.exists() and not is_journey(file)


def find_anew(
    rows: dict[str, dict[str, Any]], wanted: Callable[[dict[str, Any]], bool]
) -> list[Mutant]:
    """Those wanted, where they stand in the source as it is: rows take their names from there, and
    those whose source is gone are dropped."""
    found = []
    for name, row in [(n, r) for n, r in rows.items() if wanted(r)]:
        del rows[name]
        mutant = find_again(name, row)
        if mutant is None:
            print(f"its source is gone: {name}", flush=True)
            continue
        rows[mutant.name] = {**row, "mutant": mutant.name, "line": mutant.line}
        found.append(mutant)
    write_rows(rows)
    return found


def find_again(name: str, row: dict[str, Any]) -> Mutant | None:
    """The mutant of that change and function that is nearest to where it stood."""
    if not (ROOT / row["file"]).exists():
        return None
    sites = [m for m in find_sites(row["file"]) if change_of(m.name) == change_of(name)]
    sites = [m for m in sites if m.function == row["function"]]
    return min(sites, key=lambda m: abs(m.line - row["line"]), default=None)


def change_of(name: str) -> str:
    """What a mutant changes, without its place."""
    return name.partition(" ")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    mapping = verbs.add_parser("map", help="which tests reach what")
    mapping.add_argument("targets", nargs="+")
    running = verbs.add_parser("run", help="put mutants to tests, going on where it was")
    running.add_argument("--seed", type=int, default=1)
    running.add_argument("--each", type=int, default=40, help="mutants of each group")
    running.add_argument("--groups", default=",".join(GROUPS), help="which of them")
    running.add_argument("--seconds", type=float, default=30, help="CPU seconds of tests, of each")
    running.add_argument("--again", action="store_true", help="survivors alone")
    running.add_argument("--killed", action="store_true", help="killed ones alone")
    running.add_argument("--only", default="", help="part of a file's name")
    running.add_argument("--first", nargs="*", default=[], help="tests and files before all others")
    verbs.add_parser("check", help="run what killed without a mutant")
    verbs.add_parser("read", help="the sums, and what survived")
    asked = parser.parse_args()
    match asked.verb:
        case "map":
            find_map(asked.targets)
        case "run":
            run(asked)
        case "check":
            check()
        case _:
            read()


if __name__ == "__main__":
    main()
