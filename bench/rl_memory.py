"""Bytes of the objectives that sample: predicted, certified and measured, phase by phase.

    python bench/rl_memory.py [--only TEXT]      writes (with --only, updates)
                                                 bench/results/rl_memory.json

Each cell is one objective, one family and LoRA or full training, tiny and in fp32 on this CPU.
Objectives are those that sample, and two variants of GRPO: DAPO (2503.14476) with its rounds of
further prompts, its higher clip and without answers that reach their limit, and GSPO (2507.18071),
whose ratios are of sequences.
Three ledgers are made of it: the plan's, the trainer's own iterations on tensors without data (what
`memfit certify` runs), and the same iterations on real tensors with every storage counted. Every
kind of every phase must be the same number of bytes, but for results of no dimension that a caller
may still hold after an optimizer's step (`SCALARS`). Load and save have no real iteration beside
them. A cell that cannot be trained says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "certify"), str(ROOT / "tests")]

from test_iterations import FAMILIES, ROLLOUT, longest, watch_real  # noqa: E402
from tiny_steps import CONFIGS, CPU, make_recipe  # noqa: E402

from memfit.adapters import find_adapter  # noqa: E402
from memfit.certify.iterations import trace_iterations  # noqa: E402
from memfit.core.errors import InvalidRequest  # noqa: E402
from memfit.families import read_model  # noqa: E402
from memfit.plan.memory.predicted_memory import predict_memory  # noqa: E402
from memfit.records import write_atomically  # noqa: E402
from memfit.records.ledger import Kind, Ledger, Phase  # noqa: E402
from memfit.records.objectives import check_objective  # noqa: E402
from memfit.records.recipe import Recipe  # noqa: E402
from memfit.records.reinforcement import Policy, RewardSettings  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "rl_memory.json"
SCALARS = 16  # bytes
UPDATED = (Phase.OPTIMIZER_STEP, Phase.FIRST_STEP)
SHORT = {"max_completion_length": 10}
OBJECTIVES: dict[str, tuple[Policy, dict[str, Any]]] = {
    "grpo": (Policy(loss_type="grpo", num_iterations=2), {}),
    "dapo": (Policy(epsilon_high=0.28, mask_truncated_completions=True), {"dynamic_sampling": 2}),
    "gspo": (Policy(importance_sampling_level="sequence", num_iterations=2), {}),
    "rloo": (Policy(), {}),
    "online_dpo": (Policy(loss_type="sigmoid", beta=0.1), {"temperature": 0.9}),
    "ppo": (Policy(beta=0.05, num_iterations=2), {"num_generations": 1}),
}
VARIANTS = {"dapo": "grpo", "gspo": "grpo"}  # of which objective
METHODS = ("lora", "full")


def recipe_of(objective: str, family: str, method: str) -> Recipe:
    """Of one cell; with an adapter there is a KL divergence, too."""
    name, config = FAMILIES[family]
    policy, slots = OBJECTIVES[objective]
    if method == "lora" and not policy.beta:
        policy = replace(policy, beta=0.1)
    rollout = replace(ROLLOUT, **SHORT, **slots)
    return make_recipe(
        name, config=CONFIGS[name] | config, accumulation=4,
        objective=VARIANTS.get(objective, objective), method=method,
        sequence_length=rollout.width, rollout=rollout, policy=policy,
        reward=RewardSettings(funcs=("number",)),
    )  # fmt: skip


def kinds_of(ledger: Ledger, phase: Phase) -> dict[Kind, int]:
    """Bytes of each kind in a phase; fragmentation is an allocator's."""
    found = dict(ledger.by_kind(phase))
    found.pop(Kind.FRAGMENTATION, None)
    return found


def compare(recipe: Recipe) -> dict[str, Any]:
    """The three ledgers of a recipe: each phase's bytes, and where they differ."""
    check_objective(recipe)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    predicted = predict_memory(model, recipe, CPU)
    certified = trace_iterations(recipe, CPU).ledger
    real = watch_real(recipe, [longest(recipe.rollout)] * 2)
    measured = real.ledger()
    phases, differ = {}, []
    for phase in certified.phases:
        told = [kinds_of(ledger, phase) for ledger in (predicted, certified, measured)]
        if phase in (Phase.LOAD, Phase.SAVE):  # no iteration is in them
            del told[2]
        sums = phases[str(phase)] = [sum(kinds.values()) for kinds in told]
        near = abs(sums[0] - sums[1]) <= SCALARS if phase in UPDATED else told[0] == told[1]
        if not near or told[1] != told[-1]:
            differ.append(str(phase))
    return {"bytes": phases, "differ": differ}


def main() -> None:
    """All cells, or those whose name holds a text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name holds this text")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    cells = {}
    for objective in OBJECTIVES:
        for family in FAMILIES:
            for method in METHODS:
                name = f"{objective}, {family}, {method}"
                if only not in name:
                    continue
                try:
                    cells[name] = compare(recipe_of(objective, family, method))
                except InvalidRequest as error:
                    cells[name] = {"refused": error.message}
                print(name, json.dumps(cells[name]), flush=True)
    if only:
        cells = json.loads(RESULTS.read_text(encoding="utf-8"))["cells"] | cells
    made = {"torch": version("torch"), "of": ["predicted", "certified", "measured"], "cells": cells}
    write_atomically(RESULTS, (json.dumps(made, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
