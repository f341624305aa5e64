"""Predicted against certified memory over a grid of configurations, on a fake CPU and a fake GPU.

    python bench/predict_grid.py [--only SUBSTRING] [--everywhere] [--resume FILE…] [--jobs N]
        [--part I/N]

The prediction never imports torch's step; the certificate traces it. One JSON line a row, and a
table by technique. All rows are of one commit. `--part` takes every N-th row. `--resume` goes on
with rows of earlier runs (their `.partial`, or their results): a row's trace is kept where all
that traces is unchanged to the byte (what of the package a trace may import, and the libraries'
versions), and is predicted anew.

Exits 1 when a limit of docs/trust.md is missed: median 0.5 %, maximum 2 % of peak allocated,
and 5 % of every component above 16 MiB at every phase's peak. Rows of compiled blocks stand apart:
their certificate runs a block's graph operator by operator, which bounds from above what the
compiler's fused kernels hold meanwhile, and the prediction is of lean blocks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from grid_recipes import DEVICES, Row, grid, techniques

from memfit.adapters import find_adapter
from memfit.allocator.settings import read_settings
from memfit.core.units import MIB, show_gib
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records import write_atomically
from memfit.records.hardware import Device
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
COMPONENT_FLOOR = 16 * MIB
MEDIAN, MAXIMUM, COMPONENT = 0.005, 0.02, 0.05
# Parts of the package that nothing that is traced imports: docs/ARCHITECTURE.md, `plan` and what
# stands below `certify`.
UNTRACED = (
    "accuracy",
    "api",
    "check",
    "cli",
    "export",
    "files",
    "plan",
    "report",
    "screens",
    "ui",
    "workflows",
)
Sizes = dict[str, dict[str, int]]  # bytes by phase and kind; "total" among the kinds
Result = dict[str, Any]
# What a replay of the allocator adds to live tensors (unsplit rests of blocks) belongs to no kind.
BOUNDED = "compile: blocks"
COMPARED = tuple(k for k in Kind if k is not Kind.FRAGMENTATION)


def compare(name: str, recipe: Recipe, device: Device, before: Result | None) -> Result:
    """One row: the prediction beside a certificate made now, or beside an earlier trace."""
    warnings.simplefilter("ignore")
    predicted, seconds = predict(recipe, device)
    own = {"configuration": name, "device": device.id, "digest": recipe.digest}
    own |= {"techniques": techniques(recipe), "family": recipe.model.config["model_type"]}
    own |= {"commit": commit(), "step": step_version()}
    kept = before is not None and all(before[key] == own[key] for key in ("digest", "step"))
    traced = before if before and kept else certify(recipe, device, predicted)
    own |= {key: traced[key] for key in ("certified_peak_phase", "certify_seconds", "traced")}
    return judge(own | {"predict_seconds": round(seconds, 5)}, predicted)


def certify(recipe: Recipe, device: Device, predicted: Ledger) -> Result:
    """What the trainer's own step holds at each phase that a run has."""
    from memfit.allocator.caching import replay
    from memfit.certify import trace
    from memfit.certify.evidence.certificate import peaks_by_phase

    started = time.process_time()
    run = trace(recipe, device)
    phases = run.phases
    if not device.is_cpu:
        settings = read_settings(recipe.allocator, device_memory=device.memory_driver or 0)
        phases = peaks_by_phase(run, replay(run.tape, settings, run.marks))
    traced = {
        str(phase): {"total": nbytes}
        | {
            str(kind): size
            for kind, size in run.ledger.by_kind(phase).items()
            if kind in COMPARED and size > COMPONENT_FLOOR
        }
        for phase, nbytes in phases.items()
        if phase in predicted.phases
    }
    return {
        "certified_peak_phase": str(max(phases, key=lambda phase: phases[phase])),
        "certify_seconds": round(time.process_time() - started, 3),
        "traced": traced,
    }


def judge(row: Result, predicted: Ledger) -> Result:
    """The row with the errors of this prediction against what the row's certificate traced."""
    foretold = {
        phase: {"total": predicted.total(Phase(phase))}
        | {
            kind: predicted.by_kind(Phase(phase)).get(Kind(kind), 0)
            for kind in sizes
            if kind != "total"
        }
        for phase, sizes in row["traced"].items()
    }
    component, worst = "", 0.0
    for phase, kind, error in errors(row["traced"], foretold):
        if kind != "total" and abs(error) > abs(worst):
            component, worst = f"{kind} at {phase}", error
    certified = max(sizes["total"] for sizes in row["traced"].values())
    return row | {
        "foretold": foretold,
        "predicted": predicted.peak,
        "certified": certified,
        "error": predicted.peak / certified - 1,
        "peak_phase": str(predicted.peak_phase),
        "worst_component": component,
        "worst_component_error": worst,
    }


