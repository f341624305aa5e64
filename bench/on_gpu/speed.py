"""Step times of 1B to 8B: memfit's step beside Hugging Face's Trainer and Liger on the same work.

Each trainer runs in a process of its own (contestants.py) and makes a step when it is told to. As
many as fit the card are alive at once and make their steps in turn, so that clocks and heat fall
on all alike; where they do not fit together, each runs alone, and the row says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import peers
from gpu_grid import TINY

from on_gpu.paths import ROOT, lacking
from on_gpu.recipes import BNB, FULL, LORA, make_plan
from on_gpu.rows import Place, Row, Unit

WARM, TIMED = 3, 8
SHARE = 0.9  # of the card that contestants may take together by memfit's own reckoning
OURS = ("memfit", "memfit-compiled")
THEIRS = ("hf-trainer", "hf-trainer-liger")
NEEDS = {"hf-trainer": ("accelerate",), "hf-trainer-liger": ("accelerate", "liger-kernel")}
BASE: dict[str, Any] = {"recompute": "none", "loss": "auto", "task.packing": False}


def _case(model: str, rows: int, tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": model, "micro_batch": rows, "task.global_batch": rows,
        "task.sequence_length": tokens, **BASE, **more,
    }  # fmt: skip


ADAPTED = {**LORA, "base_format": "bf16", "lora.targets": ["q_proj", "v_proj"]}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "1B full, bf16-mixed, 4 x 2048": ((), _case("llama-3.2-1b", 4, 2048, **FULL)),
    "8B LoRA, 2 x 2048": ((), _case("llama-3.1-8b", 2, 2048, **ADAPTED)),
    "8B QLoRA, 2 x 2048": (
        BNB, _case("llama-3.1-8b", 2, 2048, **{**ADAPTED, "base_format": "nf4"}),
    ),
    "1B full, bf16, 8 x 2048": (
        (), _case("llama-3.2-1b", 8, 2048, method="full", precision="bf16"),
    ),
    "4B full, bf16, recomputed, 2 x 4096": (
        (), _case("qwen3-4b", 2, 4096, method="full", precision="bf16", recompute="full"),
    ),
    "8B LoRA, recomputed, 4 x 4096": (
        (), _case("llama-3.1-8b", 4, 4096, **{**ADAPTED, "recompute": "full"}),
    ),
}  # fmt: skip
TWIN = _case("", 2, 64, method="full", precision="fp32") | {"model": TINY}


def list_units(place: Place) -> list[Unit]:
    if place.rehearsal:
        return [Unit("tiny, fp32, 2 x 64", 60.0, ("accelerate",))]
    return [Unit(name, 280.0, needs) for name, (needs, _) in CASES.items()]


def measure(name: str, place: Place) -> Row:
    """Seconds of a step of each trainer, and memfit's prediction of its own."""
    case = dict(TWIN if place.rehearsal else CASES[name][1])
    model = case.pop("model")
    plan = make_plan(model, case, "cpu" if place.rehearsal else place.row)
    row: Row = {
        "predicted": {
            k: getattr(plan.time, k)
            for k in ("step_seconds", "step_seconds_low", "step_seconds_high", "mfu", "basis")
        },
        "flops": plan.time.model_flops_per_step,
        "tokens": plan.recipe.micro_batch * plan.recipe.sequence_length,
        "trainers": {},
    }
    names = [n for n in (*OURS, *THEIRS) if not (place.rehearsal and n in (OURS[1], THEIRS[1]))]
    row["left_out"] = {n: f"not installed: {', '.join(m)}" for n in names
                       if (m := lacking(NEEDS.get(n, ())))}  # fmt: skip
    names = [n for n in names if n not in row["left_out"]]
    together = _fit_together(plan, len(names), place)
    row["interleaved"] = together
    told = {"plan": json.loads(_text(plan)), "device": place.device, "steps": WARM + TIMED + 2}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work.json").write_text(json.dumps(told), encoding="utf-8")
        for group in [names] if together else [[n] for n in names]:
            row["trainers"] |= race(group, Path(folder), 2 if place.rehearsal else TIMED)
    if all("failed" in found for found in row["trainers"].values()):
        row["failed"] = "; ".join(f["failed"] for f in row["trainers"].values())[:400]
    return row


def _text(plan: Any) -> str:
    from memfit.nouns import to_json

    return str(to_json(plan))


def _fit_together(plan: Any, count: int, place: Place) -> bool:
    """Whether so many of them fit the card at once; another's step may hold half as much again."""
    from memfit import api

    most = api.find_device(place.row).most_memory
    total = plan.memory.device_total
    if place.rehearsal or most is None or total is None:
        return True
    return bool(1.5 * count * total <= SHARE * most)


def race(names: list[str], folder: Path, timed: int) -> dict[str, Any]:
    """Each trainer's step in turn; one that fails says why and the others go on."""
    found: dict[str, Any] = {}
    alive = {name: Contestant(name, folder) for name in names}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(1 + WARM + timed):
        for name, one in list(alive.items()):
            try:
                answer = one.ask("step") if number else one.read()
            except RuntimeError as reason:
                found[name] = {"failed": str(reason)[:300]}
                alive.pop(name).end()
                continue
            if number:
                rounds[name].append(answer)
    for name, one in alive.items():
        one.end()
        steps = [answer["wall"] for answer in rounds[name][WARM:]]
        found[name] = {
            "seconds": median(steps), "fastest": min(steps), "slowest": max(steps),
            "first": rounds[name][0]["wall"], "peak": rounds[name][-1]["peak"],
            "loss": rounds[name][-1]["loss"],
        }  # fmt: skip
    return found


class Contestant(peers.Worker):
    """A trainer's process, which answers as bench/peers.py's do."""

    def __init__(self, name: str, folder: Path) -> None:
        self.log = (folder / f"{name}.log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(ROOT / "bench/on_gpu/contestants.py"), name,
             str(folder)],
            text=True, stderr=self.log, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
