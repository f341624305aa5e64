"""The certified peak is the measured one: the same step, real and fake, on a CPU. 0 bytes apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tiny_steps import CONFIGS, CPU, FAMILIES, LORA_TARGETS, make_recipe, possible, watch_real_step

from memfit.certify import BatchShape, trace
from memfit.certify.tracing.trace_step import worst_shapes
from memfit.records.ledger import Phase
from memfit.records.recipe import Freeze, Lora, Preference

BF16 = {"precision": "bf16", "base_format": "bf16"}
MIXED = {"precision": "bf16-mixed"}
FP16 = {"precision": "fp16-mixed"}
LORA = {"method": "lora"}
DORA = {"method": "dora"}
DPO = {
    **LORA,
    "objective": "dpo",
    "preference": Preference(beta=0.1, reference="adapter-off"),
}
ORPO = {
    "objective": "orpo",
    "preference": Preference(beta=0.1, loss_type="orpo", cross_entropy=1.0),
}
KTO = {
    "objective": "kto",
    "preference": Preference(
        beta=0.1, loss_type="kto", desirable=1.0, undesirable=1.0, reference="adapter-off"
    ),
}
REWARD = {
    "objective": "reward",
    "preference": Preference(beta=1.0, loss_type="bradley_terry", center=0.1),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "mixed": MIXED,
    "lora": LORA,
    "lora-bf16-base": {**LORA, **MIXED, "base_format": "bf16"},
    "dora": DORA,
    "dora-mixed-bf16-base": {**DORA, **MIXED, "base_format": "bf16", "recompute_blocks": 2},
    "freeze": {"method": "freeze", "freeze": Freeze(last_blocks=1)},
    "recompute-one": {"recompute_blocks": 1},
    "recompute-all-mixed": {**MIXED, "recompute_blocks": 3},
    "recompute-all-lora-bf16": {**LORA, **MIXED, "base_format": "bf16", "recompute_blocks": 3},
    "selective": {"selective_blocks": 3},
    "selective-some-lora-mixed": {
        **LORA,
        **MIXED,
        "base_format": "bf16",
        "recompute_blocks": 1,
        "selective_blocks": 1,
    },
    "chunked": {"loss": "chunked", "loss_chunk": 20},
    "chunked-bf16-lora": {**LORA, **BF16, "loss": "chunked", "loss_chunk": 32},
    "accumulation": {"accumulation": 2},
    "dpo": DPO,
    "dpo-chunked-mixed-recompute": {
        **DPO,
        **MIXED,
        "base_format": "bf16",
        "loss": "chunked",
        "loss_chunk": 20,
        "recompute_blocks": 3,
        "accumulation": 2,
    },
    "dpo-full-precomputed": {
        "objective": "dpo",
        "preference": Preference(beta=0.1, reference="precomputed"),
    },
    "orpo": {**LORA, **ORPO},
    "orpo-full-chunked-mixed-recompute": {
        **ORPO,
        **MIXED,
        "loss": "chunked",
        "loss_chunk": 20,
        "recompute_blocks": 2,
    },
    "cpo-bf16": {
        **LORA,
        **BF16,
        "objective": "cpo",
        "preference": Preference(beta=0.1, cross_entropy=1.0),
    },
    "kto-bf16": {**LORA, **BF16, **KTO},
    "kto-full-precomputed-chunked": {
        **KTO,
        "preference": replace(KTO["preference"], reference="precomputed"),
        "loss": "chunked",
        "loss_chunk": 20,
    },
    "reward": {**LORA, **REWARD},
    "reward-full-mixed-recompute": {**REWARD, **MIXED, "recompute_blocks": 2, "accumulation": 2},
    "packing": {"packing": True},
    "packing-mixed-recompute": {"packing": True, **MIXED, "recompute_blocks": 2},
    "foreach": {"implementation": "foreach"},
    "loop-bf16": {**BF16, "implementation": "loop"},
    "sgd-foreach": {"name": "sgd", "implementation": "foreach"},
    "8-bit": {"name": "adamw8bit", "implementation": "loop"},
    "8-bit-lora-mixed": {**LORA, **MIXED, "name": "adamw8bit", "implementation": "loop"},
    "4-bit-bf16": {**BF16, "name": "adamw4bit", "implementation": "loop"},
    "fp8-accumulation": {"name": "adamwfp8", "implementation": "loop", "accumulation": 2},
    "fp16": FP16,
    "fp16-lora-base": {**LORA, **FP16, "base_format": "fp16"},
    "fp16-foreach-accumulation": {**FP16, "implementation": "foreach", "accumulation": 2},
    "fp16-chunked-recompute": {
        **FP16,
        "loss": "chunked",
        "loss_chunk": 20,
        "recompute_blocks": 3,
    },
    "no-clipping": {"clip_norm": 0.0},
    "math": {"attention": "math"},
}
QUICK = {"fp32", "bf16", "lora-bf16-base", "recompute-all-mixed", "packing-mixed-recompute"}


def grid() -> list[Any]:
    """Every variant on llama, the quick ones on every family; the rest are slow."""
    cases = []
    for family in FAMILIES:
        for name in VARIANTS:
            if not possible(family, VARIANTS[name]):
                continue
            quick = family == "llama" or name in QUICK
            marks = () if quick else (pytest.mark.slow,)
            cases.append(pytest.param(family, VARIANTS[name], id=f"{family}-{name}", marks=marks))
    return cases


@pytest.fixture(autouse=True)
def _one_thread():
    """The models are so small that a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.covering
