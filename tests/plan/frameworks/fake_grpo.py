"""TRL's `GRPOTrainer` itself, run on CUDA tensors without data: rollouts, scores and updates.

Its own `train()`: transformers' `generate` with a cache that grows by concatenation, the passes
that score tokens, the update; nothing of memfit's step. Every answer reaches its limit. What
depends on a value that a tensor without data lacks is answered here.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import fake_trainer
import torch
from fake_trainer import PRECISIONS
from torch import Tensor

from memfit.catalog import find_device
from memfit.certify.tracing.fake_device import fake_device, set_while
from memfit.certify.tracing.recorder import Recorder
from memfit.certify.tracing.workspace import RULES, Rule
from memfit.records.ledger import Phase

UPDATE = (Phase.FORWARD, Phase.BACKWARD)
MASKS = {
    "_ignore_causal_mask_sdpa", "flash_attention_mask", "_prepare_model_inputs_and_cache",
}  # fmt: skip
TRUE = {"compute_loss", "_compute_loss"}
EXPONENTIALS = Rule(
    "aten.multinomial.default", lambda args, _: (args[0].numel() * args[0].element_size(),),
    "one sample is the largest quotient of a chance and an exponential number",
    "ATen/native/Distributions.cpp: multinomial_out",
)  # fmt: skip


def answer(case: dict[str, Any]) -> Any:
    """`bool(tensor)`: whether rows are as long as each other, and what is no news."""

    def ask(tensor: Tensor) -> bool:
        name = sys._getframe(1).f_code.co_name
        return not case.get("padded") if name in MASKS else name in TRUE

    return ask


def places(case: dict[str, Any]) -> Any:
    """Where a mask is true: at tokens of answers, where it is of whole rows; else everywhere."""
    learned = case["prompt"] + case["completion"] - 1

    def find(mode: Any, mask: Tensor) -> Tensor:
        if mask.dim() != 2 or mask.shape[1] != learned:
            return fake_trainer.every_place(mode, mask)
        with mode:
            count = mask.shape[0] * case["completion"]
            return torch.empty(count, 2, dtype=torch.int64, device=mask.device)

    return find


def as_list(tensor: Tensor) -> Any:
    """As many zeros as the tensor has elements, in rows where it has rows."""
    if tensor.dim() > 1:
        return [as_list(row) for row in tensor]
    return [0] * tensor.numel() if tensor.dim() else 0


@contextmanager
def whole_answers(case: dict[str, Any]) -> Iterator[None]:
    """`generate` ends where the longest answer ends, and no answer ends earlier."""
    from transformers.generation import utils

    most = case["prompt"] + case["completion"]

    def ended(self: Any, unfinished: Tensor, tokens: Tensor, length: int) -> bool:
        return length >= most

    with mock.patch.object(utils.StopCheck, "__call__", ended):
        yield


def run(case: dict[str, Any]) -> dict[str, int]:
    """Bytes alive at the highest instant of each phase of an iteration that is not the first."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    recorder = Recorder("cuda", find_device(fake_trainer.DEVICE))
    dtype, mixed = PRECISIONS[case.get("precision", "bf16")]
    each = case.get("steps_per_generation", case.get("accumulation", 1))
    every = each * case.get("num_iterations", 1)
    told: dict[str, Any] = {
        "per_device_train_batch_size": case["rows"],
        "gradient_accumulation_steps": case.get("accumulation", 1),
        "max_steps": 1 + math.ceil(every / case.get("accumulation", 1)), "bf16": mixed,
        "gradient_checkpointing": bool(case.get("recompute")),
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "report_to": [],
        "save_strategy": "no", "logging_strategy": "no", "logging_nan_inf_filter": False,
        "dataloader_pin_memory": False, "disable_tqdm": True,
        "max_completion_length": case["completion"],
        **{key: case[key] for key in (
            "num_generations", "steps_per_generation", "num_iterations", "beta", "loss_type",
            "temperature", "importance_sampling_level", "top_k", "top_p", "min_p",
            "repetition_penalty", "entropy_coef", "scale_rewards",
            "mask_truncated_completions", "optim", "delta",
        ) if key in case},
    }  # fmt: skip

    def begin(model: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("fused_lm_head"):
            phase = Phase.FORWARD if torch.is_grad_enabled() else scored(model)
        else:
            phase = Phase.PREFILL if kwargs["input_ids"].shape[1] > 1 else Phase.DECODE
        recorder.enter(phase)

    def scored(model: Any) -> Phase:
        second = trainer.ref_model is not None and model is trainer.ref_model
        off = case.get("lora") and not adapters(trainer.model)
        return Phase.REFERENCE if second or off else Phase.SCORE

    def end(model: Any, args: Any, kwargs: Any, out: Any) -> None:
        if kwargs.get("fused_lm_head") and torch.is_grad_enabled():
            recorder.enter(Phase.BACKWARD)

    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.enter_context(fake_trainer.no_gpu())
        import datasets
        from pairs import leave_out_triton  # of bench/

        leave_out_triton()
        rloo = case.get("objective") == "rloo"
        args: Any = (RLOOConfig if rloo else GRPOConfig)(output_dir=folder, **told)
        rows = datasets.Dataset.from_dict({"prompt": ["<eos>"] * 4096})
        mode = stack.enter_context(fake_device(find_device(fake_trainer.DEVICE)))
        mode.rules[torch.ops.aten.nonzero.default] = places(case)
        stack.enter_context(set_while(Tensor, "__bool__", answer(case)))
        stack.enter_context(
            set_while(Tensor, "item", lambda t: 1.0 if t.is_floating_point() else 1)
        )
        stack.enter_context(set_while(Tensor, "tolist", as_list))
        stack.enter_context(fake_trainer.flash_attn())
        stack.enter_context(whole_answers(case))
        stack.enter_context(mock.patch.dict(RULES, {EXPONENTIALS.operator: EXPONENTIALS}))
        stack.enter_context(recorder)
        cached = case | {"model": case["model"] | {"use_cache": True}}
        model = fake_trainer.make_model(cached, dtype)
        made: dict[str, Any] = {"model": model, "args": args, "train_dataset": rows}
        if case.get("lora"):
            from peft import LoraConfig

            made["peft_config"] = LoraConfig(
                r=8,
                target_modules=case["lora"],
                task_type="CAUSAL_LM",
                lora_dropout=case.get("dropout", 0.0),
            )
        second = mock.patch(
            f"trl.trainer.{'rloo' if rloo else 'grpo'}_trainer.create_model_from_path",
            side_effect=lambda *_, **__: fake_trainer.make_model(case, dtype),
        )
        with torch.device("cuda"), second:
            trainer: Any = (RLOOTrainer if rloo else GRPOTrainer)(
                reward_funcs=[lambda prompts, **_: [1.0] * len(prompts)],
                processing_class=fake_trainer.tokenizer(), **made,
            )  # fmt: skip
        trainer._tokenize_prompts = lambda prompts: (
            [[0] * case["prompt"]] * len(prompts), None, {}
        )  # fmt: skip
        recorder.register_model(trainer.model)
        trainer.add_callback(fake_trainer.mark_steps(recorder))
        inner = trainer.model.get_base_model() if case.get("lora") else trainer.model
        for one in (inner, trainer.ref_model):
            if one is not None:
                one.register_forward_pre_hook(begin, with_kwargs=True)
                one.register_forward_hook(end, with_kwargs=True)
        trainer.train()
    found = {phase.value: nbytes for phase, nbytes in recorder.peaks.items()}
    found["update"] = max(found.pop(phase.value) for phase in UPDATE)
    return found


def adapters(model: Any) -> bool:
    """Whether the model's adapters are on."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(not m.disable_adapters for m in model.modules() if isinstance(m, BaseTunerLayer))
