"""Predicted work against torch's own FLOP counter on the real step."""

import math

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from memfit.adapters import find_adapter
from memfit.core.errors import TimeUnknown
from memfit.families import read_model
from memfit.plan.request.problem import find_device
from memfit.plan.step_time.block import around
from memfit.plan.step_time.counts.linear_attention import multiplied
from memfit.plan.step_time.predicted_time import (
    count_work,
    describe_time,
    find_setting,
    predict_timeline,
    relative_seconds,
    sum_up,
)
from memfit.records.model import CHUNK
from memfit.records.recipe import Freeze, Lora, Preference
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights
from memfit.train.step.step import Batch, step
from tiny_models import CONFIGS, RECURRENT, make_built, make_recipe


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
def test_predicted_work_of_linear_attention_is_what_torch_counts(family):
    """Two chunks a row; block 0 is recomputed, and block 1, of attention, in part.

    The counter knows no triangular solve. Nothing reads the last state, and the first one is no
    product's: four products of a backward, each as large as two of a turn's, are not made.
    """
    recipe = make_recipe(
        family, attention="math", recompute_blocks=1, selective_blocks=1, sequence_length=128
    )
    config = {**recipe.model.config, "max_position_embeddings": 128}
    recipe = change(recipe, model=change(recipe.model, config=config))
    built, ids = make_built(recipe), torch.zeros(2, 128, dtype=torch.int64)
    aten = torch.ops.aten
    with FlopCounterMode(
        display=False, custom_mapping={aten._grouped_mm: count_grouped}
    ) as counter:
        step(built, [Batch(ids, ids)], ids.numel())
    counts = counter.get_flop_counts()["Global"]
    seen = counts.pop(aten.bmm) + counts.pop(aten.baddbmm, 0)
    # of which it pads rows, and forgets groups in the backward
    assert all(counts.pop(op) for op in (aten.convolution, aten.convolution_backward))
    totals = sum_up(read_model(recipe.model))
    work, a = count_work(totals, recipe), totals.architecture
    linear, again = 2, 1  # blocks 0 and 2
    sizes, tokens = a.linear, 2 * 128
    convolved = 2 * sizes.channels * sizes.kernel * tokens * (3 * linear + again)
    products = sum(counts.values()) + convolved
    assert work.hardware - work.attention == pytest.approx(products, rel=1e-12)
    solved = 2 * CHUNK * sizes.value_heads * (sizes.key + sizes.value) * tokens
    turn = 2 * CHUNK * sizes.value_heads * sizes.key * sizes.value * 2
    ours = work.attention - (2 * linear + again) * solved - linear * 4 * turn
    scanned = multiplied(sizes) * tokens * (3 * linear + again)
    both_halves = work.attention - scanned
    assert ours + both_halves == pytest.approx(seen, rel=1e-12)


@pytest.mark.parametrize("family", RECURRENT)
def test_linear_attention_has_seconds_on_a_gpu_in_memfits_own_step_alone(family):
    recipe = make_recipe(family)
    totals, gpu = sum_up(read_model(recipe.model)), find_device("h100-sxm")
    timeline = predict_timeline(totals, recipe, gpu)
    told = describe_time(totals, recipe, gpu, timeline)
    assert "64 operations a block" in told.because or "45 operations a block" in told.because
    assert "with linear attention are on record" in told.range_because
    other = find_device("rtx-4090")
    told = describe_time(totals, recipe, other, predict_timeline(totals, recipe, other))
    assert "on the host that memfit measured" in told.because
    processor = change(find_device("cpu-x86"), flops={"fp32": 1e11}, bandwidth=1e10)
    for device, framework, why in (
        (processor, "memfit", "a processor runs torch's code of linear attention"),
        (gpu, "hf-trainer", "which kernels of linear attention"),
    ):
        with pytest.raises(TimeUnknown, match=why):
            find_setting(totals, change(recipe, framework=framework), device)
        assert predict_timeline(totals, change(recipe, framework=framework), device).spans == ()


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
