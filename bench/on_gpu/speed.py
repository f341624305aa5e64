"""Step times of 1B to 8B: memfit's step beside Hugging Face's Trainer and Liger on the same work.

Each trainer runs in a process of its own (contestants.py) and makes a step when it is told to. All
are alive at once and make their steps in turn where the card holds them, so that clocks and heat
fall on all alike; else each beside memfit; else each alone. The row says who ran together.
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
SHARE = 0.92  # of the card that contestants may take together by memfit's own reckoning
THEIR_SHARE = 1.5  # of memfit's bytes, kept free for another's step
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
    "1B full, bf16-mixed, 2 x 2048": ((), _case("llama-3.2-1b", 2, 2048, **FULL)),
    "8B LoRA, 1 x 2048": ((), _case("llama-3.1-8b", 1, 2048, **ADAPTED)),
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
        return [Unit("tiny, fp32, 2 x 64", 240.0, ("accelerate",))]
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
    groups = make_groups(names, plan, place)
    row["groups"] = groups
    told = {"plan": json.loads(_text(plan)), "device": place.device, "steps": WARM + TIMED + 2}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "work.json").write_text(json.dumps(told), encoding="utf-8")
        for group in groups:
            found = race(group, Path(folder), 2 if place.rehearsal else TIMED)
            row["trainers"] = found | row["trainers"]  # memfit's first, of the same work
    if all("failed" in found for found in row["trainers"].values()):
        row["failed"] = "; ".join(f["failed"] for f in row["trainers"].values())[:400]
    return row


def _text(plan: Any) -> str:
    from memfit.records import to_json

    return str(to_json(plan))


def make_groups(names: list[str], plan: Any, place: Place) -> list[list[str]]:
    """Who is alive together: all, or each beside memfit, or each alone, by what the card holds.

    memfit's plan says what its own steps hold; of another's step more is kept free.
    """
    from memfit import api

    most = api.find_device(place.row).most_memory
    total = plan.memory.device_total
    if place.rehearsal or most is None or total is None:
        return [names]
    held = {name: total * (1.0 if name in OURS else THEIR_SHARE) for name in names}
    if sum(held.values()) <= SHARE * most:
        return [names]
    own, others = names[0], names[1:]
    return [
        group
        for name in others
        for group in ([[own, name]] if held[own] + held[name] <= SHARE * most else [[own], [name]])
    ]


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
    own = [answer["wall"] for answer in rounds.get(OURS[0], ())[WARM:]]
    for name, one in alive.items():
        one.end()
        steps = [answer["wall"] for answer in rounds[name][WARM:]]
        found[name] = {
            "seconds": median(steps), "fastest": min(steps), "slowest": max(steps),
            "first": rounds[name][0]["wall"], "peak": rounds[name][-1]["peak"],
            "loss": rounds[name][-1]["loss"], "together": names,
        }  # fmt: skip
        if len(own) == len(steps) and name != OURS[0]:
            found[name]["over_memfit"] = median(b / a for a, b in zip(own, steps, strict=True))
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
