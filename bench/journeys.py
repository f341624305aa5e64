"""What `memfit plan` answers over the matrix of models, places, methods and frameworks.

    python bench/journeys.py                 # the whole matrix; type it again to go on
    python bench/journeys.py --models gemma  # only models whose name has that

Each cell is one request as a new user would write it: a catalogue model, a place, a method, whose
step. It is planned as `memfit plan` plans what is typed, without levers and ways out. Its answer is
judged: a crash, a refusal without a hint or one that names a knob which the request left on `auto`,
numbers that cannot be, and a plan.json that is predicted as another plan are faults. Cells are
asked in rounds, each of which has cells of every model, so that a run that is stopped has asked
about all of them. `bench/results/journeys.txt` has the answer of every cell, a line for each model
and framework, so that a run goes on where the one before ended; `bench/results/journeys.json` has
the counts, the reasons, the number of cells and the commits under which they were asked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from memfit import __version__, api, catalog, families
from memfit.core.errors import Error
from memfit.plan.request.problem import read_problem
from memfit.plan.search.search import search_briefly
from memfit.records.request import Request
from memfit.records.results import Plan

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "bench" / "results" / "journeys.txt"
RESULTS = ROOT / "bench" / "results" / "journeys.json"

PLACES: dict[str, dict[str, Any]] = {
    "1 x h100": {"hardware.device": "h100-sxm"},
    "1 x rtx-4090": {"hardware.device": "rtx-4090"},
    "1 x t4": {"hardware.device": "t4"},
    "1 x mi325x": {"hardware.device": "mi325x"},
    "cpu of 16 GiB": {"hardware.device": "cpu", "limits.memory": "16 GiB"},
    "8 x h100": {"hardware.device": "h100-sxm", "hardware.count": 8},
    "4 x l40s": {"hardware.device": "l40s", "hardware.count": 4},
    "64 x h100": {"hardware.device": "h100-sxm", "hardware.count": 8, "hardware.nodes": 8},
}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"method": "lora"},
    "qlora": {"method": "lora", "base_format": "nf4"},
    "dora": {"method": "dora"},
    "freeze": {"method": "freeze", "freeze.last_blocks": 2},
}
CODES = {"fits": "F", "at_risk": "T", "does_not_fit": "D", "unproven": "U", "crashed": "X"}
SAVED_EACH = 60.0  # seconds
ROUNDS = 16  # in which cells are asked, each of them spread over all models
NOT_ASKED, REFUSED = "-", "r"  # a refusal is `r` and the number of its reason
FRAMEWORKS = ("memfit", "hf-trainer", "trl", "torchtitan", "megatron", "deepspeed")
# bytes of a stored weight, the least that any storage of the method takes: nf4 has half a byte
LEAST_BYTES = {"qlora": 0.5}
NAMED = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*): [^`]*`")


class Cell(NamedTuple):
    """One request of the matrix."""

    model: str
    place: str
    method: str
    framework: str

    @property
    def keys(self) -> dict[str, Any]:
        """What the user writes, dotted."""
        own = {} if self.framework == "memfit" else {"framework": self.framework}
        return {"model": self.model, **PLACES[self.place], **METHODS[self.method], **own}

    @property
    def share(self) -> int:
        """A number that is spread evenly over cells and is the same everywhere."""
        return int(hashlib.sha256("|".join(self).encode()).hexdigest()[:8], 16)


class Answer(NamedTuple):
    """What came of a cell: a verdict or `refused`, why, and what is wrong with it."""

    outcome: str
    because: str  # of a refusal or a crash, without its names and numbers
    faults: tuple[str, ...]
    seconds: float  # of CPU; 0 of an earlier run's


def cells() -> list[Cell]:
    """The whole matrix, those of one model together."""
    return [
        Cell(model.id, place, method, framework)
        for model in catalog.models()
        for place in PLACES
        for framework in FRAMEWORKS
        for method in METHODS
    ]


def in_rounds() -> list[Cell]:
    """The same cells in the order in which they are asked."""
    return sorted(cells(), key=lambda cell: cell.share % ROUNDS)


def ask(cell: Cell) -> Answer:
    """Plan one cell in this process, and judge the answer."""
    keys = cell.keys
    started = time.process_time()
    try:
        request = api.read(keys["model"], changes={k: v for k, v in keys.items() if k != "model"})
        plan = search_briefly(read_problem(request)).plan
    except Error as error:
        outcome, because = "refused", sort_reason(error.message)
        faults = judge_refusal(error, keys)
    except Exception as crash:
        outcome, because = "crashed", f"{type(crash).__name__}: {crash}"
        faults = [f"it crashed: {because}"]
    else:
        outcome, because = plan.memory.verdict, ""
        faults = [*judge_plan(plan, cell.method), *judge_again(plan)]
    return Answer(
        outcome, because, tuple(faults), max(0.001, round(time.process_time() - started, 3))
    )


def judge_refusal(error: Error, keys: dict[str, Any]) -> list[str]:
    """What is wrong with a refusal of a request that states these keys."""
    faults = [] if error.hint else ["it has no hint"]
    known = _paths(Request)
    for name in NAMED.findall(error.message):
        paths = {p for p in known if p == name or p.endswith(f".{name}")}
        if paths and not paths & set(keys):
            faults.append(f"it names `{name}`, which the request did not set")
    return faults


def judge_plan(plan: Plan, method: str) -> list[str]:
    """What cannot be among a plan's numbers."""
    faults: list[str] = []
    memory, recipe = plan.memory, plan.recipe
    device = api.find_device(plan.request.hardware.device)
    most = memory.usable if device.is_cpu else device.most_memory
    if memory.verdict == "fits" and (memory.needed is None or most is None):
        faults.append("it fits without a number, or where the memory is unknown")
    elif memory.verdict == "fits" and memory.needed > min(most, memory.usable):
        faults.append(f"it fits with {memory.needed} bytes of {min(most, memory.usable)}")
    if memory.verdict == "does_not_fit" and memory.needed is not None:
        high = memory.total_high or memory.needed
        if memory.usable is not None and high <= memory.usable:
            faults.append(f"it does not fit with {high} bytes of {memory.usable}")
    parameters = families.read_model(recipe.model).parameters
    weights = LEAST_BYTES.get(method, 2.0) * parameters / recipe.parallel.world
    if memory.peak_allocated is not None and memory.peak_allocated < 0.9 * weights:
        faults.append(f"its peak of {memory.peak_allocated} bytes is below its weights' {weights}")
    if memory.needed is not None and memory.needed < (memory.peak_allocated or 0):
        faults.append("its total is below its peak")
    seconds = plan.time.step_seconds
    if seconds is not None and not seconds > 0:
        faults.append(f"a step takes {seconds} s")
    if plan.time.mfu is not None and not 0 < plan.time.mfu < 1:
        faults.append(f"its model FLOP utilisation is {plan.time.mfu}")
    return faults


