"""A knob left on `auto` is decided to something that works."""

import pytest

from memfit import api, catalog
from memfit.core.errors import InvalidRequest

ALIBI = [m.id for m in catalog.models() if m.model_type in ("bloom", "mpt")]


def plan(model, device="h100-sxm", **changes):
    return api.plan(api.read(model, device=device, changes=changes), levers=False)


@pytest.mark.parametrize("model", ALIBI)
def test_rows_of_a_model_that_cannot_keep_documents_apart_are_not_packed(model):
    assert not plan(model, method="lora").recipe.packing


def test_rows_are_packed_where_that_can_be_and_are_refused_where_it_was_asked_for():
    assert plan("gpt2").recipe.packing
    with pytest.raises(InvalidRequest, match="`packing: true`"):
        plan(ALIBI[0], **{"task.packing": True})


def test_rows_that_ranks_share_are_not_packed():
    cut = {"parallel": {"cp": 2}, "hardware.count": 2, "task.sequence_length": 4096}
    assert not plan("llama-3.2-1b", **cut).recipe.packing
    with pytest.raises(InvalidRequest, match="`packing: true`"):
        plan("llama-3.2-1b", **cut, **{"task.packing": True})


@pytest.mark.parametrize("framework", ["memfit", "torchtitan", "hf-trainer"])
@pytest.mark.parametrize(
    ("changes", "batch"),
    [
        ({"hardware.count": 8, "hardware.nodes": 8}, 64),
        ({"hardware.count": 3}, 18),
        ({"micro_batch": 3}, 18),
        ({"hardware.count": 2}, 16),
        ({"hardware.count": 8, "task.global_batch": 24}, 24),
    ],
)
def test_the_global_batch_is_one_that_all_ranks_can_share(changes, batch, framework):
    found = plan("llama-3.2-1b", framework=framework, **changes)
    assert found.recipe.global_batch == batch


def test_a_global_batch_that_was_asked_for_is_not_changed():
    with pytest.raises(InvalidRequest, match=r"`task\.global_batch: 20`"):
        plan("bloom-560m", **{"hardware.count": 8, "task.global_batch": 20, "method": "lora"})


def test_offers_of_several_sizes_share_one_global_batch():
    compared = api.compare(api.read("llama-3.2-1b"), "h100-sxm:64,h100-sxm:6,rtx-4090:1")
    assert {row.verdict for row in compared.rows} <= {"fits", "at_risk", "does_not_fit"}
    assert compared.plan.recipe.global_batch == 192


@pytest.mark.parametrize("framework", ["hf-trainer", "trl", "megatron", "deepspeed"])
def test_another_frameworks_precision_is_one_that_the_device_computes(framework):
    assert plan("llama-3.2-1b", framework=framework).recipe.precision.startswith("bf16")
    old = plan("gpt2", "t4", framework=framework).recipe.precision
    assert old in ("fp16-mixed", "fp32")


def test_a_framework_that_has_no_precision_of_the_device_is_refused_in_its_own_name():
    with pytest.raises(InvalidRequest, match=r"`framework: torchtitan`.*`t4`"):
        plan("llama-3.2-1b", "t4", framework="torchtitan")


def test_the_steps_of_other_frameworks_are_not_planned_on_a_cpu():
    with pytest.raises(InvalidRequest, match=r"`hardware\.device: cpu` is a CPU") as refused:
        plan("gpt2", "cpu", framework="trl")
    assert refused.value.hint


@pytest.mark.parametrize("model", ["phi-3-mini-4k-instruct", "mpt-7b", "gpt2"])
def test_megatrons_adapters_stand_beside_every_dense_familys_attention(model):
    assert plan(model, framework="megatron", method="lora").memory.peak_allocated


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v3"])
def test_adapters_that_megatron_is_not_described_with_are_refused(model):
    with pytest.raises(InvalidRequest, match="adapters beside experts or latent attention") as it:
        plan(model, framework="megatron", method="lora")
    assert it.value.hint


@pytest.mark.parametrize("count", [1, 8])
def test_deepspeed_is_not_given_a_stage_that_cannot_cut_the_base(count):
    """It was refused for the `zero: 3` that `auto` had chosen."""
    changes = {"method": "lora", "framework": "deepspeed", "hardware.count": count}
    coded = plan("pythia-1b", **changes, base_format="int8").recipe.parallel
    assert coded.zero in (1, 2)
    assert coded.world == count
    other = plan("pythia-1b", **changes, base_format="nf4").recipe.parallel
    assert count > 1 or other.zero == 3
