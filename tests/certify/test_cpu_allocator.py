"""An outside witness: the CPU allocator's own records (torch.profiler) of the certified step."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from tiny_steps import CPU, make_batch, make_recipe

from memfit.certify import trace
from memfit.certify.tracing.trace_step import worst_shapes
from memfit.records.recipe import Recipe
from memfit.train.model.weights import fill_weights
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.step import step

KERNELS_OWN = 128  # bytes of temporaries inside CPU kernels, which no dispatcher sees


def record_allocator_peak(recipe: Recipe) -> int:
    """Parameters and buffers, and the highest sum of the allocator's records over two steps."""
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in (*model.parameters(), *model.buffers())
    }
    nobody = SimpleNamespace(register_batch=lambda *_: None)
    shapes = worst_shapes(recipe)
    targets = sum(s.rows * s.tokens for s in shapes)
    gc.collect()
    gc.disable()
    try:
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
            for _ in range(2):
                step(built, (make_batch(recipe, s, 250, nobody) for s in shapes), targets)
    finally:
        gc.enable()
    events = profile.profiler.kineto_results.events()
    memory = [e for e in events if e.name() == "[memory]"]
    records = [(e.start_ns(), i, e.nbytes()) for i, e in enumerate(memory)]
    live = peak = 0
    for _, _, nbytes in sorted(records):
        live += nbytes
        peak = max(peak, live)
    return sum(storages.values()) + peak


@pytest.mark.parametrize(
    ("family", "changes", "inside_kernels"),
    [
        ("llama", {}, 0),
        ("llama", {"precision": "bf16", "base_format": "bf16"}, 0),
        ("qwen3", {"recompute_blocks": 2}, 0),
        ("gpt_neox", {"packing": True}, 0),
        ("gpt2", {"precision": "bf16-mixed"}, KERNELS_OWN),
        ("llama", {"method": "lora"}, KERNELS_OWN),
    ],
)
def test_the_cpu_allocator_records_the_certified_peak(family, changes, inside_kernels) -> None:
    recipe = make_recipe(family, **changes)
    torch.set_num_threads(1)
    assert 0 <= record_allocator_peak(recipe) - trace(recipe, CPU).peak <= inside_kernels
