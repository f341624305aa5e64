"""How many configurations a second the search evaluates, and in how much memory.

    python bench/search.py [--framework NAME] [--peers FOLDER] [--no-write]

Each case is a request that leaves the mesh, the micro-batch, recomputing and the kernels open. It
runs in a process of its own, twice; the second time is `warm`. `space` lists the candidates,
`memory` gives the bytes and `time` the seconds of every one: `a_second_of_cpu` are predicted in
full in a second of one core's time. `search` is the plan that memfit makes, which need not predict
what cannot win; seconds of the clock count others at work. `alike` counts candidates that were also
predicted one by one and had the same bytes: all of `checked`. `leanest` are those that fit and
recompute the fewest blocks, found without measuring all. `resident_mib` is the largest set of the
process, with numpy.

With --peers (FOLDER as for bench/calculators.py), llm-analysis, SimuMax and calculon are asked,
with their own code in the same run, for a sample of one case's candidates one by one: milliseconds
of one core a configuration, and how many times memfit's own that is.

Writes bench/results/search.json.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import memfit
from memfit import api
from memfit.plan.memory.bounds import find_bounds
from memfit.plan.memory.declared import describe_ledger, predict_ledger
from memfit.plan.search.candidates import Space, span
from memfit.plan.search.fitting import find_fitting
from memfit.plan.step_time.read import time_recipes
from memfit.records import from_data, to_data
from memfit.records.recipe import Recipe
from memfit.records.request import Request

OUT = Path(__file__).resolve().parent / "results" / "search.json"
CHECKED = 50  # candidates of each case that are predicted one by one, too
ASKED = "llama-2-70b on 512 h100-sxm"  # of which peers are asked: a deal that they all can be told
PEERS = "llm_analysis", "simumax", "calculon"
CASES: dict[str, dict[str, Any]] = {
    "llama-3.1-405b on 16,384 h100-sxm": {
        "model": "llama-3.1-405b", "hardware": {"device": "h100-sxm", "count": 8, "nodes": 2048},
        "task": {"sequence_length": 8192, "global_batch": 2048},
    },
    "deepseek-v3 on 16,384 h100-sxm": {
        "model": "deepseek-v3", "hardware": {"device": "h100-sxm", "count": 8, "nodes": 2048},
        "task": {"sequence_length": 4096, "global_batch": 15360},
    },
    "llama-2-70b on 512 h100-sxm": {
        "model": "llama-2-70b", "hardware": {"device": "h100-sxm", "count": 8, "nodes": 64},
        "task": {"sequence_length": 4096, "global_batch": 1024},
    },
    "llama-3.1-8b on 8 h100-sxm": {
        "model": "llama-3.1-8b", "hardware": {"device": "h100-sxm", "count": 8},
        "task": {"sequence_length": 8192, "global_batch": 128},
    },
}  # fmt: skip


def weigh(space: Space, recipes: Recipe) -> dict[str, Any]:
    """Bytes of every candidate of a slice: allocated, of the whole device, and whether they fit."""
    peaks = space.framework.measure(space.job(recipes))
    bounds = find_bounds(space.framework, space.device, recipes.parallel, peaks.peak)
    return {
        "allocated": peaks.allocated, "total": bounds.total, "fits": bounds.high <= usable(space),
        "may_fit": bounds.low <= usable(space),
    }  # fmt: skip


def clock(space: Space, recipes: Recipe) -> dict[str, Any]:
    """Seconds of a step of every candidate of a slice."""
    return {"seconds": time_recipes(recipes, space.model, space.device)}


EVALUATE = {"memory": weigh, "time": clock}  # what is asked of each slice of candidates


def lean(case: str, framework: str) -> dict[str, Any]:
    """Those that fit with the least recomputing, without measuring all others."""
    cpu, number = time.process_time(), 0
    space = span(read(case, framework))
    for part in space.parts:
        number += sum(len(r.micro_batch) for r in find_fitting(space, part, usable(space)))
    return {"leanest": number, "leanest_cpu_seconds": round(time.process_time() - cpu, 4)}


def whole(case: str, framework: str) -> dict[str, Any]:
    """The search itself, warm: the plan of the request, and its step."""
    request = read(case, framework)
    api.plan(request, levers=False)
    wall, cpu = time.perf_counter(), time.process_time()
    plan = api.plan(request, levers=False)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "search_seconds": round(wall, 4), "search_cpu_seconds": round(cpu, 4),
        "step_seconds": round(plan.time.step_seconds or 0, 3),
        "chosen": {k: v for k, v in to_data(plan.recipe.parallel).items() if v is not False},
    }  # fmt: skip


def usable(space: Space) -> int:
    if space.device.memory is None:
        raise SystemExit(f"the memory of `{space.device.id}` is unknown")
    return space.device.memory


def read(case: str, framework: str) -> Request:
    return from_data(CASES[case] | {"framework": framework}, Request, source="the bench")


def run(case: str, framework: str) -> dict[str, Any]:
    """One whole search without its choice: candidates, seconds, how many fit."""
    start, cpu = time.perf_counter(), time.process_time()
    space = span(read(case, framework))
    spent: dict[str, float] = {"space": time.perf_counter() - start}
    fit = may = 0
    found: dict[str, Any] = {}
    for part in space.parts:
        for recipes in part.slices():
            for name, evaluate in EVALUATE.items():
                before = time.perf_counter()
                found |= evaluate(space, recipes)
                spent[name] = spent.get(name, 0.0) + time.perf_counter() - before
            fit, may = fit + int(found["fits"].sum()), may + int(found["may_fit"].sum())
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {
        "candidates": space.size, "fit": fit, "may_fit": may,
        "seconds": {name: round(each, 4) for name, each in (spent | {"all": wall}).items()},
        "cpu_seconds": round(cpu, 4), "a_second_of_cpu": round(space.size / cpu),
        "parts": len(space.parts), "rules": {one.rule: one.number for one in space.removed},
    }  # fmt: skip


def check(case: str, framework: str) -> dict[str, int]:
    """How many of a sample of the candidates have the bytes of their own prediction."""
    space, pick = span(read(case, framework)), random.Random(0)
    alike = 0
    for _ in range(CHECKED):
        part = pick.choice(space.parts)
        recipe = part.recipe_of(pick.randrange(part.size))
        ledger = predict_ledger(recipe, space.model, space.device)
        memory = describe_ledger(ledger, recipe, space.device, usable(space))
        one = weigh(space, as_columns(recipe))
        same = one["allocated"][0] == memory.peak_allocated
        alike += bool(same and one["total"][0] == memory.device_total)
    return {"checked": CHECKED, "alike": alike}


def as_columns(recipe: Recipe) -> Recipe:
    """The recipe as a slice of one candidate."""
    import numpy

    from memfit.plan.frameworks.shared.columns import AXES, with_columns

    columns = {name: numpy.array([getattr(recipe.parallel, name)]) for name in AXES}
    for name in ("micro_batch", "accumulation", "recompute_blocks"):
        if name != "recompute_blocks" or recipe.recompute == "full":
            columns[name] = numpy.array([getattr(recipe, name)])
    return with_columns(recipe, columns)


def ask_peers(folder: Path, framework: str, ours: float) -> dict[str, Any]:
    """Milliseconds that a peer takes for a configuration, and over `ours`; or why it has none."""
    import calculators

    space, pick = span(read(ASKED, framework)), random.Random(0)
    asked: list[Any] = []
    while len(asked) < CHECKED:
        part = pick.choice(space.parts)
        recipe = part.recipe_of(pick.randrange(part.size))
        p, layers = recipe.parallel, space.model.architecture.layers
        whole_stages = layers % (p.pp * p.virtual_pp) == 0
        if p.cp == 1 and whole_stages and recipe.recompute_blocks in (0, layers):
            asked.append(SimpleNamespace(recipe=recipe, memory={}))
    found: dict[str, Any] = {}
    for name in PEERS:
        try:
            ask = getattr(calculators, name)(folder)
        except (ImportError, OSError) as error:
            found[name] = f"not run: {type(error).__name__}: {error}"
            continue
        times, reasons = [], collections.Counter[str]()
        for row in asked:
            start = time.process_time()
            try:
                ask(row)
            except calculators.NotExpressible as reason:
                reasons[str(reason).split(":")[0][:60]] += 1
            except Exception as error:  # a peer's own failure is its answer
                reasons[type(error).__name__] += 1
            else:
                times.append(1e3 * (time.process_time() - start))
        found[name] = {"answered": len(times), "not_answered": dict(reasons)}
        if times:
            each = statistics.median(times)
            found[name] |= {"median_ms": round(each, 3), "times_memfit": round(each / ours)}
    return found


def alone(case: str, framework: str) -> dict[str, Any]:
    """The case, cold and warm, and its memory, in this process."""
    cold, warm = run(case, framework), run(case, framework)
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    own = {"cold_seconds": cold["seconds"]["all"], "resident_mib": round(mib)}
    found = warm | own | lean(case, framework) | whole(case, framework)
    return found | check(case, framework)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--framework", default="megatron")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    if asked.case:
        print(json.dumps(alone(asked.case, asked.framework)))
        return
    found: dict[str, Any] = {}
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, "--framework", asked.framework]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[case] = json.loads(done.stdout)
        print(case, json.dumps(found[case], indent=2))
    ours = 1e3 / found[ASKED]["a_second_of_cpu"]
    theirs: Any = "not run: no --peers"
    if asked.peers:
        theirs = ask_peers(asked.peers, asked.framework, ours)
        print(json.dumps(theirs, indent=2))
    result = {
        "memfit": memfit.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),  # others at work beside this bench
        "framework": asked.framework, "evaluated": list(EVALUATE), "cases": found,
        "milliseconds_a_configuration": round(ours, 6), "peers": theirs,
    }  # fmt: skip
    if asked.write:
        OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
