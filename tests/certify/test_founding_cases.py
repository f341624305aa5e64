"""A 20B model on one card of 24 GB, its base in 8 and in 4 bits: certified, as recipes/ has it."""

from pathlib import Path

import pytest

from memfit import api, catalog
from memfit.certify.evidence.certificate import make_certificate
from memfit.core.units import GIB
from memfit.records.ledger import Kind, Phase

RECIPES = Path(__file__).parents[2] / "recipes"
BLOCKS, HIDDEN = 44, 6144
PROJECTIONS = BLOCKS * 12 * HIDDEN**2  # weights of query_key_value, dense, and the feed-forward


# of `make test`: what int8 and nf4 hold: plan/test_quantised_memory.py; recipes/:
# test_closed_forms.py; their iterations: plan/test_rollout_memory.py; deep models' tapes:
# test_repeating.py; what was certified of these: docs/test_recorded.py
@pytest.mark.slow
@pytest.mark.parametrize(
    ("base_format", "device", "bits", "what"),
    [
        pytest.param("int8", "rtx-4090", 8.0, "lora", marks=pytest.mark.wide),
        pytest.param("nf4", "rtx-3090", 4.13, "lora", marks=pytest.mark.wide),
        pytest.param("int8", "rtx-4090", 8.0, "dpo", marks=pytest.mark.wide),
    ],
)
def test_a_20b_model_with_a_quantised_base_is_certified_to_fit_24_gb(
    base_format, device, bits, what
):
    plan = api.plan(
        api.read(RECIPES / f"gpt-neox-20b_{base_format}-{what}_{device}.yaml"), levers=False
    )
    recipe = plan.recipe
    assert (recipe.lora.rank, recipe.lora.targets) == (16, ("query_key_value",))
    card = catalog.find_device(device)
    certificate = make_certificate(recipe, card, card.memory, None)
    assert certificate.memory.verdict == "fits"
    assert certificate.generation.verdict == "fits"
    assert certificate.memory.device_total < 24e9
    assert plan.ledger.peak == pytest.approx(certificate.memory.peak_allocated, rel=0.005)
    held = sum(e.nbytes for e in certificate.memory.entries if e.kind == Kind.PARAMETERS)
    assert PROJECTIONS * bits / 8 < held < PROJECTIONS * bits / 8 + 1.5 * GIB
    said = any("hold outliers" in bound for bound in certificate.bounds)
    assert said == (base_format == "int8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "slots", "peak_phase"),
    [
        pytest.param(
            "gpt-neox-20b_nf4-grpo_rtx-4090", (8 * 1024 + 512) * 2 * 44 * 6144 * 2, "prefill",
            marks=pytest.mark.wide,
        ),
        pytest.param(  # whose prompts have an answer each, so that no row keeps them
            "gpt-neox-20b_nf4-ppo-reward_rtx-4090", 8 * 512 * 2 * 44 * 6144 * 2, "prefill",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            "gpt-neox-20b_nf4-grpo_rtx-3090", (8 * 1024 + 512) * 2 * 44 * 6144 * 2, "prefill",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            "gpt-oss-20b_nf4-grpo_rtx-4090",  # every other layer has a window of 128
            12 * (8 * 1024 + 512 + 9 * 128) * 2 * 8 * 64 * 2, "accumulate",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            "qwen3-8b_nf4-grpo_rtx-4090", (8 * 9216 + 1024) * 2 * 36 * 8 * 128 * 2, "accumulate",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            "qwen3-8b_nf4-grpo-32k_rtx-4090", (3 * 32768 + 1024) * 2 * 36 * 8 * 128 * 2, "prefill",
            marks=pytest.mark.wide,
        ),
    ],
)  # fmt: skip
def test_reinforcement_learning_is_certified_to_fit_24_gb(name, slots, peak_phase):
    """slots: bytes of keys and values of the answers in flight, and of the row for a prompt's."""
    plan = api.plan(api.read(RECIPES / f"{name}.yaml"), levers=False)
    assert plan.memory.verdict == "fits"
    card = catalog.find_device(plan.recipe.device)
    certificate = make_certificate(plan.recipe, card, card.memory, None)
    assert certificate.memory.verdict == "fits"
    assert certificate.memory.peak_phase == plan.memory.peak_phase == peak_phase
    assert plan.ledger.peak == pytest.approx(certificate.memory.peak_allocated, rel=0.005)
    low, high = plan.memory.total_low, plan.memory.total_high
    assert low <= certificate.memory.device_total <= high
    for phase in (Phase.PREFILL, Phase.DECODE):
        assert certificate.ledger.by_kind(phase)[Kind.KV_CACHE] == slots
