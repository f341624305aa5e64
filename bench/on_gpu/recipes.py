"""Recipes end to end: planned, certified and measured, by phase and component."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_grid import TINY

from on_gpu.join import join_snapshot
from on_gpu.rows import Place, Row, Unit

Measuring = Callable[[Any, Place], tuple[Any, Any, Row]]
NUMBERS = ("peak_allocated", "peak_reserved", "device_total")
MAX_ENTRIES = 1_000_000  # of the allocator's history, which slows a step and takes host memory
STEPS = 2
BNB, AO = ("bitsandbytes",), ("torchao",)
PAGES = "expandable_segments:True"
COMMON: dict[str, Any] = {"weights": "random", "task.steps": 10, "task.packing": False}
FULL: dict[str, Any] = {"method": "full", "precision": "bf16-mixed"}
LORA: dict[str, Any] = {"method": "lora", "precision": "bf16-mixed", "lora.rank": 16}

REGULARISED: dict[str, Any] = {
    "regularisation.label_smoothing": 0.1, "regularisation.z_loss": 1e-4,
    "regularisation.neftune_alpha": 5.0,
}  # fmt: skip

# name -> model, libraries that it needs, what the request states; the planner decides the rest
CASES: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "1B full, bf16-mixed": ("llama-3.2-1b", (), {
        **FULL, "micro_batch": 4, "task.global_batch": 8, "task.sequence_length": 2048,
        "recompute": "none", "loss": "plain", "optimizer.implementation": "fused",
    }),
    "8B LoRA": ("llama-3.1-8b", (), {
        **LORA, "base_format": "bf16", "micro_batch": 2, "task.global_batch": 4,
        "task.sequence_length": 2048, "recompute": "none", "loss": "plain",
    }),
    "8B LoRA over nf4": ("llama-3.1-8b", BNB, {
        **LORA, "base_format": "nf4", "micro_batch": 2, "task.global_batch": 2,
        "task.sequence_length": 2048, "recompute": "none",
    }),
    "1.5B full, fp32, efficient attention": ("qwen2.5-1.5b", (), {
        "method": "full", "precision": "fp32", "attention": "efficient", "micro_batch": 2,
        "task.global_batch": 2, "task.sequence_length": 2048, "optimizer.implementation": "foreach",
    }),
    "0.6B full, chunked loss, expandable segments": ("qwen3-0.6b", (), {
        **FULL, "loss": "chunked", "loss_chunk": 1024, "micro_batch": 2, "task.global_batch": 4,
        "task.sequence_length": 8192, "recompute": "full", "allocator": PAGES,
    }),
    "7B LoRA over int8": ("mistral-7b-v0.3", BNB, {
        **LORA, "base_format": "int8", "micro_batch": 1, "task.global_batch": 1,
        "task.sequence_length": 4096,
    }),
    "1B full, compiled blocks": ("llama-3.2-1b", (), {
        **FULL, "compile": "blocks", "micro_batch": 4, "task.global_batch": 4,
        "task.sequence_length": 2048,
    }),
    "1.4B frozen but for two blocks": ("pythia-1.4b", (), {
        "method": "freeze", "freeze.last_blocks": 2, "precision": "bf16", "base_format": "bf16",
        "micro_batch": 4, "task.global_batch": 4, "task.sequence_length": 2048,
    }),
    "GPT-2 large full, bf16": ("gpt2-large", (), {
        "method": "full", "precision": "bf16", "micro_batch": 8, "task.global_batch": 16,
        "task.sequence_length": 1024, "recompute": "none", "lean": "none",
    }),
    "8B full, bf16, 8-bit states in backward": ("llama-3.1-8b", BNB, {
        "method": "full", "precision": "bf16", "optimizer.name": "adamw8bit",
        "optimizer.in_backward": True, "optimizer.clip_norm": 0, "micro_batch": 1,
        "task.global_batch": 1, "task.sequence_length": 4096,
    }),
    "1B full, packed, one call for all documents": ("llama-3.2-1b", (), {
        **FULL, "attention": "varlen", "task.packing": True, "micro_batch": 2,
        "task.global_batch": 4, "task.sequence_length": 4096,
    }),
    "0.6B full, smoothed labels, z-loss, noise": ("qwen3-0.6b", (), {
        **FULL, **REGULARISED, "loss": "plain", "micro_batch": 2, "task.global_batch": 4,
        "task.sequence_length": 2048, "optimizer.layer_decay": 0.9,
    }),
    "1B DoRA, a higher rate of one matrix": ("llama-3.2-1b", (), {
        "method": "dora", "precision": "bf16-mixed", "lora.rank": 16, "optimizer.lora_plus": 16,
        "micro_batch": 2, "task.global_batch": 4, "task.sequence_length": 2048,
    }),
    "0.6B full, rounded to int8 in every product": ("qwen3-0.6b", (), {
        **FULL, "qat": "int8", "micro_batch": 2, "task.global_batch": 4,
        "task.sequence_length": 2048,
    }),
    "9B LoRA, three of four layers of linear attention": ("qwen3.5-9b", (), {
        **LORA, "base_format": "bf16", "micro_batch": 1, "task.global_batch": 1,
        "task.sequence_length": 2048,
    }),
    "7B LoRA, 64 experts": ("olmoe-1b-7b", (), {
        **LORA, "base_format": "bf16", "micro_batch": 2, "task.global_batch": 2,
        "task.sequence_length": 2048,
    }),
    "20B LoRA over nf4, experts and windows": ("gpt-oss-20b", BNB, {
        **LORA, "base_format": "nf4", "micro_batch": 1, "task.global_batch": 1,
        "task.sequence_length": 2048,
    }),
}  # fmt: skip
SMALL: dict[str, Any] = {
    "micro_batch": 2, "task.global_batch": 4, "task.sequence_length": 64, "precision": "fp32",
    "loss": "plain", "attention": "flash",
}  # fmt: skip
TWINS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
    "tiny LoRA, recomputed, regularised": (TINY, (), {
        **SMALL, **REGULARISED, "method": "lora", "recompute": "full", "optimizer.lora_plus": 16,
    }),
}  # fmt: skip


def list_units(place: Place) -> list[Unit]:
    cases = TWINS if place.rehearsal else CASES
    return [
        Unit(name, 240.0, needs, changes.get("allocator", ""))
        for name, (_, needs, changes) in cases.items()
    ]


def make_plan(model: Any, changes: Mapping[str, Any], device: str) -> Any:
    """The plan of a case on a device."""
    from memfit import api

    told = dict(COMMON) | dict(changes) | {"hardware.device": device}
    data: dict[str, Any] = {"model": model}
    for key, value in told.items():
        api.put(data, key, value)
    return api.plan(api.read_data(data, source="the case"), levers=False)


def measure(name: str, place: Place) -> Row:
    """One recipe's three numbers from three sources, its phases and its components."""
    model, _, changes = (TWINS if place.rehearsal else CASES)[name]
    plan = make_plan(model, changes, "cpu" if place.rehearsal else place.row)
    return measure_plan(plan, place)


