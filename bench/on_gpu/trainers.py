"""Peaks of Hugging Face's Trainer itself on this device, beside what `framework: hf-trainer` says.

The configurations are those of bench/hf_masks.py, which ran on tensors without data, and larger
ones on which the allocator matters. Which fused attention runs is noted: sdpa chooses it by device.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from typing import Any

import hf_masks

from on_gpu.rows import Place, Row, Unit

LARGE: dict[str, dict[str, Any]] = {  # models of the catalogue, in bf16 but for the first two
    "llama-3.2-1b": {"tokens": 2048, "rows": 4, "precision": "bf16-mixed"},
    "llama-3.2-1b: padded": {
        "tokens": 2048, "rows": 4, "precision": "bf16-mixed", "padded": True,
    },
    "mistral-7b-v0.3: LoRA, windowless": {
        "tokens": 4096, "rows": 1, "lora": ["q_proj", "v_proj"], "recompute": True,
    },
    "mistral-7b-v0.1: windows": {"tokens": 8192, "rows": 1, "lora": ["q_proj", "v_proj"],
                                 "recompute": True},
    "qwen2.5-1.5b: padded, recomputed": {
        "tokens": 4096, "rows": 2, "padded": True, "recompute": True,
    },
    "gemma-2-2b: eager": {"tokens": 2048, "rows": 1, "attn": "eager", "lora": ["q_proj", "v_proj"]},
}  # fmt: skip
SMALL_FIRST = ("llama", "mistral", "qwen3", "gemma3_text", "gpt_oss", "gpt2", "falcon", "mixtral")
TWINS = ("llama: lora, padded, mixed",)


def list_cases(place: Place) -> dict[str, dict[str, Any]]:
    """Names and configurations: large ones first, then hf_masks' own that need no TRL."""
    small = {
        name: case
        for name, case in hf_masks.make_cases().items()
        if "trainer" not in case and case.get("attn") != hf_masks.FLASH and ":" in name
        and isinstance(case["model"], dict) and name.partition(":")[0] in hf_masks.MODELS
    }  # fmt: skip
    if place.rehearsal:
        twins = {name: small[name] for name in TWINS}
        return {name: case | {"tokens": 64, "rows": 2} for name, case in twins.items()}
    first = {name: case for name, case in small.items() if name.partition(":")[0] in SMALL_FIRST}
    return {**{f"large: {name}": case for name, case in LARGE.items()}, **first, **small}


def list_units(place: Place) -> list[Unit]:
    return [Unit(name, 150.0, ("accelerate", "peft")) for name in list_cases(place)]


def measure(name: str, place: Place) -> Row:
    """The highest instant of the steps after the first, predicted and measured."""
    case = dict(list_cases(place)[name])
    if "model" not in case:
        catalogue = name.removeprefix("large: ").partition(":")[0]
        case["model"] = hf_masks.published(catalogue)
    predicted = predict(case, place)
    return predicted | run(case, place)


def predict(case: dict[str, Any], place: Place) -> Row:
    """Bytes at the highest instant, before the allocator rounds them, and their kinds."""
    import hf_step

    from memfit.records.ledger import Kind, Phase

    found = hf_step.ledger(case["model"], "cpu" if place.rehearsal else place.row, **told(case))
    phases = [phase for phase in found.phases if phase is not Phase.LOAD]
    outside = (Kind.FRAGMENTATION, Kind.CONTEXT)
    return {
        "predicted": max(
            sum(e.nbytes for e in found.at(phase) if e.kind not in outside) for phase in phases
        ),
        "predicted_kinds": {str(k): n for k, n in found.by_kind(found.peak_phase).items()},
    }


def told(case: dict[str, Any]) -> dict[str, Any]:
    """The request of a case, as bench/hf_masks.py states it."""
    lora, precision = case.get("lora"), case.get("precision", "bf16")
    own: dict[str, Any] = {"method": "full"}
    if lora:
        base = "bf16" if precision == "bf16" else "fp32"
        own = {"method": "lora", "lora": {"rank": 8, "targets": lora}, "base_format": base}
    options: dict[str, Any] = {"padded": bool(case.get("padded")), "padding_free": False}
    if "attn" in case:
        options["attn_implementation"] = case["attn"]
    task = {"sequence_length": case["tokens"], "global_batch": case["rows"], "packing": False}
    return {
        "task": {**task, "objective": "pretrain"}, "micro_batch": case["rows"],
        "precision": precision, "recompute": "full" if case.get("recompute") else "none",
        "options": options, **own,
    }  # fmt: skip


def run(case: dict[str, Any], place: Place) -> Row:
    """The Trainer's own `train()`; random weights, zeros as tokens, rows padded on the right."""
    from fake_trainer import PRECISIONS, Rows, make_model
    from transformers import Trainer, TrainerCallback, TrainingArguments

    cuda = place.device == "cuda"
    dtype, mixed = PRECISIONS[case.get("precision", "bf16")]

    class Marks(TrainerCallback):  # type: ignore[misc]
        counter: Counted

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 1:
                self.counter.restart()

    marks = Marks()

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(case, dtype, place.device)
        if case.get("lora"):
            from peft import LoraConfig, get_peft_model

            wanted = LoraConfig(r=8, target_modules=case["lora"], task_type="CAUSAL_LM")
            model = get_peft_model(model, wanted)
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=case["rows"], max_steps=3, bf16=mixed,
            gradient_checkpointing=bool(case.get("recompute")), report_to=[], use_cpu=not cuda,
            gradient_checkpointing_kwargs={"use_reentrant": False}, save_strategy="no",
            logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Rows(), data_collator=collate(case),
            callbacks=[marks],
        )  # fmt: skip
        counter = Counted(model, cuda)
        marks.counter = counter
        with counter:
            trainer.train()
    return counter.figures()


def collate(case: dict[str, Any]) -> Any:
    """A batch on the host; padded: the last row ends in padding, and the mask says where."""
    import torch

    shape = case["rows"], case["tokens"]

    def make(_: Any) -> dict[str, Any]:
        with torch.device("cpu"):
            ids, mask = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
        labels = ids.clone()
        if case.get("padded"):
            mask[-1, -case["tokens"] // 4 :] = 0
            labels[mask == 0] = -100
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return make


class Counted:
    """The highest instant of the steps: the allocator's on CUDA, of live tensors elsewhere."""

    _live: Any

    def __init__(self, model: Any, cuda: bool) -> None:
        from on_gpu.attention_calls import AttentionCalls

        self._model, self._cuda, self._live = model, cuda, None
        self._calls = AttentionCalls()
        self.kernels: Counter[str] = self._calls.seen

    def __enter__(self) -> Counted:
        if not self._cuda:
            from memfit.train.measure.live import LiveBytes

            self._live = LiveBytes("cpu")
            self._live.register_model(self._model)
            self._live.__enter__()
        self._calls.__enter__()
        return self

    def restart(self) -> None:
        """The first step is over: states are there, and its peak does not count."""
        import torch

        if self._cuda:
            self._calls.__exit__(None, None, None)  # so that it costs nothing from here on
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def __exit__(self, *reason: object) -> None:
        if not self._cuda:
            self._calls.__exit__(None, None, None)
            assert self._live is not None
            self._live.__exit__(*reason)

    def figures(self) -> Row:
        import torch

        row: Row = {"attention": dict(self.kernels)}
        if self._cuda:
            return row | {
                "measured": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
            }
        assert self._live is not None
        return row | {"measured": max(self._live.peaks.values())}
