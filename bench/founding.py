"""The founding cases, certified: 20B on a card of 24 GB, and full fine-tuning of 7B on one of 80.

    python bench/founding.py [--only NAME ...] [--no-write]

Of each 20B recipe: its plan and certificate, the longest sequence that `memfit solve` finds for it,
and the certificate of the next longer one. `full`: a 7B model trained whole by the book, every
lever that the plan offers, and combinations of them, certified. Writes
bench/results/founding.json, of which scripts/founding_page.py makes docs/founding.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memfit import api, catalog
from memfit.certify.evidence.certificate import make_certificate
from memfit.core.errors import Error
from memfit.plan.questions.solve import GRAIN
from memfit.records import to_data
from memfit.records.results import Memory, Plan

ROOT = Path(__file__).resolve().parent.parent
RECIPES, OUT = ROOT / "recipes", ROOT / "bench" / "results" / "founding.json"
SAMPLED = ("-grpo", "-ppo")  # in names of recipes whose rows are sampled, with two bounds
ROLLOUTS = sorted(
    path.stem for path in RECIPES.glob("*_rtx-*.yaml") if any(name in path.stem for name in SAMPLED)
)
TWENTY = sorted(  # `longest` is of their rows
    path.stem
    for path in RECIPES.glob("gpt-neox-20b_*_rtx-*.yaml")
    if not any(name in path.stem for name in SAMPLED)
)
UNLEVERED, FULL = "llama-2-7b_full-unlevered_h100-sxm", "llama-2-7b_full_h100-sxm"
OPEN: dict[str, Any] = {
    "micro_batch": "auto", "recompute": "auto", "loss": "auto", "lean": "auto", "offload": "none",
}  # fmt: skip
MIXED = {**OPEN, "precision": "bf16-mixed"}
WITHIN = {"task.global_batch": 1, "optimizer.in_backward": True}  # takes the whole batch at once
COMBINED: dict[str, dict[str, Any]] = {
    "fp32, all recomputed, chunked loss, lean blocks": {
        "recompute": "full", "loss": "chunked", "loss_chunk": 1024, "lean": "all",
    },
    "fp32, the same, states on the host": {
        "recompute": "full", "loss": "chunked", "loss_chunk": 1024, "lean": "all",
        "offload": "optimizer",
    },
    "fp32, states on the host, as memfit chooses": {**OPEN, "offload": "optimizer"},
    "bf16-mixed, as memfit chooses": MIXED,
    "bf16-mixed, weights updated in backward": {**MIXED, **WITHIN},
    "bf16-mixed, states on the host": {**MIXED, "offload": "optimizer"},
    "bf16-mixed, 8-bit states": {**MIXED, "optimizer.name": "adamw8bit"},
    "bf16-mixed, 8-bit states, in backward": {**MIXED, **WITHIN, "optimizer.name": "adamw8bit"},
    "bf16-mixed, Adafactor": {
        **MIXED, "optimizer.name": "adafactor", "optimizer.implementation": "auto",
    },
    "bf16 weights, gradients and states": {**OPEN, "precision": "bf16"},
    "bf16, in backward": {**OPEN, **WITHIN, "precision": "bf16"},
    "bf16, 8-bit states, in backward": {
        **OPEN, **WITHIN, "precision": "bf16", "optimizer.name": "adamw8bit",
    },
    "LoRA, rank 16 on q and v": {**MIXED, "method": "lora"},
    "LoRA over nf4": {**MIXED, "method": "lora", "base_format": "nf4"},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cases = [*TWENTY, *ROLLOUTS, "full"]
    parser.add_argument("--only", nargs="+", choices=cases, default=cases)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args()
    for name in asked.only:
        found = weigh(name)
        print(name, json.dumps(found), flush=True)
        if asked.write:
            kept = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
            kept[name] = found
            OUT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def weigh(name: str) -> dict[str, Any]:
    """Figures of one case."""
    if name == "full":
        return weigh_full()
    return weigh_rollouts(name) if name in ROLLOUTS else weigh_twenty(name)


def weigh_rollouts(name: str) -> dict[str, Any]:
    """A recipe of reinforcement learning: certified bytes and predicted seconds by phase."""
    plan = api.plan(api.read(RECIPES / f"{name}.yaml"))
    rollout, time = plan.recipe.rollout, plan.time
    return {
        **prove(plan),
        "answers": plan.recipe.global_batch, "rows": rollout.rows or plan.recipe.global_batch,
        "prompt": rollout.max_prompt_length, "completion": rollout.max_completion_length,
        "seconds": [to_data(phase) for phase in time.phases],
        "step_seconds_range": [time.step_seconds_low, time.step_seconds_high],
        "steps": plan.recipe.steps, "total_seconds": time.total_seconds, "usd": plan.cost.usd,
    }  # fmt: skip


def weigh_twenty(name: str) -> dict[str, Any]:
    """A 20B recipe, the longest sequence that is found for it, and the next longer one."""
    request = api.read(RECIPES / f"{name}.yaml")
    solved = api.solve("sequence_length", api.change(request, {"task.sequence_length": "auto"}))
    longest = solved.value
    assert isinstance(longest, int)
    above: dict[str, Any] = {"sequence_length": longest + GRAIN}
    try:
        above |= prove(api.plan(api.change(request, {"task.sequence_length": longest + GRAIN})))
    except Error as error:
        above["refused"] = error.message
    return {**prove(api.plan(request)), "longest": longest, "above": above}


def weigh_full() -> dict[str, Any]:
    """7B trained whole: by the book, with each lever alone, with several."""
    base = api.plan(api.read(RECIPES / f"{UNLEVERED}.yaml"))
    levers = [
        {
            "changes": row.changes, "peak_allocated": row.peak_allocated,
            "device_total": row.device_total, "relative_time": row.relative_time,
            "fits": row.fits, "because": row.because,
        }
        for row in base.levers
    ]  # fmt: skip
    combined = [
        {"name": name, "changes": changes, **prove(plan)}
        for name, changes, plan in list_combined()
    ]  # fmt: skip
    chosen = prove(api.plan(api.read(RECIPES / f"{FULL}.yaml")))
    return {"unlevered": prove(base), "levers": levers, "combined": combined, "chosen": chosen}


def list_combined() -> Iterator[tuple[str, dict[str, Any], Plan]]:
    """Each combination's name, what it sets beside the unlevered recipe, and its plan."""
    base = api.read(RECIPES / f"{UNLEVERED}.yaml")
    for name, changes in COMBINED.items():
        yield name, changes, api.plan(api.change(base, changes))


def prove(plan: Plan) -> dict[str, Any]:
    """A plan's figures and its certificate's."""
    device = catalog.find_device(plan.recipe.device)
    proof = make_certificate(plan.recipe, device, plan.memory.usable, None)
    later = proof.generation
    return {
        "label": plan.label, "sequence_length": plan.recipe.sequence_length,
        "predicted": plan.memory.peak_allocated, "predicted_verdict": plan.memory.verdict,
        "predicted_total": plan.memory.device_total,
        **tell(proof.memory), "phases": proof.phases,
        "at_peak": {str(k): n for k, n in proof.ledger.by_kind(proof.memory.peak_phase).items()},
        "generation": {} if later is None else tell(later),
        "step_seconds": plan.time.step_seconds,
        "tokens_per_second": plan.time.tokens_per_second,
    }  # fmt: skip


def tell(memory: Memory) -> dict[str, Any]:
    return {
        "verdict": memory.verdict, "peak_phase": str(memory.peak_phase),
        "allocated": memory.peak_allocated, "reserved": memory.peak_reserved,
        "device_total": memory.device_total, "usable": memory.usable,
    }  # fmt: skip


if __name__ == "__main__":
    main()
