"""How long a warm `api.predict` takes, one configuration at a time, and what peers take.

    python bench/predict_speed.py [--peers FOLDER] [--no-write]

Every configuration is asked once and is new: another number of rows and tokens of one of the
recipes below. A recipe is warm after three other shapes of it; those are timed apart (`first` loads
the model's row and simulates, the next simulates for all shapes). `simulated` counts the timed
configurations for which a simulation was needed after all: other operations ran, as with one row.
`cpu` is this process's processor time, which other work on the machine does not lengthen as much.

FOLDER as for bench/calculators.py: each peer is asked, with its own code, for llama-3.1-8b in
Megatron-LM's mixed precision at as many shapes as a recipe of ours, after one call that is not
timed; telling it the sizes counts.
They answer less: DeepSpeed's estimator and EleutherAI's script are sums of a few products;
DeepSpeed's and accelerate's know no activations, llm-analysis no instants. SimuMax simulates and
also times the step. Writes bench/results/predict_speed.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any, NamedTuple

import memfit
from memfit import api
from memfit.plan.simulate import closed_form
from memfit.records import from_data
from memfit.records.request import Request

OUT = Path(__file__).resolve().parent / "results" / "predict_speed.json"
SHAPES = 32  # of each recipe
WARM = 3  # shapes of a recipe before those that are timed
PLAIN = {
    "method": "full", "precision": "bf16-mixed", "recompute": "none", "loss": "plain",
    "optimizer": {"name": "adamw"}, "hardware": {"device": "h100-sxm"},
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b, bf16": {"model": "llama-3.1-8b", "precision": "bf16"},
    "llama-3.1-8b, bf16, packed": {"model": "llama-3.1-8b", "precision": "bf16", "packing": True},
    "llama-3.1-8b, LoRA": {"model": "llama-3.1-8b", "method": "lora", "precision": "bf16"},
    "llama-3.1-8b, half recomputed, chunked loss": {
        "model": "llama-3.1-8b", "recompute": {"blocks": 16}, "loss": "chunked",
        "loss_chunk": 1024,
    },
    "llama-3.1-8b, recomputed, accumulated": {
        "model": "llama-3.1-8b", "recompute": "full", "accumulation": 8
    },
    "qwen2.5-0.5b, fp32, CPU": {
        "model": "qwen2.5-0.5b", "precision": "fp32", "hardware": {"device": "cpu-x86"}
    },
    "gpt2, math, CPU": {
        "model": "gpt2", "precision": "fp32", "attention": "math", "longest": 1024,
        "hardware": {"device": "cpu-x86"},
    },
    "gpt2, 8-bit AdamW": {"model": "gpt2", "longest": 1024, "optimizer": {"name": "adamw8bit"}},
    "gpt-neox-20b, LoRA, recomputed": {
        "model": "gpt-neox-20b", "method": "lora", "recompute": "full", "longest": 2048
    },
    "qwen3-8b, last blocks trained": {
        "model": "qwen3-8b", "method": "freeze", "freeze": {"last_blocks": 4}
    },
}  # fmt: skip


def request(recipe: dict[str, Any], rows: int, tokens: int) -> Request:
    own = {k: v for k, v in recipe.items() if k not in ("packing", "accumulation", "longest")}
    task = {
        "global_batch": rows * recipe.get("accumulation", 1), "sequence_length": tokens,
        "packing": recipe.get("packing", False),
    }  # fmt: skip
    data = PLAIN | own | {"micro_batch": rows, "task": task}
    return from_data(data, Request, source="the bench")


def shapes(recipe: dict[str, Any], pick: random.Random) -> list[tuple[int, int]]:
    """Different ones, tokens of any length."""
    found: dict[tuple[int, int], None] = {}
    while len(found) < WARM + SHAPES:
        found[pick.randint(1, 16), pick.randint(2, recipe.get("longest", 8192))] = None
    return list(found)


class Spent(NamedTuple):
    """Milliseconds of one call: on the clock, and of this process's processor time."""

    wall: float
    cpu: float


def timed(call: Callable[[], object]) -> Spent:
    start, cpu = time.perf_counter(), time.process_time()
    call()
    done = time.process_time()
    return Spent(1e3 * (time.perf_counter() - start), 1e3 * (done - cpu))


def summary(times: list[Spent]) -> dict[str, Any]:
    found: dict[str, Any] = {"configurations": len(times)}
    for name in Spent._fields:
        one = [getattr(t, name) for t in times]
        p90, p99 = (quantiles(one, n=100)[i] for i in (89, 98))
        found[name] = {
            "median_ms": round(median(one), 3), "p90_ms": round(p90, 3), "p99_ms": round(p99, 3),
            "max_ms": round(max(one), 3),
            "at_most_1_ms": round(sum(t <= 1 for t in one) / len(one), 4),
        }  # fmt: skip
    return found


def measure() -> dict[str, Any]:
    """First calls of each recipe in turn, then all other configurations in random order."""
    simulations: list[object] = []
    record = closed_form.record

    def counted(*what: Any) -> Any:
        simulations.append(what)
        return record(*what)

    closed_form.record = counted  # type: ignore[assignment]
    pick = random.Random(0)
    waiting: list[tuple[str, Request]] = []
    cold: dict[str, list[float]] = {}
    for name, recipe in RECIPES.items():
        requests = [request(recipe, *shape) for shape in shapes(recipe, pick)]
        first = [timed(lambda r=r: api.predict(r)) for r in requests[:WARM]]
        cold[name] = [round(t.wall, 1) for t in first]
        waiting += [(name, r) for r in requests[WARM:]]
    pick.shuffle(waiting)
    times: dict[str, list[Spent]] = {name: [] for name in RECIPES}
    before = len(simulations)
    for name, one in waiting:
        times[name].append(timed(lambda one=one: api.predict(one)))
    closed_form.record = record
    everything = [t for row in times.values() for t in row]
    return summary(everything) | {
        "simulated": len(simulations) - before,
        "recipes": {
            name: {"median_ms": round(median(t.wall for t in row), 3),
                   "first_calls_ms": cold[name]}
            for name, row in times.items()
        },
    }  # fmt: skip


def ask_peers(folder: Path) -> dict[str, Any]:
    """Milliseconds a configuration, of peers whose code is there."""
    from calculators import PEERS, NotExpressible

    told = {"model": "llama-3.1-8b", "framework": "megatron", "precision": "bf16-mixed"}
    asked = (request(told, *shape) for shape in shapes(told, random.Random(0)))
    # of a row of the corpus, which peers are asked for, they read the recipe
    rows: Any = [SimpleNamespace(recipe=api.predict(one).recipe, memory={}) for one in asked]
    found: dict[str, Any] = {}
    for peer, prepare in PEERS.items():
        try:
            ask = prepare(folder)
        except (ImportError, OSError, StopIteration) as error:
            found[peer] = f"not run: {type(error).__name__}: {error}"
            continue
        try:
            times = [timed(lambda ask=ask, row=row: ask(row)) for row in rows]
        except NotExpressible as reason:
            found[peer] = f"not expressible: {reason}"
            continue
        found[peer] = summary(times[1:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    ours = measure()
    print(json.dumps(ours, indent=2))
    theirs: Any = ask_peers(asked.peers) if asked.peers else "not run: no --peers"
    print(json.dumps(theirs, indent=2))
    result = {
        "memfit": memfit.__version__, "python": platform.python_version(),
        "machine": platform.machine(), "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),  # others at work beside this bench
        "api.predict": ours, "peers": theirs,
    }  # fmt: skip
    if asked.write:
        OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
