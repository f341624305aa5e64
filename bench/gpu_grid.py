"""Predicted and certified against measured memory, on this machine's GPU, recipe by recipe.

    python bench/gpu_grid.py                       the whole grid on the GPU found here
    python bench/gpu_grid.py --list --device NAME  what would run on a device that is not here
    python bench/gpu_grid.py --device cpu --quick  tiny models, the same path without a GPU

For each recipe: predict, certify (both need no GPU), then `memfit measure` in a process of its own
with a time limit. A row goes to bench/results/gpu_grid.jsonl when its recipe is done, and
measured ones to measurements/DEVICE.jsonl; what has a row is not run again, so the command goes on
where it was stopped. At the end bench/results/gpu_grid.md says the errors and names the misses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from memfit import api, families
from memfit.core.errors import Error, InvalidRequest
from memfit.core.units import GIB, show_gib
from memfit.plan.request.model_reference import find_reference
from memfit.records import from_data, to_data, to_json, write_atomically
from memfit.records.hardware import Device
from memfit.records.request import Request
from memfit.records.results import Plan

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "gpu_grid.jsonl"
NUMBERS = ("peak_allocated", "peak_reserved", "device_total")
STEPS = 2  # timed; the rehearsal runs two more before them
MIN_TOKENS = 512
# the largest error that is not a miss, as a share of what was measured
ALLOWED = {"peak_allocated": 0.02, "peak_reserved": 0.05, "device_total": 0.03}
TOTAL_FLOOR = 0.75 * GIB  # of device_total, where 3 % are less

MODELS = (
    ("gpt2-large", 1024), ("pythia-1.4b", 2048), ("llama-3.2-1b", 32768),
    ("mistral-7b-v0.3", 16384), ("qwen2.5-1.5b", 32768), ("qwen3-0.6b", 32768),
    ("llama-3.1-8b", 8192), ("qwen3-4b", 16384),
)  # fmt: skip
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "full", "precision": "bf16"},
    {"method": "lora", "precision": "bf16-mixed", "base_format": "bf16", "lora": {"rank": 16}},
    {"method": "full", "precision": "bf16-mixed"},
    {"method": "freeze", "precision": "bf16", "base_format": "bf16", "freeze": {"last_blocks": 2}},
    {"method": "full", "precision": "fp32"},
    {"method": "lora", "precision": "bf16", "base_format": "bf16", "lora": {"rank": 64}},
)
OPTIMIZERS = (
    ("adamw", "fused"), ("adamw", "foreach"), ("adamw", "loop"), ("sgd", "foreach"),
    ("adamw", "foreach"),
)  # fmt: skip
SHAPES = ((1, 32768), (8, 512), (2, 2048), (1, 8192), (4, 1024), (1, 16384), (2, 4096))
CASES = 9 * len(MODELS)
TINY = {
    "name": "tiny", "model_type": "llama", "hidden_size": 64, "intermediate_size": 176,
    "num_hidden_layers": 4, "vocab_size": 500, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def make_requests(device: Device, *, quick: bool) -> Iterator[Request]:
    """The grid, each request with nothing left on `auto`; the knobs turn at different speeds.

    quick: a seventh of it, and on a CPU a tiny model. A length is halved until the prediction fits
    the device; what never fits is left out.
    """
    for n in range(0, CASES, 7 if quick else 1):
        if (request := make_request(n, device, quick=quick)) is not None:
            yield request


def make_request(n: int, device: Device, *, quick: bool) -> Request | None:
    """The n-th of the grid; None where no length of it fits the device."""
    turn, m = divmod(n, len(MODELS))
    name, longest = MODELS[m]
    rows, tokens = SHAPES[(m + 3 * turn) % len(SHAPES)]
    model: str | dict[str, Any] = name
    if quick and device.is_cpu:
        model, longest, rows = TINY, 128, 2
    tokens, least = min(tokens, longest), min(MIN_TOKENS, longest)
    while tokens >= least:
        request = _make_request(turn, m, device, model, (rows, tokens))
        if api.predict(request).memory.verdict == "fits":
            return request
        tokens //= 2
    return None


def _make_request(
    turn: int, m: int, device: Device, model: str | dict[str, Any], shape: tuple[int, int]
) -> Request:
    """The m-th model's recipe of one turn of the knobs; shape: rows and tokens of each."""
    method = METHODS[(m + turn) % len(METHODS)]
    optimizer, implementation = OPTIMIZERS[(m + 2 * turn) % len(OPTIMIZERS)]
    layers = families.read_model(find_reference(model)).architecture.layers
    chunked = (2 * m + turn) % 3 == 1
    wide = method["precision"] == "fp32" and not device.is_cpu
    expandable = (turn + m // 2) % 2 == 1 and not device.is_cpu
    rows, tokens = shape
    data: dict[str, Any] = {
        "model": model,
        "weights": "random",
        "task": {
            "sequence_length": tokens, "packing": (m + 4 * turn) % 5 == 2, "steps": 10,
            "global_batch": rows * (1 + (m + turn // 2) % 2),
        },
        **method,
        "optimizer": {
            "name": optimizer, "implementation": implementation, "learning_rate": 1e-4,
        },
        "recompute": ("none", {"blocks": layers // 2}, "full")[(m + 2 * turn) % 3],
        "attention": "efficient" if wide else "flash",
        "loss": "chunked" if chunked else "plain",
        "loss_chunk": (256, 1024, 4096)[turn % 3] if chunked else 0,
        "micro_batch": rows,
        "allocator": "expandable_segments:True" if expandable else "",
        "hardware": {"device": "cpu" if device.is_cpu else device.id},
    }  # fmt: skip
    return from_data(data, Request, source="the grid")


def describe(plan: Plan) -> str:
    """One line that names a recipe."""
    r = plan.recipe
    shape = f"{r.micro_batch}x{r.sequence_length}x{r.accumulation}"
    words = [
        r.model.name, r.method, r.precision, shape,
        f"recompute {r.recompute_blocks}", f"{r.optimizer.name} {r.optimizer.implementation}",
        r.loss, *(["packed"] if r.packing else []), *([r.allocator] if r.allocator else []),
    ]  # fmt: skip
    return ", ".join(words)


def run_case(plan: Plan, device: Device, corpus: Path, timeout: float) -> dict[str, Any]:
    """One row: three numbers from three sources, or why one is missing."""
    row: dict[str, Any] = {
        "name": describe(plan),
        "recipe_digest": plan.recipe_digest,
        "device": device.id,
        "predicted": _three(to_data(plan.memory)),
    }
    start = time.perf_counter()
    try:
        certificate = api.certify(plan.recipe, usable=plan.memory.usable)
        row["certified"] = _three(to_data(certificate.memory))
        row["certify_seconds"] = certificate.seconds
    except Error as error:
        row["failed"] = f"certify: {error.message}"
        return row
    done = measure(plan.request, corpus, timeout)
    row["seconds"] = round(time.perf_counter() - start, 1)
    if isinstance(done, str):
        return row | {"failed": f"measure: {done}"}
    if done["recipe_digest"] != plan.recipe_digest:
        return row | {"failed": f"measured recipe {done['recipe_digest']}"}
    return row | {"measured": _three(done["memory"]), "environment": done["environment"]}


def measure(request: Request, corpus: Path, timeout: float) -> dict[str, Any] | str:
    """`memfit measure` in a process of its own: its JSON, or the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "request.json"
        file.write_text(to_json(request))
        command = [
            sys.executable, "-m", "memfit", "measure", str(file), "--steps", str(STEPS),
            "--append", str(corpus), "--json", "--quiet",
        ]  # fmt: skip
        environment = {
            name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name
        }  # the recipe says how the allocator is set
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False,
                env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:.0f} s"
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing said"]
        return f"exit code {done.returncode}: {said[-1] if done.returncode == 1 else said[0]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _three(memory: Mapping[str, Any]) -> dict[str, int | None]:
    return {name: memory[name] for name in NUMBERS}


def errors(row: Mapping[str, Any], source: str) -> dict[str, float]:
    """The signed relative error of each number that both sources know."""
    if "measured" not in row:
        return {}
    pairs = {name: (row[source][name], row["measured"][name]) for name in NUMBERS}
    return {name: a / b - 1 for name, (a, b) in pairs.items() if a is not None and b}


def misses(row: Mapping[str, Any]) -> list[str]:
    """What is wrong with a row: it failed, or a certified number is too far off."""
    if "failed" in row:
        return [row["failed"]]
    found = []
    for name, error in errors(row, "certified").items():
        off = abs(row["certified"][name] - row["measured"][name])
        if abs(error) > ALLOWED[name] and not (name == "device_total" and off <= TOTAL_FLOOR):
            found.append(f"{name} {error:+.2%} ({show_gib(off)})")
    return found


def summarise(rows: list[dict[str, Any]]) -> str:
    """Errors of each number and source, and every miss by name, as Markdown."""
    lines = [
        "# Predicted and certified against measured memory", "",
        "| device | source | number | recipes | median | p95 | max |",
        "|---|---|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for device in sorted({row["device"] for row in rows}):
        mine = [row for row in rows if row["device"] == device]
        for source in ("predicted", "certified"):
            for name in NUMBERS:
                found = [abs(e[name]) for r in mine if name in (e := errors(r, source))]
                if found:
                    p95 = quantiles(found, n=20)[-1] if len(found) > 1 else found[0]
                    lines.append(
                        f"| {device} | {source} | {name} | {len(found)} | {median(found):.3%}"
                        f" | {min(p95, max(found)):.3%} | {max(found):.3%} |"
                    )
    missed = [(row, words) for row in rows if (words := misses(row))]
    lines += ["", f"{len(rows)} recipes, {len(missed)} misses.", ""]
    lines += [f"- {row['device']}: {row['name']}: {'; '.join(words)}" for row, words in missed]
    return "\n".join(lines).rstrip() + "\n"


def find_gpu(name: str) -> Device:
    """The device to run on; InvalidRequest when this machine has no GPU."""
    device = api.find_device(name)
    if name == "auto" and device.is_cpu:
        raise InvalidRequest(
            "no GPU here: `nvidia-smi` names none",
            hint="run it on a machine with one; `--device cpu --quick` shows that it works, and"
            " `--list --device NAME` what it would run",
        )
    return device


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="catalogue name; auto: the GPU found here")
    parser.add_argument("--quick", action="store_true", help="a seventh of the grid")
    parser.add_argument("--list", action="store_true", help="name the recipes and stop")
    parser.add_argument("--most", type=int, default=CASES, help="recipes to look at")
    parser.add_argument("--again", action="store_true", help="run those that failed once more")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one measurement")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no more after")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--corpus", type=Path, help="default: measurements/DEVICE.jsonl")
    asked = parser.parse_args(arguments)
    try:
        device = find_gpu(asked.device)
        if device.is_cpu and not asked.quick:
            raise InvalidRequest(
                f"the grid's models are for a GPU, and `{device.id}` is none", hint="add --quick"
            )
        requests = islice(make_requests(device, quick=asked.quick), asked.most)
        plans = [api.predict(request) for request in requests]
        if asked.list:
            print("\n".join(describe(plan) for plan in plans))
            print(f"{len(plans)} recipes of {CASES} fit {device.id} as predicted")
            return 0
        return _run(plans, device, asked)
    except Error as error:
        print(error, file=sys.stderr)
        return type(error).exit_code


def _run(plans: list[Plan], device: Device, asked: argparse.Namespace) -> int:
    corpus = asked.corpus or ROOT / "measurements" / f"{device.id}.jsonl"
    stop = time.monotonic() + 60 * asked.minutes
    rows = _read(asked.out)
    for number, plan in enumerate(plans, 1):
        key = (plan.recipe_digest, device.id)
        if key in rows and not (asked.again and "failed" in rows[key]):
            continue
        if time.monotonic() > stop:
            print(f"stopped after {asked.minutes:g} minutes; the same command goes on", flush=True)
            break
        rows[key] = row = run_case(plan, device, corpus, asked.timeout)
        _write(asked.out, rows)
        said = "; ".join(misses(row)) or "  ".join(
            f"{name} {error:+.3%}" for name, error in errors(row, "certified").items()
        )
        print(f"{number}/{len(plans)}  {row['name']}: {said}", flush=True)
    table = summarise(list(rows.values()))
    write_atomically(asked.out.with_suffix(".md"), table.encode())
    print(table)
    return 0 if not any(misses(row) for row in rows.values()) else 1


def _read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {(row["recipe_digest"], row["device"]): row for row in found}


def _write(path: Path, rows: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(row, sort_keys=True) + "\n" for row in rows.values())
    write_atomically(path, "".join(lines).encode())


if __name__ == "__main__":
    sys.exit(main())
