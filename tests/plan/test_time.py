"""Predicted work against torch's own FLOP counter on the real step."""

import math

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from memfit.adapters import find_adapter
from memfit.families import read_model
from memfit.plan.request.problem import find_device
from memfit.plan.step_time.block import around
from memfit.plan.step_time.predicted_time import (
    count_work,
    describe_time,
    find_setting,
    predict_timeline,
    relative_seconds,
    sum_up,
)
from memfit.records.recipe import Freeze, Lora, Preference
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights
from memfit.train.step.step import Batch, step
from tiny_models import CONFIGS, RECURRENT, make_recipe


def change(recipe, **changes):
    return msgspec.structs.replace(recipe, **changes)


VARIANTS = {
    "full": {},
    "chunked": {"loss": "chunked", "loss_chunk": 16},
    "recompute": {"recompute_blocks": 2},
    "freeze": {"method": "freeze", "freeze": Freeze(last_blocks=1)},
    "lora": {
        "method": "lora",
        "lora": Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj")),
    },
    "dora": {
        "method": "dora",
        "lora": Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj")),
    },
}


# What the two counts are known to differ in, explained to the FLOP.
# - lora: the first block's input needs no gradient, and the prediction counts it all the same:
#   2 FLOP x 64 tokens x (q 32x32, k and v 16x32, two adapters' A of 4x32); so does its key's
#   gradient in attention, 2 FLOP x 2 micro-batches x (2 rows x 4 heads) x 16 x 16 x 8.
# - chunked: torch's counter does not know `addmm_`, with which each chunk after the first adds to
#   the head's gradient: 2 FLOP x 2 micro-batches x 16 tokens x 96 x 32.
ADAPTED = 2 * 64 * (1024 + 2 * 512 + 2 * 128)
PRODUCTS = {"lora": ADAPTED, "dora": ADAPTED, "chunked": 2 * 2 * 16 * 96 * 32}
ATTENTION = dict.fromkeys(("lora", "dora"), 2 * 2 * (2 * 4) * 16 * 16 * 8)


@pytest.mark.parametrize("variant", VARIANTS)
def test_predicted_work_is_what_torch_counts(tiny_recipe, variant):
    recipe = change(tiny_recipe, packing=False, attention="math", **VARIANTS[variant])
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    ids = torch.zeros(recipe.micro_batch, recipe.sequence_length, dtype=torch.int64)
    batches = [Batch(ids, ids) for _ in range(recipe.accumulation)]
    with FlopCounterMode(display=False) as counter:
        step(built, batches, ids.numel() * recipe.accumulation)
    counts = counter.get_flop_counts()["Global"]
    attention = counts.pop(torch.ops.aten.bmm)
    declared = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    work = count_work(sum_up(declared), recipe)
    products = sum(counts.values()) + PRODUCTS.get(variant, 0)
    assert work.hardware - work.attention == pytest.approx(products, rel=1e-12)
    # the math kernel computes both halves of causal attention; the mathematics needs one
    assert 2 * work.attention == pytest.approx(attention + ATTENTION.get(variant, 0), rel=1e-12)


def count_grouped(a, b, *_, **__):
    """FLOP of experts' products (rows, k) x (groups, k, n), and (k, rows) x (rows, n) by group."""
    return 2 * math.prod(a) * b[-1]