def judge_again(plan: Plan) -> list[str]:
    """What is wrong with `memfit predict plan.json`: it is the same recipe, bytes and seconds."""
    try:
        again = api.predict(api.state(plan))
    except Exception as error:
        return [f"its own plan.json is not predicted: {type(error).__name__}: {error}"]
    if again.recipe_digest != plan.recipe_digest:
        return ["its own plan.json is predicted as another recipe"]
    same = again.memory.needed == plan.memory.needed
    same = same and again.time.step_seconds == plan.time.step_seconds
    return [] if same else ["its own plan.json has another peak or another time"]


def _paths(kind: Any, before: str = "") -> set[str]:
    """Dotted keys of a request."""
    found = set()
    for field in msgspec.structs.fields(kind):
        name = f"{before}{field.name}"
        found.add(name)
        inner = [t for t in (field.type, *getattr(field.type, "__args__", ())) if _is_struct(t)]
        for one in inner:
            found |= _paths(one, f"{name}.")
    return found


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def sort_reason(because: str) -> str:
    """A refusal without its names and numbers, so that those alike are counted together."""
    text = NAMED.sub(lambda found: f"`{found[1]}: …`", because)
    text = re.sub(r"`(?![a-z_.]+: …`)[^`]*`", "`…`", text)
    return re.sub(r"\d[\d,.]*", "n", text)[:160]