def measure_plan(plan: Any, place: Place, run_here: Measuring | None = None) -> Row:
    """Measure a plan here while its certificate is made beside, where no GPU is seen.

    run_here: gives the run, the allocator's history or None, and what else the row says.
    """
    from memfit import api
    from memfit.core.errors import Error, InvalidRequest
    from memfit.records import to_data

    row: Row = {"recipe_digest": plan.recipe_digest, "predicted": three(plan.memory)}
    row["load_alone"] = True  # `Meter` gives back what the rehearsal before it left
    row["compiled"] = plan.recipe.compile == "blocks"
    with tempfile.TemporaryDirectory() as folder, Certifying(plan, Path(folder)) as certifying:
        snapshot = None
        try:
            run, snapshot, more = (run_here or _measure)(plan, place)
            row |= more
        except InvalidRequest:
            raise  # the unit is skipped
        except (Error, RuntimeError) as error:  # torch.OutOfMemoryError is one
            row["failed"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:300]
            run = None
        proof = certifying.result()
    if isinstance(proof, str):
        row.setdefault("failed", f"certify: {proof}")
    else:
        row["certified"] = three(proof.memory)
        row["certified_phases"] = proof.phases
        row["certified_kinds"] = _kinds(proof.ledger)
    if run is None:
        return row
    row["measured"] = {
        name: None if (m := run.measurements.get(f"memory.{name}")) is None else int(m.value)
        for name in (*NUMBERS, "outside_allocator")
    }
    row["phases"], row["kinds"] = run.phases, _kinds(run.ledger)
    step = run.measurements.get("time.step_seconds")
    row["step_seconds"] = None if step is None else step.value
    row["predicted_step"] = {
        name: getattr(plan.time, name)
        for name in ("step_seconds", "step_seconds_low", "step_seconds_high", "basis")
    }
    if snapshot is not None and not isinstance(proof, str):
        row["joined"] = join_snapshot(snapshot, to_data(proof.at_peak), MAX_ENTRIES)
    if not place.rehearsal and run_here is None:
        try:
            api.append_row(place.out / "corpus.jsonl", plan, run)
        except InvalidRequest as refusal:
            row["corpus"] = refusal.message
    return row


