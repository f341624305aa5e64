"""Adapters in the clock: how many projections have one, against torch's count of operations."""

import pytest
from counted import count_of_block
from msgspec.structs import replace

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.adapters.shared.projections import all_linear
from memfit.families import families, family_of, read_model
from memfit.families.capabilities.lean import LEAN, find_lean
from memfit.families.capabilities.limits import own_kernels
from memfit.plan.request.problem import find_device
from memfit.plan.step_time.adapters import FROZEN, PROJECTIONS, WHOLE
from memfit.plan.step_time.predicted_time import (
    describe_time,
    find_setting,
    predict_timeline,
    sum_up,
)
from memfit.plan.step_time.read import read_setting
from memfit.plan.step_time.step import predict_step
from memfit.records.recipe import Freeze, Lora

QUERY_VALUE = ("q_proj", "v_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_operations_of_a_block_are_torchs_count(tiny_recipe):
    half = replace(
        tiny_recipe, precision="bf16-mixed", base_format="bf16", lean=LEAN, packing=False,
        sequence_length=8,
    )  # fmt: skip
    whole = count_of_block(half)
    few, many = (
        count_of_block(replace(half, method="lora", lora=Lora(rank=4, alpha=8.0, targets=targets)))
        for targets in (QUERY_VALUE, ALL)
    )
    each = (many - few) / (len(ALL) - len(QUERY_VALUE))
    assert whole == pytest.approx(WHOLE, rel=0.05)  # other builds of torch differ by a few
    assert few - each * len(QUERY_VALUE) == pytest.approx(FROZEN, rel=0.05)
    assert few < whole < many  # so that few adapters are not slower, and many can be


def make(recipe, name, device, method, rows, tokens, targets=None):
    """A recipe of memfit's own step: whole training, or adapters, of one and the same shape."""
    reference = catalog.find_model(name).reference()
    architecture = read_model(reference).architecture
    only = own_kernels(architecture)
    beside = targets or family_of(reference).default_targets(architecture)
    return replace(
        recipe, model=reference, device=device, method=method, packing=False, micro_batch=rows,
        lora=Lora(rank=16, alpha=32.0, targets=beside) if method == "lora" else Lora(),
        sequence_length=min(tokens, architecture.max_sequence), base_format="bf16",
        precision="bf16-mixed", attention=only[0] if only else "flash",
        lean=find_lean(architecture),
    )  # fmt: skip


def sums(recipe):
    return sum_up(find_adapter(recipe).adapt(read_model(recipe.model), recipe))


def seconds(recipe):
    return predict_step(find_setting(sums(recipe), recipe, find_device(recipe.device))).total


@pytest.mark.parametrize(("device", "share"), [
    ("rtx-4090", 1), ("mi300x", 5),  # one model in so many
    *(
        pytest.param(name, 1, marks=pytest.mark.wide)
        for name in ("mi300x", "h100-sxm", "b200", "a100-sxm-80gb")
    ),
])  # fmt: skip
def test_adapters_are_never_slower_than_whole_training_of_the_same_shape(
    tiny_recipe, device, share
):
    slower = []
    for model in catalog.models()[::share]:
        if model.model_type not in families:
            continue
        for rows, tokens in ((1, 512), (8, 2048)):
            shape = model.id, device
            whole = seconds(make(tiny_recipe, *shape, "full", rows, tokens))
            adapters = seconds(make(tiny_recipe, *shape, "lora", rows, tokens))
            if adapters > whole:
                slower.append((*shape, rows, tokens, round(adapters / whole, 3)))
    assert not slower


def test_many_adapters_whose_launches_take_longer_are_said_to(tiny_recipe):
    device = find_device("h100-sxm")
    said = {}
    for targets in (QUERY_VALUE, ALL):
        recipe = make(tiny_recipe, "smollm2-135m", device.id, "lora", 1, 512, targets)
        totals = sums(recipe)
        timeline = predict_timeline(totals, recipe, device)
        said[targets] = describe_time(totals, recipe, device, timeline).because
    assert "slower than training all weights with the same micro-batch" in said[ALL]
    assert "7 adapters a block" in said[ALL]
    assert "slower" not in said[QUERY_VALUE]


def test_every_projection_adapted_is_what_the_constants_were_fitted_on(tiny_recipe):
    recipe = make(tiny_recipe, "llama-3.2-1b", "h100-sxm", "lora", 1, 512)
    model, device = read_model(recipe.model), find_device("h100-sxm")
    every = replace(recipe, lora=replace(recipe.lora, targets=all_linear(model)))
    layout = read_setting(every, model, device).layout
    assert (layout.beside.adapters, layout.beside.adapted, layout.beside.spared) == (1.0, 1.0, 0.0)
    layout = read_setting(recipe, model, device).layout
    assert layout.beside.adapters == pytest.approx(2 / PROJECTIONS)
    # of 28 hidden widths and so on: q 2048 + 2048, v 2048 + 512, over all seven projections'
    assert layout.beside.adapted == pytest.approx(6656 / (3 * 4096 + 2560 + 3 * 10240 - 1536))


def test_other_frameworks_names_leave_what_was_fitted(tiny_recipe):
    recipe = make(tiny_recipe, "llama-3.2-1b", "h100-sxm", "lora", 1, 512)
    joined = replace(recipe, lora=replace(recipe.lora, targets=("linear_qkv", "linear_proj")))
    layout = read_setting(joined, read_model(recipe.model), find_device("h100-sxm")).layout
    assert (layout.beside.adapters, layout.beside.adapted, layout.beside.spared) == (1.0, 1.0, 0.0)


def test_frozen_blocks_without_adapters_have_none(tiny_recipe):
    recipe = make(tiny_recipe, "llama-3.2-1b", "h100-sxm", "full", 1, 512)
    frozen = replace(recipe, method="freeze", freeze=Freeze(last_blocks=1))
    layout = find_setting(sums(frozen), frozen, find_device("h100-sxm")).layout
    assert (layout.beside.adapters, layout.beside.adapted) == (0.0, 0.0)
    assert seconds(frozen) < seconds(recipe)
