"""Smaller cards imitated on this one: what a plan for 24 or 16 GB says fits must run in as much.

torch's share of this card's memory is set to what the smaller card leaves it beside a context. The
kernels are this card's, which may choose others than the small one's would.
"""

from __future__ import annotations

from typing import Any

from gpu_grid import TINY

from on_gpu.paths import ROOT
from on_gpu.recipes import BNB, COMMON, PAGES, SMALL, rehearse, three
from on_gpu.rows import Place, Row, Unit

RECIPES = ROOT / "recipes"
# name -> libraries, the smaller card, and what is planned for it: a file of recipes/ or a request
CASES: dict[str, tuple[tuple[str, ...], str, Any]] = {
    "20B, LoRA over nf4, 24 GB": (BNB, "rtx-4090", "gpt-neox-20b_nf4-lora_rtx-4090"),
    "20B, LoRA over int8, 24 GB": (BNB, "rtx-4090", "gpt-neox-20b_int8-lora_rtx-4090"),
    "8B, LoRA, 24 GB": ((), "rtx-4090", "llama-3.1-8b_lora_rtx-4090"),
    "0.5B, full, 24 GB": ((), "rtx-3090", "qwen2.5-0.5b_full_rtx-3090"),
    "20B, DPO over nf4, 24 GB": (BNB, "rtx-4090", "gpt-neox-20b_nf4-dpo_rtx-4090"),
    "8B, LoRA over nf4, 16 GB": (BNB, "rtx-4080", {
        "model": "llama-3.1-8b", "method": "lora", "base_format": "nf4",
        "task": {"sequence_length": 2048},
    }),
    "0.5B, full, 16 GB": ((), "rtx-4080", {
        "model": "qwen2.5-0.5b", "method": "full", "precision": "bf16-mixed",
        "task": {"sequence_length": 2048},
    }),
    "3B, LoRA, 16 GB": ((), "rtx-4080", {
        "model": "llama-3.2-3b", "method": "lora", "task": {"sequence_length": 2048},
    }),
    "20B, DPO over int8, 24 GB": (BNB, "rtx-4090", "gpt-neox-20b_int8-dpo_rtx-4090"),
}  # fmt: skip


def list_units(place: Place) -> list[Unit]:
    if place.rehearsal:
        return [Unit("tiny, 2 GiB", 240.0)]
    return [Unit(name, 240.0, needs, PAGES) for name, (needs, _, _) in CASES.items()]


def measure(name: str, place: Place) -> Row:
    """Plan for the smaller card, then run what fits it within as much of this one."""
    from msgspec.structs import replace

    from memfit import api

    if place.rehearsal:
        plan = api.plan(_read(TINY, "cpu", SMALL | {"limits.memory": "2 GiB"}), levers=False)
        api.measure(plan.recipe, steps=1)
        return {"verdict": plan.memory.verdict, "ran": True}
    import torch

    from memfit.train.measure.counters import start_device

    _, card, asked = CASES[name]
    if isinstance(asked, str):
        changes = {"weights": "random", "allocator": PAGES}
        request = api.change(api.read(RECIPES / f"{asked}.yaml"), changes)
    else:
        changes = {k: v for k, v in asked.items() if k != "model"} | {"allocator": PAGES}
        request = _read(asked["model"], card, changes)
    plan = api.plan(request, levers=False)
    row: Row = {"card": card, "verdict": plan.memory.verdict, "predicted": three(plan.memory)}
    usable, context = plan.memory.usable, _context(plan)
    if plan.memory.verdict != "fits" or usable is None:
        return row | {"ran": None}
    recipe = replace(plan.recipe, device=place.row, weights="random")
    where = start_device(recipe, api.find_device(place.row))
    torch.cuda.init()
    total = torch.cuda.get_device_properties(where).total_memory
    row |= {"allowed": usable - context, "context": context}
    torch.cuda.set_per_process_memory_fraction((usable - context) / total)
    try:
        rehearse(recipe)
        row["ran"] = True
    except torch.OutOfMemoryError as error:
        row |= {"ran": False, "because": str(error).splitlines()[0][:300]}
    reached = torch.cuda.memory_stats(where)
    row["reserved"] = reached["reserved_bytes.all.peak"]
    return row


def _context(plan: Any) -> int:
    """What the plan reckons the small card's context to take."""
    total, reserved = plan.memory.device_total, plan.memory.peak_reserved
    return 0 if total is None or reserved is None else int(total - reserved)


def _read(model: Any, device: str, changes: dict[str, Any]) -> Any:
    from memfit import api

    data: dict[str, Any] = {"model": model, "hardware": {"device": device}}
    for key, value in {**COMMON, **changes}.items():
        api.put(data, key, value)
    return api.read_data(data, source="the case")