def sum_up(lines: dict[Cell, Answer], before: dict[str, Any]) -> dict[str, Any]:
    """The counts that are committed; before: those of an earlier run."""
    outcomes = Counter(answer.outcome for answer in lines.values())
    by: dict[str, dict[str, Counter[str]]] = {"place": {}, "method": {}, "framework": {}}
    for cell, answer in lines.items():
        for axis, found in by.items():
            found.setdefault(getattr(cell, axis), Counter())[answer.outcome] += 1
    refused = Counter(a.because for a in lines.values() if a.outcome == "refused")
    own = sorted(answer.seconds for answer in lines.values() if answer.seconds)
    mean = round(sum(own) / max(len(own), 1), 3)
    middle, most = (own[len(own) // 2], own[-1]) if own else (0.0, 0.0)
    seconds = {"of": len(own), "mean": mean, "median": middle, "most": most} if own else {}
    faults = [(cell, fault) for cell, answer in lines.items() for fault in answer.faults]
    return {
        "memfit": __version__,
        "models": len({cell.model for cell in lines}),
        "cells": len(lines),
        "of": len(cells()),
        "crashes": outcomes["crashed"],
        "faults": {" | ".join(cell): fault for cell, fault in faults},
        "outcomes": dict(sorted(outcomes.items())),
        "by": {axis: {n: dict(sorted(c.items())) for n, c in f.items()} for axis, f in by.items()},
        "refused": {because: refused[because] for because in _reasons(lines, before)},
        "seconds": seconds or before.get("seconds", {}),
        "commits": count_commits(len(own), before),
    }


def count_commits(asked: int, before: dict[str, Any]) -> dict[str, int]:
    """How many cells were asked under each commit; asked: by this run."""
    found = dict(before.get("commits", {}))
    if asked:
        found[find_commit()] = asked + found.get(find_commit(), 0)
    return found


@cache
def find_commit() -> str:
    """The commit when this run began; with a `+` where sources have been changed since."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "--short", "src"))


def _reasons(lines: dict[Cell, Answer], before: dict[str, Any]) -> list[str]:
    """Why cells were refused; the place of each in this list is its number in the table."""
    found = dict.fromkeys(before.get("refused", {}))
    return list(found | dict.fromkeys(a.because for a in lines.values() if a.outcome == "refused"))


def write_table(lines: dict[Cell, Answer], summary: dict[str, Any]) -> str:
    """A line for each model and framework: for each place the answers of all methods."""
    numbers = {because: f"{REFUSED}{n}" for n, because in enumerate(summary["refused"])}

    def code(cell: Cell) -> str:
        answer = lines.get(cell)
        if answer is None:
            return NOT_ASKED
        return numbers[answer.because] if answer.outcome == "refused" else CODES[answer.outcome]

    rows = [f"# {'; '.join(PLACES)}: each for {' '.join(METHODS)}"]
    for model, framework in dict.fromkeys((c.model, c.framework) for c in cells()):
        codes = (
            " ".join(code(Cell(model, place, method, framework)) for method in METHODS)
            for place in PLACES
        )
        rows.append(f"{model} {framework}: {'; '.join(codes)}")
    return "\n".join(rows) + "\n"


def read_table(text: str, summary: dict[str, Any]) -> dict[Cell, Answer]:
    """What an earlier run was answered."""
    outcomes = {code: outcome for outcome, code in CODES.items()}
    reasons, faults = list(summary["refused"]), summary["faults"]
    found = {}
    for line in text.splitlines()[1:]:
        named, codes = line.split(": ")
        model, framework = named.split()
        for place, own in zip(PLACES, codes.split("; "), strict=True):
            for method, code in zip(METHODS, own.split(), strict=True):
                cell = Cell(model, place, method, framework)
                wrong = (faults[" | ".join(cell)],) if " | ".join(cell) in faults else ()
                if code.startswith(REFUSED):
                    found[cell] = Answer("refused", reasons[int(code[1:])], wrong, 0.0)
                elif code != NOT_ASKED:
                    found[cell] = Answer(outcomes[code], "", wrong, 0.0)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="", help="only models whose name has this")
    parser.add_argument("--framework", default="", help="only this framework")
    parser.add_argument("--again", action="store_true", help="ask faulty cells again")
    parser.add_argument("--afresh", action="store_true", help="ask every cell again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--every", type=int, default=1, help="one cell in so many")
    args = parser.parse_args()
    before: dict[str, Any] = {}
    known: dict[Cell, Answer] = {}
    if TABLE.exists() and not args.afresh:
        before = json.loads(RESULTS.read_text())
        known = read_table(TABLE.read_text(), before)
    until = time.monotonic() + 60 * args.minutes
    saved = time.monotonic()
    earlier = {"commits": before.get("commits", {})}
    find_commit()
    for cell in in_rounds():
        answer = known.get(cell)
        keep = answer is not None and not (args.again and answer.faults)
        if keep or args.models not in cell.model or cell.share % args.every:
            continue
        if args.framework not in ("", cell.framework):
            continue
        if time.monotonic() > until:
            break
        known[cell] = answer = ask(cell)
        for fault in answer.faults:
            print(" | ".join(cell), fault, sep=": ", flush=True)
        if time.monotonic() > saved + SAVED_EACH:
            before, saved = save(known, before) | earlier, time.monotonic()
    summary = save(known, before)
    print({key: summary[key] for key in ("cells", "of", "crashes", "outcomes", "seconds")})
    return 1 if summary["faults"] else 0


def save(known: dict[Cell, Answer], before: dict[str, Any]) -> dict[str, Any]:
    """Write the table and the counts; returns the counts."""
    known = {cell: known[cell] for cell in cells() if cell in known}
    summary = sum_up(known, before)
    TABLE.write_text(write_table(known, summary))
    RESULTS.write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    return summary


if __name__ == "__main__":
    sys.exit(main())