@pytest.mark.parametrize(("family", "changes"), grid())
def test_every_phase_holds_the_same_bytes_real_and_fake(family: str, changes: dict) -> None:
    recipe = make_recipe(family, **changes)
    fake = trace(recipe, CPU)
    real = watch_real_step(recipe, worst_shapes(recipe))
    steps = {phase: n for phase, n in real.peaks.items() if phase is not Phase.LOAD}
    assert {phase: fake.phases[phase] for phase in steps} == steps
    for phase in steps:
        assert fake.ledger.by_kind(phase) == real.ledger().by_kind(phase)


DROPOUT = {
    "recomputed": {"recompute_blocks": 2},
    "recomputed selectively": {"selective_blocks": 2, "recompute_blocks": 1},
    "mixed": {**MIXED, "base_format": "bf16"},
    "bf16, all recomputed": {**BF16, "recompute_blocks": 3, "accumulation": 2},
    "fp16, 8-bit": {**FP16, "base_format": "fp16", "name": "adamw8bit", "implementation": "loop"},
}


@pytest.mark.covering
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("changes", DROPOUT.values(), ids=DROPOUT)
def test_dropout_of_adapters_holds_the_same_bytes(family: str, changes: dict) -> None:
    targets = LORA_TARGETS.get(family, ("q_proj", "v_proj"))
    lora = Lora(rank=4, alpha=8.0, dropout=0.1, targets=targets)
    recipe = make_recipe(family, method="lora", lora=lora, **changes)
    fake, real = trace(recipe, CPU), watch_real_step(recipe, worst_shapes(recipe))
    steps = {phase: n for phase, n in real.peaks.items() if phase is not Phase.LOAD}
    assert {phase: fake.phases[phase] for phase in steps} == steps
    assert fake.peak > trace(replace(recipe, lora=replace(lora, dropout=0.0)), CPU).peak


WITHIN_WINDOWS = {
    "mistral": ("mistral", {"sliding_window": 20}, MIXED),
    "mistral, packed": ("mistral", {"sliding_window": 20}, {"packing": True, **BF16}),
    "gemma3, recomputed": ("gemma3_text", {"sliding_window": 20}, {"recompute_blocks": 3}),
    "gemma2, chunked": ("gemma2", {}, {**MIXED, "loss": "chunked", "loss_chunk": 20}),
    "gemma2, packed": ("gemma2", {}, {"packing": True, **BF16}),
    "phi3, math": ("phi3", {"sliding_window": 20}, {"attention": "math", "accumulation": 2}),
}


@pytest.mark.covering
@pytest.mark.parametrize(
    ("family", "window", "changes"), WITHIN_WINDOWS.values(), ids=WITHIN_WINDOWS
)
def test_rows_longer_than_windows_hold_the_same_bytes(
    family: str, window: dict, changes: dict
) -> None:
    recipe = make_recipe(family, config=CONFIGS[family] | window, **changes)
    fake, real = trace(recipe, CPU), watch_real_step(recipe, worst_shapes(recipe))
    steps = {phase: n for phase, n in real.peaks.items() if phase is not Phase.LOAD}
    assert {phase: fake.phases[phase] for phase in steps} == steps


def test_given_documents_are_the_ones_traced() -> None:
    recipe = make_recipe(packing=True, attention="math")
    shapes = (BatchShape(rows=2, tokens=48, documents=((10, 20, 18), (48,))),)
    fake, real = trace(recipe, CPU, shapes), watch_real_step(recipe, shapes)
    assert fake.peak == real.peak
    assert fake.peak < trace(recipe, CPU).peak


@pytest.mark.parametrize("accumulation", [3, 5])
def test_two_micro_batches_stand_for_all_later_ones(accumulation: int) -> None:
    recipe = make_recipe(accumulation=accumulation)
    real = watch_real_step(recipe, worst_shapes(recipe)[:1] * accumulation)
    fake = trace(recipe, CPU)
    assert {p: fake.phases[p] for p in real.peaks if p is not Phase.LOAD} == {
        p: n for p, n in real.peaks.items() if p is not Phase.LOAD
    }
    assert any(f"2 of {accumulation} micro-batches" in bound for bound in fake.bounds)


def test_a_third_step_holds_what_the_second_holds() -> None:
    recipe = make_recipe(accumulation=2)
    assert trace(recipe, CPU, steps=3).phases == trace(recipe, CPU, steps=2).phases


def test_a_trace_has_as_many_steps_as_are_asked_for() -> None:
    for steps in (1, 3):
        phases = trace(make_recipe(), CPU, steps=steps).stretches
        assert phases.count(Phase.FIRST_STEP) == 1
        assert phases.count(Phase.OPTIMIZER_STEP) == steps - 1


def test_two_traces_are_equal_event_by_event() -> None:
    recipe = make_recipe("qwen3", recompute_blocks=1)
    first, second = trace(recipe, CPU), trace(recipe, CPU)
    assert first == second
