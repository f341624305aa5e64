"""One trainer of the race in speed.py: makes a step whenever its parent says so.

python3 contestants.py NAME FOLDER     # FOLDER has work.json
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import peers
import torch


class Turns(peers.Turns):
    """Steps made when the bench says so, timed until the device has finished them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._cuda = device == "cuda"

    def before(self) -> None:
        super().before()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def after(self, loss: Any) -> None:
        value = float(loss)  # waits for the device
        if self._cuda:
            torch.cuda.synchronize()
        import time

        wall = time.perf_counter() - self.start[0]
        peak = torch.cuda.max_memory_allocated() if self._cuda else 0
        self.answer(wall=wall, loss=None if math.isnan(value) else value, peak=peak)


def memfit(turns: Turns, told: dict[str, Any], *, compiled: bool) -> None:
    """memfit's own step of the planned recipe."""
    from msgspec import convert
    from msgspec.structs import replace

    from memfit import api
    from memfit.families import read_model
    from memfit.records.results import Plan
    from memfit.train.measure.counters import run_step, start_device, synthetic_micro
    from memfit.train.model.weights import fill_weights
    from memfit.train.step.build import Built, build_model, build_optimizer

    plan = convert(told["plan"], Plan)
    if compiled:
        plan = api.plan(api.change(plan.request, {"compile": "blocks"}), levers=False)
    recipe = replace(plan.recipe, weights="random")
    device = start_device(recipe, api.find_device("cpu" if not turns._cuda else recipe.device))
    model = build_model(recipe, device)
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    micro = synthetic_micro(recipe, read_model(recipe.model).architecture.vocab)
    turns.answer(ready=True)
    while True:
        turns.before()
        turns.after(run_step(built, [micro]).loss)


def hf_trainer(turns: Turns, told: dict[str, Any], *, liger: bool) -> None:
    """transformers.Trainer on the same rows, with fused AdamW, all else at its defaults."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    recipe = told["plan"]["recipe"]
    rows, tokens = recipe["micro_batch"], recipe["sequence_length"]

    class Wait(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.before()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.after(math.nan)

    model = hf_model(recipe, told["device"])
    vocab = model.config.vocab_size
    row = {"input_ids": torch.randint(0, vocab, (tokens,), device="cpu")}
    row["labels"] = row["input_ids"]
    arguments = TrainingArguments(
        output_dir=str(Path(sys.argv[2]) / "out"), max_steps=told["steps"] + 50,
        per_device_train_batch_size=rows, optim="adamw_torch_fused", save_strategy="no",
        bf16=recipe["precision"] == "bf16-mixed", use_cpu=told["device"] == "cpu", report_to=[],
        disable_tqdm=True, logging_strategy="no", use_liger_kernel=liger,
        gradient_checkpointing=bool(recipe["recompute_blocks"]),
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=[row] * 2048, callbacks=[Wait()])
    turns.answer(ready=True)
    trainer.train()


def hf_model(recipe: dict[str, Any], device: str) -> Any:
    """The recipe's model with random weights, its base coded and its adapter added as it says."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{"use_cache": False} | dict(recipe["model"]["config"]))
    adapted = recipe["method"] == "lora"
    pure = recipe["precision"] == "bf16" or (adapted and recipe["precision"] != "fp32")
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if pure else torch.float32
        )
    if not adapted:
        return model
    from peft import LoraConfig, get_peft_model

    if recipe.get("base_format") == "nf4":
        code(model)
    lora = recipe["lora"]
    wanted = LoraConfig(
        r=lora["rank"], lora_alpha=lora["alpha"], target_modules=list(lora["targets"]),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    if recipe["recompute_blocks"]:
        model.enable_input_require_grads()
    return get_peft_model(model, wanted)


def code(model: Any) -> None:
    """Replace the blocks' projections by bitsandbytes' nf4 ones, in place."""
    from bitsandbytes.nn import Linear4bit
    from torch import nn

    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                new = Linear4bit(
                    child.in_features, child.out_features, bias=child.bias is not None,
                    compute_dtype=torch.bfloat16, quant_type="nf4", device="cpu",
                )  # fmt: skip
                new.load_state_dict({k: v.cpu() for k, v in child.state_dict().items()})
                setattr(parent, name, new.to(child.weight.device))


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    told = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    turns = Turns(told["device"])
    if name.startswith("memfit"):
        memfit(turns, told, compiled=name.endswith("compiled"))
    else:
        hf_trainer(turns, told, liger=name.endswith("liger"))


if __name__ == "__main__":
    main()
