"""Iterations that sample their answers: memory and seconds of each phase, beside what was planned.

What is rehearsed, watched and timed is what `memfit train` runs (`train/rl`), over prompts of as
many tokens as they may have; no answer ends before its last token, so that each phase does the work
that the plan counts.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

from gpu_grid import TINY

from on_gpu.recipes import BNB, LORA, make_plan, measure_plan
from on_gpu.rows import Place, Row, Unit

TIMES = 2  # iterations whose seconds count
OF = {"rollout": ("switch", "prefill", "decode"), "score": ("score", "reference"),
      "update": ("update",)}  # fmt: skip
ROLLOUT: dict[str, Any] = {
    "rollout.num_generations": 8, "rollout.max_prompt_length": 256,
    "rollout.max_completion_length": 256,
}  # fmt: skip

# name -> model, libraries that it needs, what the request states; the planner decides the rest
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "1B GRPO, LoRA": ("llama-3.2-1b", (), {
        **ROLLOUT, **LORA, "base_format": "bf16", "task.objective": "grpo", "task.global_batch": 64,
        "policy.beta": 0.04,
    }),
    "0.6B GRPO, full, two updates": ("qwen3-0.6b", (), {
        **ROLLOUT, "method": "full", "precision": "bf16-mixed", "task.objective": "grpo",
        "task.global_batch": 64, "policy.num_iterations": 2, "micro_batch": 16,
        "recompute": "none", "loss": "plain",
    }),
    "8B GRPO, LoRA over nf4": ("llama-3.1-8b", BNB, {
        **ROLLOUT, **LORA, "base_format": "nf4", "task.objective": "grpo", "task.global_batch": 32,
        "rollout.max_completion_length": 128, "limits.tight": True,
    }),
    "1.5B PPO, LoRA": ("qwen2.5-1.5b", (), {
        **ROLLOUT, **LORA, "base_format": "bf16", "task.objective": "ppo", "task.global_batch": 32,
        "rollout.num_generations": 1,
    }),
    "1B online DPO, LoRA": ("llama-3.2-1b", (), {
        **ROLLOUT, **LORA, "base_format": "bf16", "task.objective": "online_dpo",
        "task.global_batch": 32, "rollout.num_generations": 2, "policy.loss_type": "sigmoid",
        "policy.beta": 0.1,
    }),
    "2B RLOO, LoRA, windows": ("gemma-2-2b", (), {
        **ROLLOUT, **LORA, "base_format": "bf16", "task.objective": "rloo",
        "task.global_batch": 32,
    }),
}  # fmt: skip
TWINS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "tiny GRPO, LoRA": (TINY, (), {
        "method": "lora", "precision": "fp32", "task.objective": "grpo", "task.global_batch": 4,
        "rollout.num_generations": 2, "rollout.max_prompt_length": 8,
        "rollout.max_completion_length": 8,
    }),
}  # fmt: skip


def list_units(place: Place) -> list[Unit]:
    cases = TWINS if place.rehearsal else CASES
    return [Unit(name, 240.0, needs) for name, (_, needs, _) in cases.items()]


def measure(name: str, place: Place) -> Row:
    """One recipe's three numbers from three sources, its phases, and their seconds."""
    model, _, changes = (TWINS if place.rehearsal else CASES)[name]
    plan = make_plan(model, changes, "cpu" if place.rehearsal else place.row)
    row = measure_plan(plan, place, run_iterations)
    row["planned_seconds"] = plan_seconds(plan)
    return row


def plan_seconds(plan: Any) -> dict[str, float | None]:
    """What the plan says of each phase; None where it knows no seconds of one of its parts."""
    planned = {row.phase: row.seconds for row in plan.time.phases}
    found: dict[str, float | None] = {}
    for phase, parts in OF.items():
        seconds = [planned[part] for part in parts if part in planned]
        if seconds:
            found[phase] = None if None in seconds else sum(seconds)
    return found


def run_iterations(plan: Any, _: Place) -> tuple[Any, None, Row]:
    """The run of `api.measure` for iterations, no history of the allocator, and their seconds."""
    from memfit import api
    from memfit.train.measure.counters import Measured, Meter, start_device
    from memfit.train.model.weights import fill_weights
    from memfit.train.rl.rehearsal import rehearse
    from memfit.train.run.machine import describe_environment
    from memfit.train.step.build import Built, build_optimizer

    recipe = plan.recipe
    where = start_device(recipe, api.find_device(recipe.device))
    meter = Meter(where)
    model = meter.rehearse_iterations(recipe, rehearse)
    meter.watch_load(model, lambda: fill_weights(model, recipe))
    meter.leave()
    phases = {str(phase): peak for phase, peak in meter.peaks.items()}
    measured = Measured(meter.measurements(), phases, meter.ledger, describe_environment(where))
    seconds = time_iterations(Built(recipe, model, build_optimizer(recipe, model)), TIMES)
    return measured, None, {"phase_seconds": seconds}


def time_iterations(built: Any, times: int) -> dict[str, float]:
    """Median seconds of each phase of as many iterations, after one that makes the optimizer's
    states."""
    from memfit.train.measure.observer import NOBODY
    from memfit.train.rl.learn import iterate
    from memfit.train.rl.rehearsal import make_learning
    from memfit.train.rl.sampling import sample_in_slots

    learning = make_learning(built.recipe, NOBODY, built.recipe.rollout.max_prompt_length)
    sampling = replace(learning.sampling, sample=sample_in_slots)
    learning = replace(learning, sampling=sampling)
    rows = [iterate(built, learning, index).figures for index in range(1 + times)][1:]
    return {
        phase: median(row[f"{phase}_seconds"] for row in rows)
        for phase in OF
        if f"{phase}_seconds" in rows[0]
    }
