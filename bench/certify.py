"""Seconds and memory of certifying, as whole processes with their imports, and torch's own tracker.

    python bench/certify.py [--runs 3] [--no-write]

Every case runs in a process of its own: wall and CPU seconds (user and system, which other work on
the machine disturbs less) and the largest resident set. Beside it, in turns, one step of the same
model on the same fake CUDA device under torch's MemTracker and under memfit's counter, in fresh
processes too; torch's runs on torch's own FakeTensorMode, as its users run it, and on memfit's.
Exits 1 when a limit is missed. Writes bench/results/certify.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import memfit
from memfit import catalog
from memfit.families import family_of
from memfit.records import from_data, to_json
from memfit.records.recipe import Freeze, Lora, Optimizer, Recipe

HERE = Path(__file__).resolve().parent
DEVICE = "h100-sxm"
TOKENS = 2048
LIMITS = {"llama-3.1-8b": (10.0, 1.5e9), "llama-3-70b": (15.0, None)}  # seconds, bytes
RATIO = 5.0  # MemTracker's time of a step over ours
CASES = {
    "llama-3.1-8b": ("full",),
    "llama-3-70b": ("full", "recompute", "lora", "accumulation", "recompute, accumulation"),
}


def make_recipe(model: str, case: str) -> Recipe:
    reference = catalog.find_model(model).reference()
    lora = Lora(rank=16, alpha=16.0, targets=family_of(reference).lora_targets)
    return Recipe(
        model=reference, weights="random", objective="pretrain",
        method="lora" if "lora" in case else "full", lora=lora if "lora" in case else Lora(),
        freeze=Freeze(), base_format="bf16", precision="bf16",
        optimizer=Optimizer(
            name="adamw", implementation="foreach", learning_rate=1e-4, weight_decay=0.01,
            beta1=0.9, beta2=0.999, eps=1e-8, momentum=0.9, schedule="constant", warmup_steps=0,
            clip_norm=1.0,
        ),
        recompute_blocks=reference.config["num_hidden_layers"] if "recompute" in case else 0,
        attention="flash", loss="plain", loss_chunk=0, sequence_length=TOKENS, packing=False,
        micro_batch=1, accumulation=2 if "accumulation" in case else 1, steps=10, device=DEVICE,
        seed=0,
    )  # fmt: skip


def certify_here(recipe: Recipe) -> dict[str, Any]:
    """In the child: a certificate."""
    from memfit.certify.evidence.certificate import make_certificate

    made = make_certificate(recipe, catalog.find_device(DEVICE), None, None)
    return {"peak_allocated": made.memory.peak_allocated}


def step_here(recipe: Recipe, tracker: str) -> dict[str, Any]:
    """In the child: seconds of the second optimizer step, watched by one of the trackers."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from memfit.certify.tracing import fake_device
    from memfit.certify.tracing.recorder import Recorder
    from memfit.train.step.build import Built, build_model, build_optimizer
    from memfit.train.step.step import Batch, step

    device = catalog.find_device(DEVICE)
    build_model(recipe, "meta")
    if tracker == "MemTracker":
        fake_device.FastFakeMode = FakeTensorMode
    torch.set_num_threads(1)
    with fake_device.fake_device(device):
        model = build_model(recipe, "cuda")
        optimizer = build_optimizer(recipe, model)
        watch: Any
        if tracker == "memfit":
            watch = Recorder("cuda", device)
            watch.register_model(model)
            watch.register_optimizer(optimizer)
            enter = watch.enter
        else:
            watch = MemTracker()
            watch.track_external(model, optimizer)

            def enter(_: Any) -> None: ...

        ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="cuda")
        built = Built(recipe, model, optimizer)
        seconds = []
        with watch:
            for _ in range(2):
                start = time.process_time()
                step(built, [Batch(ids, ids)], TOKENS, enter)
                seconds.append(time.process_time() - start)
                if tracker != "memfit":
                    watch.reset_mod_stats()
        if tracker == "memfit":
            peak = watch.peak
        else:
            peaks = watch.get_tracker_snapshot("peak")
            peak = next(kinds["Total"] for d, kinds in peaks.items() if d.type == "cuda")
    return {"step_cpu_seconds": seconds[-1], "peak": peak}


def child(what: str) -> None:
    recipe = from_data(json.loads(sys.stdin.read()), Recipe, source="the bench's recipe")
    answer = certify_here(recipe) if what == "certify" else step_here(recipe, what)
    print("\n" + json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)


def run(what: str, recipe: Recipe) -> dict[str, Any]:
    """A child's answer, its seconds of wall and CPU, and its largest resident set."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", what], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    out, error = process.communicate(to_json(recipe))
    wall = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(error)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer | {"wall": wall, "cpu": cpu, "largest_rss_so_far": after.ru_maxrss * 1024}


def certificates(runs: int) -> list[dict[str, Any]]:
    rows = []
    for model, cases in CASES.items():  # the smaller model first: the largest RSS only grows
        for case in cases:
            found = [run("certify", make_recipe(model, case)) for _ in range(runs)]
            seconds, rss = LIMITS[model]
            row = {
                "model": model, "case": case,
                "wall": round(median(r["wall"] for r in found), 2),
                "cpu": round(median(r["cpu"] for r in found), 2),
                "largest_rss_so_far": max(r["largest_rss_so_far"] for r in found),
                "peak_allocated": found[0]["peak_allocated"], "limit": seconds,
            }  # fmt: skip
            row["met"] = row["wall"] <= seconds and (not rss or row["largest_rss_so_far"] < rss)
            rows.append(row)
            print(
                f"{model:14}{case:26} {row['wall']:6.2f} s wall {row['cpu']:6.2f} s CPU"
                f" {row['largest_rss_so_far'] / 2**20:7.0f} MiB", flush=True,
            )  # fmt: skip
    return rows


def trackers(runs: int) -> dict[str, Any]:
    recipe = make_recipe("llama-3.1-8b", "full")
    seconds: dict[str, list[float]] = {"memfit": [], "MemTracker": [], "MemTracker, fast fakes": []}
    peaks = {}
    for _ in range(runs):
        for tracker, found in seconds.items():
            answer = run(tracker, recipe)
            found.append(answer["step_cpu_seconds"])
            peaks[tracker] = answer["peak"]
    middle = {tracker: round(median(found), 3) for tracker, found in seconds.items()}
    ratios = {t: round(s / middle["memfit"], 1) for t, s in middle.items()}
    for tracker, s in middle.items():
        print(f"{tracker:24}{s:7.3f} s CPU a step {ratios[tracker]:6.1f}x  peak {peaks[tracker]}")
    return {
        "model": "llama-3.1-8b", "step_cpu_seconds": middle, "over_memfit": ratios,
        "peak": peaks, "limit": RATIO, "met": ratios["MemTracker"] >= RATIO,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child)
    load = os.getloadavg()[0]
    rows, steps = certificates(asked.runs), trackers(asked.runs)
    import torch

    result = {
        "runs": asked.runs, "memfit": memfit.__version__, "python": platform.python_version(),
        "torch": torch.__version__, "machine": platform.machine(), "processors": os.cpu_count(),
        "load_before": round(load, 2), "certificates": rows, "trackers": steps,
    }  # fmt: skip
    if asked.write:
        target = HERE / "results" / "certify.json"
        target.write_text(json.dumps(result, indent=2) + "\n")
    if not all(row["met"] for row in rows) or not steps["met"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
