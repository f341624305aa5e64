"""Peaks of TRL's GRPOTrainer by phase, and memfit's word.

    PYTHON bench/grpo.py [NAME...]      # of an environment that has TRL 1.16, too

The trainer itself, on CUDA tensors without data (tests/plan/frameworks/fake_grpo.py): rollouts by
transformers' `generate`, passes that score tokens, updates. Writes bench/results/grpo.jsonl: a
configuration a line, with the bytes at the highest instant of each phase of an iteration that is
not the first, and what memfit predicts of them; NAME...: only those, and nothing is written.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "grpo.jsonl"
BESIDE = "src", "tests", "tests/plan/frameworks"
sys.path[:0] = [str(HERE), *(str(HERE.parent / at) for at in BESIDE)]
from hf_masks import LORA, MODELS  # noqa: E402

PHASES = {
    "prefill": ("prefill",), "decode": ("decode",), "score": ("score",),
    "reference": ("reference",), "update": ("forward", "loss", "backward", "accumulate"),
    "optimizer_step": ("optimizer_step",),
}  # fmt: skip
PLAIN: dict[str, Any] = {"rows": 8, "num_generations": 4, "prompt": 240, "completion": 16}
WIDE = {"vocab_size": 32768}  # of logits that a decoding step feels
VARIANTS: dict[str, dict[str, Any]] = {
    "full, reference": {"beta": 0.04},
    "lora, mixed, dropout": {
        "lora": True, "dropout": 0.05, "precision": "bf16-mixed", "recompute": True,
    },
    "mixed, padded, recomputed": {
        "precision": "bf16-mixed", "padded": True, "recompute": True, "accumulation": 2,
    },
}  # fmt: skip
OF_LLAMA: dict[str, dict[str, Any]] = {
    "wide vocabulary, one group": WIDE | {"rows": 4, "padded": True},
    "lora, reference": {"beta": 0.04, "lora": True, "recompute": True, "padded": True},
    "heated": WIDE | {"temperature": 0.7},
    "penalised, top-k, top-p": WIDE | {
        "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1,
    },
    "min-p": WIDE | {"min_p": 0.1},
    "mixed, reference": {"beta": 0.04, "precision": "bf16-mixed"},
    "two iterations": {"num_iterations": 2, "padded": True},
    "a rollout of four steps": {"steps_per_generation": 4, "rows": 4, "lora": True},
    "rollouts within a step": {"accumulation": 4, "steps_per_generation": 2, "rows": 4},
    "sequence level, grpo": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "delta": 1.5, "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo, entropy": {"loss_type": "sapo", "entropy_coef": 0.01},
    "long answers": {"rows": 4, "prompt": 176, "completion": 80},
    "eager": {"attn": "eager", "padded": True, "lora": True},
    "rloo, reference": {"objective": "rloo", "beta": 0.05, "lora": True, "padded": True},
    "rloo, two models": {"objective": "rloo", "beta": 0.05, "precision": "bf16-mixed"},
}  # fmt: skip
FAMILIES = (
    "llama", "mistral", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "gpt2", "olmo2",
)  # fmt: skip


def make_case(family: str, told: dict[str, Any]) -> dict[str, Any]:
    """One configuration of a family's model."""
    case = PLAIN | told
    case["model"] = {"model_type": family} | MODELS[family]
    if vocab := case.pop("vocab_size", 0):
        case["model"] |= {"vocab_size": vocab}
    if case.get("lora"):
        case["lora"] = LORA.get(family, ["q_proj", "v_proj"])
    return case


def make_cases() -> dict[str, dict[str, Any]]:
    """All configurations by name."""
    cases = {
        f"{family}: {name}": make_case(family, told)
        for family in FAMILIES
        for name, told in VARIANTS.items()
    }
    return cases | {f"llama: {name}": make_case("llama", told) for name, told in OF_LLAMA.items()}


def ask(case: dict[str, Any]) -> dict[str, Any]:
    """The same as keys of a request."""
    precision, lora = case.get("precision", "bf16"), case.get("lora")
    own: dict[str, Any] = {"method": "full"}
    if lora:
        own = {
            "method": "lora", "base_format": "bf16" if precision == "bf16" else "fp32",
            "lora": {"rank": 8, "targets": lora, "dropout": case.get("dropout", 0.0)},
        }  # fmt: skip
    rows, accumulation = case["rows"], case.get("accumulation", 1)
    options: dict[str, Any] = {"padded": bool(case.get("padded"))}
    options |= {"attn_implementation": case["attn"]} if "attn" in case else {}
    if "steps_per_generation" in case:
        options["steps_per_generation"] = case["steps_per_generation"]
    sampling = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    policy = ("beta", "num_iterations")
    return {
        "framework": "trl", "micro_batch": rows, "precision": precision, "options": options,
        "recompute": "full" if case.get("recompute") else "none",
        "task": {
            "objective": case.get("objective", "grpo"), "global_batch": rows * accumulation,
        },
        "rollout": {
            "num_generations": case["num_generations"], "max_prompt_length": case["prompt"],
            "max_completion_length": case["completion"],
            **{key: case[key] for key in sampling if key in case},
        },
        "policy": {key: case[key] for key in policy if key in case},
        **own,
    }  # fmt: skip


def predict(case: dict[str, Any]) -> dict[str, int]:
    """Bytes at the highest instant of each phase, before an allocator rounds them."""
    from memfit.plan.memory.declared import predict_ledger
    from memfit.plan.request.defaults import read_defaults
    from memfit.plan.request.problem import find_device
    from memfit.records import from_data
    from memfit.records.ledger import Kind, Phase
    from memfit.records.request import Request

    asked = {"model": case["model"], "hardware": {"device": "h100-sxm"}} | ask(case)
    recipe, model, _ = read_defaults(from_data(asked, Request, source="bench"))
    found = predict_ledger(recipe, model, find_device(recipe.device))
    heights = {
        phase: sum(e.nbytes for e in found.at(phase) if e.kind is not Kind.FRAGMENTATION)
        for phase in Phase
    }
    summed = {
        name: max((heights[phase] for phase in Phase if phase.value in parts), default=0)
        for name, parts in PHASES.items()
    }
    return {name: nbytes for name, nbytes in summed.items() if nbytes}


def measure(case: dict[str, Any]) -> dict[str, int]:
    """The same of the trainer itself."""
    import fake_grpo

    return fake_grpo.run(case)


def off_by(row: dict[str, Any]) -> dict[str, float]:
    """Percent of each phase's peak."""
    return {
        phase: 100 * (row["predicted"].get(phase, 0) / nbytes - 1)
        for phase, nbytes in row["measured"].items()
    }


def main() -> None:
    """See the module's docstring."""
    wanted = sys.argv[1:]
    if not wanted:
        OUT.write_text("", encoding="utf-8")
    for name, case in make_cases().items():
        if wanted and not any(word in name for word in wanted):
            continue
        row = {"name": name, "measured": measure(case), "predicted": predict(case)}
        if not wanted:
            with OUT.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
        shown = " ".join(f"{phase} {off:.3f}" for phase, off in off_by(row).items())
        print(f"{name:40} {shown}", flush=True)


if __name__ == "__main__":
    main()