# The two narrow projections beside OPT's embeddings, which the prediction does not count: 2 FLOP x
# 32 tokens x 16 x 32, three products each.
OUTSIDE = {"opt": 2 * 3 * 2 * 32 * 16 * 32}
TIMED = [family for family in CONFIGS if family not in RECURRENT]
PAIRS = {
    "objective": "dpo", "preference": Preference(beta=0.1, reference="adapter-off"),
    "method": "lora", "micro_batch": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in TIMED),
        *(
            (family, {"recompute_blocks": 1, "selective_blocks": 2})
            for family in TIMED if family != "gpt_oss"  # whose step refuses it
        ),
        ("llama", PAIRS),
    ],
)  # fmt: skip
def test_predicted_work_of_every_family_is_what_torch_counts(family, changes):
    recipe = make_recipe(family, attention="math", **changes)
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    ids = torch.zeros(recipe.micro_batch, recipe.sequence_length, dtype=torch.int64)
    grouped = {torch.ops.aten._grouped_mm: count_grouped}
    with FlopCounterMode(display=False, custom_mapping=grouped) as counter:
        step(built, [Batch(ids, ids)], ids.numel())
    counts = counter.get_flop_counts()["Global"]
    attention = counts.pop(torch.ops.aten.bmm) + counts.pop(torch.ops.aten.baddbmm, 0)
    work = count_work(sum_up(find_adapter(recipe).adapt(read_model(recipe.model), recipe)), recipe)
    products = sum(counts.values()) - OUTSIDE.get(family, 0)
    # under LoRA the prediction counts the first block's input gradient, which nothing needs
    off = 0.03 if recipe.method == "lora" else 1e-12
    assert work.hardware - work.attention == pytest.approx(products, rel=off)
    assert 2 * work.attention == pytest.approx(attention, rel=2 * off)


@pytest.mark.parametrize("family", RECURRENT)
def test_linear_attention_has_no_time_on_a_device_of_known_speed(family):
    """Its work is not described, so that no seconds may be made of it."""
    recipe = make_recipe(family)
    totals = sum_up(read_model(recipe.model))
    assert predict_timeline(totals, recipe, find_device("h100-sxm")).spans == ()
    llama = make_recipe()
    assert predict_timeline(sum_up(read_model(llama.model)), llama, find_device("h100-sxm")).spans


def test_a_device_of_unknown_speed_has_no_time(tiny_recipe):
    model = sum_up(read_model(tiny_recipe.model))
    device = find_device("cpu")
    timeline = predict_timeline(model, tiny_recipe, device)
    time = describe_time(model, tiny_recipe, device, timeline)
    assert timeline.spans == ()
    assert (time.step_seconds, time.mfu, time.tokens_per_second) == (None, None, None)
    assert "unknown" in time.because
    assert relative_seconds(model, tiny_recipe, device) > 0


def test_more_recompute_is_never_faster(tiny_recipe):
    model, device = sum_up(read_model(tiny_recipe.model)), find_device("h100-sxm")
    recipe = change(tiny_recipe, precision="bf16", base_format="bf16")
    times = [relative_seconds(model, change(recipe, recompute_blocks=n), device) for n in range(4)]
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_mfu_leaves_recompute_out_and_hfu_counts_it(tiny_recipe):
    model, device = sum_up(read_model(tiny_recipe.model)), find_device("h100-sxm")
    recipe = change(tiny_recipe, precision="bf16", base_format="bf16", recompute_blocks=3)
    time = describe_time(model, recipe, device, predict_timeline(model, recipe, device))
    assert 0 < time.mfu < time.hfu < 1


def test_dora_takes_longer_than_lora_by_the_passes_over_the_weights_it_measures(tiny_recipe):
    """What a forward moves to measure rows: 18 bytes an element of a target, no token counted."""
    lora = Lora(rank=4, alpha=8.0, targets=("q_proj",))
    device, seconds, totals = find_device("h100-sxm"), {}, {}
    for method in ("lora", "dora"):
        recipe = change(tiny_recipe, method=method, lora=lora, precision="bf16-mixed")
        totals[method] = sum_up(find_adapter(recipe).adapt(read_model(recipe.model), recipe))
        setting = find_setting(totals[method], recipe, device)
        seconds[method] = around(setting).norms
    assert totals["lora"].measured == (0, 0, 0)
    assert totals["dora"].measured == (32 * 32,) * 3
    assert seconds["lora"] == 0
    assert seconds["dora"] > 18 * 32 * 32 / device.bandwidth
