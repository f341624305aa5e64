"""Seconds of reinforcement learning's phases on this CPU, as planned and as a run's log has them.

    OMP_NUM_THREADS=1 python bench/rollout_seconds.py [--write]

`rows` is what Python takes for each row of a decoding step and for each answer, with the model left
out: constants of plan/step_time/rollouts/decoding.py. The rest is a sanity check, not a proof: tiny
models on one machine. The processor's speed is measured as a run's start measures it, and
iterations are those of `memfit train` (`train/rl/learn.py`, whose figures the log has), every
length at its bound. One thread, and its own seconds: what else the machine does is not counted.
Rollout is switch, prefill and decode; score has the reference's pass. Each line: predicted, the
median measured, and measured over predicted. Writes bench/results/rollout_seconds.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from on_gpu.rollouts import plan_seconds, time_iterations
from transformers import LlamaConfig, LlamaForCausalLM

from memfit.plan.request.problem import find_device, read_problem
from memfit.plan.search.search import search
from memfit.records import from_data
from memfit.records.hardware import Device
from memfit.records.request import Request
from memfit.train.generation.calls import Caller
from memfit.train.generation.loop import generate_batch
from memfit.train.generation.settings import Settings
from memfit.train.run.machine import measure_machine
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights

RESULTS = Path(__file__).resolve().parent / "results" / "rollout_seconds.json"
TIMES = 3


def model(hidden: int, layers: int) -> dict[str, Any]:
    """A Llama over bytes."""
    return {
        "name": f"llama-{hidden}x{layers}", "model_type": "llama", "vocab_size": 257,
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "whole, 8 rows": {"model": model(256, 4), "method": "full", "batch": 8},
    "whole, 32 rows": {"model": model(256, 4), "method": "full", "batch": 32},
    "whole, wide": {"model": model(768, 4), "method": "full", "batch": 8},
    "adapters and a reference": {
        "model": model(256, 4), "method": "lora", "batch": 32, "policy": {"beta": 0.05},
    },
}  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with patch.object(time, "perf_counter", time.process_time):
        each = weigh_rows()
        print("rows", json.dumps(each), flush=True)
        device = measure_machine(find_device("cpu"))
        found = {}
        for name in asked.only:
            found[name] = weigh(CASES[name], device)
            print(name, json.dumps(found[name]), flush=True)
    if asked.write:
        about = {"machine": platform.machine(), "torch": torch.__version__, "rows": each,
                 "iterations": TIMES, "cases": found}  # fmt: skip
        RESULTS.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def weigh_rows() -> dict[str, float]:
    """Microseconds of a row and step, and of an answer, beside the model."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    bare = LlamaForCausalLM(config).eval()
    rows, few, many = 512, 12, 52
    logits = torch.zeros(rows, 4)

    def run(tokens: int) -> float:
        settings = Settings(
            max_new_tokens=tokens, rows=rows, answers=8, temperature=1.0, max_prompt=4, reach=8
        )
        start = time.perf_counter()
        generate_batch(bare, [[1, 2, 3]] * (rows // 8), settings)
        return time.perf_counter() - start

    def prefill(_: Caller, slots: Any, prompts: list[Any], now: Any) -> torch.Tensor:
        return logits[: len(prompts)]

    with (
        patch.object(Caller, "decode", lambda *_: logits),
        patch.object(Caller, "prefill", prefill),
    ):
        run(few)
        short, long = (min(run(tokens) for _ in range(5)) for tokens in (few, many))
    each = (long - short) / (many - few)
    return {
        "row_us": round(1e6 * each / rows, 2),
        "answer_us": round(1e6 * (short - few * each) / rows, 2),
    }


def weigh(case: dict[str, Any], device: Device) -> dict[str, dict[str, float]]:
    """Each phase as planned, and as iterations took."""
    request = from_data(
        {
            "model": case["model"], "weights": "random", "method": case["method"],
            "precision": "fp32", "reward": {"funcs": ["number"]},
            "policy": case.get("policy", {}), "hardware": {"device": "cpu"},
            "rollout": {"num_generations": 4, "max_prompt_length": 40,
                        "max_completion_length": 64},
            "task": {"objective": "grpo", "steps": TIMES, "global_batch": case["batch"]},
        },
        Request, source="this benchmark",
    )  # fmt: skip
    plan = search(read_problem(request, device=device), levers=False)
    built = build_model(plan.recipe, "cpu")
    fill_weights(built, plan.recipe)
    measured = time_iterations(
        Built(plan.recipe, built, build_optimizer(plan.recipe, built)), TIMES
    )
    return {
        phase: compare(planned, measured[phase])
        for phase, planned in plan_seconds(plan).items()
        if planned is not None
    }


def compare(predicted: float, measured: float) -> dict[str, float]:
    """Both, and measured over predicted."""
    return {
        "predicted": round(predicted, 4), "measured": round(measured, 4),
        "ratio": round(measured / predicted, 3),
    }  # fmt: skip


if __name__ == "__main__":
    main()