def three(memory: Any) -> dict[str, int | None]:
    return {name: getattr(memory, name) for name in NUMBERS}


def _kinds(ledger: Any) -> dict[str, dict[str, int]]:
    """Bytes by kind at each phase's own peak."""
    return {
        str(phase): {str(kind): n for kind, n in ledger.by_kind(phase).items()}
        for phase in ledger.phases
    }


def _measure(plan: Any, place: Place) -> tuple[Any, Any, Row]:
    """The run, and the allocator's own history of a rehearsal after it where there is one.

    The history makes steps slower, so that the run, whose seconds count, has none.
    """
    from memfit import api

    if place.rehearsal:
        return api.measure(plan.recipe, steps=STEPS), None, {}
    import torch

    run = api.measure(plan.recipe, steps=STEPS)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(
        max_entries=MAX_ENTRIES, context="alloc", stacks="python"
    )
    rehearse(plan.recipe)
    torch.cuda.synchronize()
    snapshot = dict(torch.cuda.memory._snapshot()) | {"held_before": held}
    torch.cuda.memory._record_memory_history(enabled=None)
    return run, snapshot, {}


def rehearse(recipe: Any) -> None:
    """The steps of `memfit measure` that are watched, once more; nothing stays."""
    import torch

    from memfit.families import read_model
    from memfit.train.measure.counters import Meter, synthetic_micro

    meter = Meter(torch.device("cuda", torch.cuda.current_device()), compiled=True)
    meter.rehearse(recipe, [synthetic_micro(recipe, read_model(recipe.model).architecture.vocab)])


class Certifying:
    """`memfit certify` of a plan in a process that sees no GPU, as certificates are made."""

    def __init__(self, plan: Any, folder: Path) -> None:
        from memfit.records import to_json

        (folder / "plan.json").write_text(to_json(plan), encoding="utf-8")
        self._errors = (folder / "errors.txt").open("w+")
        command = [sys.executable, "-W", "ignore", "-m", "memfit", "certify"]
        self._process = subprocess.Popen(
            [*command, str(folder / "plan.json"), "--anyway", "--json", "--quiet"],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.PIPE,
            stderr=self._errors, text=True,
        )  # fmt: skip

    def __enter__(self) -> Certifying:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()

    def result(self) -> Any:
        """The certificate, or why there is none; exit code 3 is one that does not fit."""
        import msgspec

        from memfit.records.results import Certificate

        text, _ = self._process.communicate()
        if self._process.returncode in (0, 3) and text:
            found = msgspec.json.decode(text)  # which has more beside the certificate
            known = {k: v for k, v in found.items() if k in Certificate.__struct_fields__}
            return msgspec.convert(known, Certificate)
        self._errors.seek(0)
        return " ".join(self._errors.read().split())[-300:] or "nothing said"