def errors(traced: Sizes, foretold: Sizes) -> list[tuple[str, str, float]]:
    """Phase, component or "total", and the error of the prediction as a share."""
    return [
        (phase, kind, foretold[phase][kind] / size - 1)
        for phase, sizes in traced.items()
        for kind, size in sizes.items()
    ]


def predict(recipe: Recipe, device: Device) -> tuple[Ledger, float]:
    """The prediction of a recipe, and the processor's seconds it took."""
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    started = time.process_time()
    predicted = predict_memory(model, recipe, device)
    return predicted, time.process_time() - started


@cache
def commit() -> str:
    """What is checked out; `-dirty` where the package or its configurations are changed."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "src", "bench/grid_recipes.py", "bench/predict_grid.py")
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


@cache
def step_version() -> str:
    """Names what a trace depends on: every file of the package that a trace may import."""
    source = ROOT / "src" / "memfit"
    seen = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        if path.suffix in (".py", ".toml") and name.parts[0].removesuffix(".py") not in UNTRACED:
            seen.update(f"{name}\n".encode() + path.read_bytes())
    libraries = ("torch", "transformers", "peft", "torchao", "bitsandbytes")
    seen.update(" ".join(f"{name} {version(name)}" for name in libraries).encode())
    return seen.hexdigest()[:16]


def read_rows(path: Path) -> dict[tuple[str, str], Result]:
    """The rows of an earlier run, by configuration and device; an interrupted last line is none."""
    text = path.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return {(row["configuration"], row["device"]): row for row in rows}


def table(rows: list[Result]) -> str:
    """The summary as Markdown: by device, by technique, and every row."""
    lines = [
        "| configuration | device | certified | predicted | error | worst component |",
        "|---|---|--:|--:|--:|---|",
    ]
    for row in sorted(rows, key=lambda r: -abs(r["error"])):
        worst = f"{row['worst_component']} {row['worst_component_error']:+.3%}"
        lines.append(
            f"| {row['configuration']} | {row['device']} | {show_gib(row['certified'])}"
            f" | {show_gib(row['predicted'])} | {row['error']:+.4%} | {worst} |"
        )
    return "\n".join([summary(rows), "", *by_technique(rows), "", *lines, ""])


def by_technique(rows: list[Result]) -> list[str]:
    """Each technique's rows on each device, and how far the predictions are off.

    Rows of compiled blocks are in no line but their own.
    """
    lines = [
        "| technique | CPU | GPU | median of the peak | worst | worst component |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in sorted({name for row in rows for name in row["techniques"]}):
        own = [r for r in rows if name in r["techniques"] and is_bounded(r) == (name == BOUNDED)]
        on = [sum(row["device"] == device for row in own) for device in DEVICES]
        totals = [abs(row["error"]) for row in own]
        component = max(abs(row["worst_component_error"]) for row in own)
        lines.append(
            f"| {name} | {on[0]} | {on[1]} | {statistics.median(totals):.5%} | {max(totals):.4%}"
            f" | {component:.3%} |"
        )
    return lines


def summary(rows: list[Result]) -> str:
    """The figures of the limits, by device."""
    whole = sum("blocks)" not in row["configuration"].partition(",")[0] for row in rows)
    lines = [
        "# Predicted against certified",
        "",
        f"Commit {rows[0]['commit']}; {whole} of {len(rows)} configurations are of models with all"
        " their blocks.",
        "",
    ]
    exact = [row for row in rows if not is_bounded(row)]
    for device in (*DEVICES, "all"):
        chosen = [r for r in exact if device in (r["device"], "all")]
        if not chosen:
            continue
        totals = [abs(r["error"]) for r in chosen]
        component = max(chosen, key=lambda r: abs(r["worst_component_error"]))
        cold = statistics.median(r["predict_seconds"] for r in chosen)
        trace = statistics.median(r["certify_seconds"] for r in chosen)
        lines.append(
            f"- {device}: {len(chosen)} configurations; peak allocated: median"
            f" {statistics.median(totals):.5%}, maximum {max(totals):.4%}; worst component"
            f" {component['worst_component_error']:+.3%} ({component['worst_component']});"
            f" median processor time {cold * 1e3:.1f} ms predicted, {trace:.2f} s certified"
        )
    if bounded := [row["error"] for row in rows if is_bounded(row)]:
        median = statistics.median(bounded)
        lines.append(
            f"- compiled blocks, apart: {len(bounded)} configurations; peak allocated"
            f" {min(bounded):+.2%} to {max(bounded):+.2%} (median {median:+.2%})"
            " against certificates that bound from above what fused kernels hold"
        )
    return "\n".join(lines)


def keeps_limits(rows: list[Result]) -> bool:
    """Whether all are within the limits at the top, which also says what is left out."""
    rows = [row for row in rows if not is_bounded(row)]
    if not rows:
        return True
    totals = [abs(r["error"]) for r in rows]
    component = max(abs(r["worst_component_error"]) for r in rows)
    return statistics.median(totals) <= MEDIAN and max(totals) <= MAXIMUM and component <= COMPONENT


def is_bounded(row: Result) -> bool:
    """Whether its certificate bounds what a step holds, and does not count it."""
    return BOUNDED in row["techniques"]


def claim(rows: list[Result]) -> str:
    """The line of docs/trust.md on these rows; those of compiled blocks stand apart in it."""
    apart = [row["error"] for row in rows if is_bounded(row)]
    rows = [row for row in rows if not is_bounded(row)]
    families = {row["family"] for row in rows}
    used = {name for row in rows for name in row["techniques"]}
    cpu, gpu = ([abs(r["error"]) for r in rows if r["device"] == name] for name in DEVICES)
    component = max(abs(r["worst_component_error"]) for r in rows)
    return (
        f"| predicted peak | certified: {len(rows)} configurations, {len(families)} families,"
        f" {len(used)} techniques and formats | CPU worst {max(cpu):.4%}; H100 median"
        f" {statistics.median(gpu):.4%}, worst {max(gpu):.2%}; every component above 16 MiB within"
        f" {component:.2%}; {len(apart)} more of compiled blocks, whose certificate is a bound:"
        f" {min(apart):+.1%} to {max(apart):+.1%} | `bench/results/predict_grid.md` |"
    )


def say(row: Result) -> None:
    mark = "" if abs(row["error"]) <= MAXIMUM else "  <-- peak"
    mark += "" if abs(row["worst_component_error"]) <= COMPONENT else "  <-- component"
    print(
        f"{row['error']:+.4%}  {row['worst_component_error']:+.3%} {row['worst_component']:28}"
        f" {row['device']:9} {row['configuration']}{mark}",
        flush=True,
    )


def run(
    chosen: list[Row], before: dict[tuple[str, str], Result], jobs: int, partial: Path
) -> tuple[list[Result], list[str]]:
    """Rows, which `partial` holds as they come, and what failed."""
    rows, failed = [], []
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        partial.open("w", encoding="utf-8") as file,
    ):
        tasks = [pool.submit(compare, *row, before.get((row[0], row[2].id))) for row in chosen]
        try:
            for (name, _, device), task in zip(chosen, tasks, strict=True):
                if error := task.exception():
                    failed.append(f"{device.id} {name}: {type(error).__name__}: {error}")
                    print(f"failed: {failed[-1]}", flush=True)
                    continue
                rows.append(task.result())
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                say(rows[-1])
        except BaseException:
            pool.shutdown(cancel_futures=True)  # else hours pass before anyone sees it
            raise
    return rows, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--everywhere", action="store_true", help="every recipe on both devices")
    parser.add_argument(
        "--resume", type=Path, nargs="+", default=[], help="rows whose traces may still be kept"
    )
    parser.add_argument("--part", default="1/1", help="such as 2/3: the second of every three rows")
    parser.add_argument("--jobs", type=int, default=1, help="processes that trace side by side")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/predict_grid")
    arguments = parser.parse_args()
    path = arguments.out.with_suffix(".jsonl")
    before = {key: row for each in arguments.resume for key, row in read_rows(each).items()}
    part, parts = map(int, arguments.part.split("/"))
    every = grid(arguments.everywhere)[part - 1 :: parts]
    chosen = [row for row in every if arguments.only in row[0]]
    rows, failed = run(chosen, before, arguments.jobs, path.with_suffix(".partial"))
    print(summary(rows))
    if failed:
        print("\n".join(["not written, as some rows failed:", *failed]))
        return 1
    path.with_suffix(".partial").replace(path)
    write_atomically(arguments.out.with_suffix(".md"), table(rows).encode())
    return 0 if keeps_limits(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
