"""`transformers.Trainer` and TRL's `SFTTrainer` themselves, run on CUDA tensors without data.

Their own `train()`: data loader, collator, accelerate, gradient clipping, optimizer; nothing of
memfit's step. What depends on a value that a tensor without data lacks is answered by the case.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from memfit.catalog import find_device
from memfit.certify.tracing.fake_device import fake_device, set_while
from memfit.certify.tracing.recorder import Recorder
from memfit.records.ledger import Phase

SHOW = os.environ.get("SHOW")
DEVICE = "h100-sxm"
PRECISIONS = {  # precision -> dtype of the weights, whether the Trainer is told `bf16`
    "bf16": (torch.bfloat16, False), "bf16-mixed": (torch.float32, True),
    "fp32": (torch.float32, False),
}  # fmt: skip


class Rows(torch.utils.data.Dataset[dict[str, int]]):
    """As many rows as the steps take; their tokens are made by `collate`."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: Any) -> dict[str, int]:
        return {}


def answer(case: dict[str, Any]) -> Any:
    """`bool(tensor)` of what masks depend on: whether rows are full, or hold documents."""
    known = {
        "_ignore_causal_mask_sdpa": not case.get("padded"),
        "flash_attention_mask": not case.get("padded"),
        "find_packed_sequence_indices": not case.get("laid_out"),
        "compute_loss": True,  # whether a batch of TRL has tokens to learn
        "_compute_loss": True,
    }  # fmt: skip

    def ask(tensor: Tensor) -> bool:
        name = sys._getframe(1).f_code.co_name
        if name not in known:
            raise RuntimeError(f"`{name}` asks for a value of {tensor}")
        return known[name]

    return ask


@contextmanager
def no_gpu() -> Iterator[None]:
    """What the libraries ask the driver for."""
    nothing = {"set_device", "empty_cache", "manual_seed"}
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0,
        "get_device_capability": (9, 0), "get_device_properties": mock.Mock(major=9, minor=0),
        "get_device_name": DEVICE,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, value in {**dict.fromkeys(nothing), **answers}.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, value=value: value))
        from transformers import masking_utils

        # which tensors without data would be: masks are made for every case then
        stack.enter_context(mock.patch.object(masking_utils, "is_tracing", return_value=False))
        # it is there already
        stack.enter_context(mock.patch.object(nn.Module, "to", lambda self, *_, **__: self))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def every_place(mode: Any, mask: Tensor) -> Tensor:
    """Where a mask is true, if it is so everywhere: tokens that are learned."""
    with mode:
        return torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device=mask.device)


def attend(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """flash-attn's function of rows as long as each other; its kernels are torch's flash."""
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        out = nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def attend_apart(
    query: Tensor, key: Tensor, value: Tensor, max_seqlen_q: int = 0, **_: Any
) -> Tensor:
    """The same of rows laid end to end: (tokens, heads, size)."""
    return attend(query[None], key[None], value[None])[0]


@contextmanager
def flash_attn() -> Iterator[None]:
    """The package flash-attn where it is not there: what transformers asks of it."""
    from transformers import modeling_flash_attention_utils as utils

    made = attend, attend_apart, None, utils._pad_input, utils._unpad_input
    with mock.patch.object(utils, "_lazy_imports", return_value=made):
        yield


def make_model(case: dict[str, Any], dtype: torch.dtype, device: str = "cuda") -> Any:
    """A model with random weights on a device that may be there or not."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = {"use_cache": False} | case["model"]
    config = AutoConfig.for_model(**kind)
    flash = case.get("attn") == "flash_attention_2"
    if "attn" in case and not flash:
        config._attn_implementation = case["attn"]
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if flash:  # after it has looked for the package
        model.config._attn_implementation = case["attn"]
    return model


def collate(case: dict[str, Any]) -> Any:
    """A batch as collators make it: rows are padded on the right, and a mask says where.

    laid_out: TRL's `padding_free`, of as many documents as rows; pairs: DPOTrainer's.
    """
    rows, tokens = case["rows"], case["tokens"]
    names = ["input_ids", "attention_mask", "completion_mask" if case.get("pairs") else "labels"]

    def make(_: Any) -> dict[str, Any]:
        if not case.get("laid_out"):
            return {name: torch.zeros((rows, tokens), dtype=torch.int64) for name in names}
        whole = 1, rows * tokens
        ids = ("input_ids", "labels", "position_ids")
        ends = torch.zeros(rows + 1, dtype=torch.int32)
        return {
            **{name: torch.zeros(whole, dtype=torch.int64) for name in ids},
            "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
            "max_length_q": tokens, "max_length_k": tokens,
            "seq_idx": torch.zeros(whole, dtype=torch.int32),
        }  # fmt: skip

    return make


def mark_steps(recorder: Recorder) -> Any:
    """A callback that enters an optimizer's step, and lets the record begin after the first."""
    from transformers import TrainerCallback

    class Marks(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            recorder.enter(Phase.OPTIMIZER_STEP)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 1:
                recorder.restart()

    return Marks()


def run(case: dict[str, Any]) -> dict[str, int]:
    """Bytes alive at the highest instant of each phase of a second step."""
    from transformers import Trainer, TrainingArguments

    recorder = Recorder("cuda", find_device(DEVICE))
    dtype, mixed = PRECISIONS[case.get("precision", "bf16")]
    lora, trl = case.get("lora"), case.get("trainer") == "trl"
    pairs = bool(case.get("pairs"))
    told: dict[str, Any] = {
        "per_device_train_batch_size": case["rows"] // 2 if pairs else case["rows"],
        "max_steps": 2, "bf16": mixed,
        "gradient_checkpointing": bool(case.get("recompute")),
        "gradient_checkpointing_kwargs": {"use_reentrant": False}, "report_to": [],
        "save_strategy": "no", "logging_strategy": "no", "logging_nan_inf_filter": False,
        "dataloader_pin_memory": False, "remove_unused_columns": False, "disable_tqdm": True,
    }  # fmt: skip

    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.enter_context(no_gpu())
        if trl:
            import datasets
            from pairs import leave_out_triton  # of bench/
            from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

            leave_out_triton()
            if pairs:
                args: Any = DPOConfig(output_dir=folder, **told)
                words = dict.fromkeys(("prompt", "chosen", "rejected"), ["<eos>"] * 64)
                rows: Any = datasets.Dataset.from_dict(words)
            else:
                told |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
                told |= {"packing": bool(case.get("laid_out"))}
                args = SFTConfig(output_dir=folder, **told)
                rows = datasets.Dataset.from_dict({"input_ids": [[0]] * 64, "labels": [[0]] * 64})
        else:
            args, rows = TrainingArguments(output_dir=folder, **told), Rows()
        mode = stack.enter_context(fake_device(find_device(DEVICE)))
        mode.rules[torch.ops.aten.nonzero.default] = every_place
        stack.enter_context(set_while(Tensor, "__bool__", answer(case)))
        stack.enter_context(
            set_while(Tensor, "item", lambda t: 1.0 if t.is_floating_point() else 1)
        )
        stack.enter_context(flash_attn())
        stack.enter_context(recorder)
        model = make_model(case, dtype)
        if lora:
            from peft import LoraConfig, get_peft_model

            wanted = LoraConfig(r=8, target_modules=lora, task_type="CAUSAL_LM")
            with torch.device("cuda"):
                model = model if pairs else get_peft_model(model, wanted)
        made: dict[str, Any] = {"model": model, "args": args, "train_dataset": rows}
        if pairs and lora:  # so that the reference is the model without its adapter
            made["peft_config"] = wanted
        if trl:
            made["processing_class"] = tokenizer()
        kind = (DPOTrainer if pairs else SFTTrainer) if trl else Trainer
        with torch.device("cuda"):
            trainer: Any = kind(**made)
        recorder.register_model(trainer.model)
        trainer.data_collator = collate(case)  # of which TRL takes its own alone
        trainer.add_callback(mark_steps(recorder))
        trainer.model.register_forward_pre_hook(lambda *_: recorder.enter(Phase.FORWARD))
        trainer.model.register_forward_hook(lambda *_: recorder.enter(Phase.BACKWARD))
        trainer.train()
    return {phase.value: nbytes for phase, nbytes in recorder.peaks.items()}


def tokenizer() -> Any:
    """The smallest that TRL takes."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
