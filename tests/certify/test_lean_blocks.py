"""Bytes of lean blocks: real = certified = predicted, and 22.75 a token and hidden unit."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tiny_steps import CPU, H100, make_recipe, watch_real_step

from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.certify.tracing.trace_step import worst_shapes
from memfit.families import families_that, read_model
from memfit.families.capabilities.lean import find_lean
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.recipe import LEAN, Freeze, Lora, Preference, Recipe

BF16 = {"precision": "bf16", "base_format": "bf16"}
MIXED = {"precision": "bf16-mixed"}
LORA = {"method": "lora"}
DROPPED = {"lora": Lora(rank=4, alpha=8.0, dropout=0.1, targets=("q_proj", "down_proj"))}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "mixed": MIXED,
    "norm-mixed-recompute": {**MIXED, "lean": ("norm",), "recompute_blocks": 3},
    "mlp-bf16": {**BF16, "lean": ("mlp",), "accumulation": 2},
    "lora-mixed-bf16": {**LORA, **MIXED, "base_format": "bf16"},
    "lora-dropout": {**LORA, **DROPPED, **MIXED, "recompute_blocks": 1},
    "freeze": {"method": "freeze", "freeze": Freeze(last_blocks=1)},
    "packing-mixed-recompute": {"packing": True, **MIXED, "recompute_blocks": 2},
    "fp16-chunked": {
        "precision": "fp16-mixed", "accumulation": 2, "loss": "chunked", "loss_chunk": 20,
    },
    "math": {"attention": "math"},
    "dora-mixed": {"method": "dora", **MIXED, "base_format": "bf16"},
    "nf4": {**LORA, **MIXED, "base_format": "nf4"},
    "int8-recompute": {**LORA, **MIXED, "base_format": "int8", "recompute_blocks": 2},
    "offload": {**MIXED, "offload": "activations"},
    "dpo-mixed-recompute": {
        **LORA, **MIXED, "objective": "dpo", "recompute_blocks": 2,
        "preference": Preference(beta=0.1, reference="adapter-off"),
    },
}  # fmt: skip
SCALARS = 16  # bytes of 0-dim results of a step, which no peak depends on
QUICK = {"mixed", "lora-mixed-bf16"}
FIRST = {("llama", "mixed"), ("llama", "lora-mixed-bf16"), ("gpt_neox", "mixed"), ("gpt2", "mixed")}


def cases() -> list[Any]:
    return [
        pytest.param(family, changes, id=f"{family}-{name}",
                     marks=() if (family, name) in FIRST else (pytest.mark.slow,))
        for family in families_that("lean") for name, changes in VARIANTS.items()
        if family == "llama" or name in QUICK
    ]  # fmt: skip


def lean_recipe(family: str, changes: dict[str, Any]) -> Recipe:
    """With all the lean operations of the family, or some."""
    recipe = make_recipe(family, **changes)
    own = find_lean(read_model(recipe.model).architecture)
    return recipe if recipe.lean else replace(recipe, lean=own)


def assert_same(predicted: Ledger, certified: Ledger, phase: Phase) -> None:
    """Of each kind; what the allocator adds is of no tensor."""
    ours, theirs = predicted.by_kind(phase), certified.by_kind(phase)
    for kind in (ours.keys() | theirs.keys()) - {Kind.FRAGMENTATION}:
        assert abs(ours.get(kind, 0) - theirs.get(kind, 0)) <= SCALARS, (phase, kind)


@pytest.mark.covering
@pytest.mark.parametrize(("family", "changes"), cases())
def test_every_phase_holds_the_same_bytes_real_traced_and_predicted(family, changes) -> None:
    recipe = lean_recipe(family, changes)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    fake, real = trace(recipe, CPU), watch_real_step(recipe, worst_shapes(recipe))
    predicted = predict_memory(model, recipe, CPU)
    for phase in real.peaks:
        if phase is not Phase.LOAD:
            assert fake.ledger.by_kind(phase) == real.ledger().by_kind(phase)
    for phase in fake.phases:
        assert_same(predicted, fake.ledger, phase)


@pytest.mark.covering
@pytest.mark.parametrize(("family", "changes"), cases())
def test_the_prediction_equals_the_trace_on_cuda(family, changes) -> None:
    recipe = lean_recipe(family, changes)
    if recipe.compute_dtype == "float32":
        recipe = replace(recipe, attention="efficient")
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    fake, predicted = trace(recipe, H100), predict_memory(model, recipe, H100)
    for phase in fake.phases:
        assert_same(predicted, fake.ledger, phase)


SEVEN_B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 320,
    "max_position_embeddings": 4096,
}  # fmt: skip


def kept(config: dict[str, Any] = SEVEN_B, **changes: Any) -> float:
    """Bytes that a third block keeps beside two, for each token and hidden unit."""
    tokens, hidden = 4096, config["hidden_size"]
    shape = {"sequence_length": tokens, "micro_batch": 1, **changes}
    recipes = (make_recipe(config={**config, "num_hidden_layers": n}, **shape) for n in (2, 3))
    two, three = (trace(r, H100).ledger.by_kind(Phase.LOSS)[Kind.ACTIVATIONS] for r in recipes)
    return (three - two) / (tokens * hidden)


def test_a_block_of_7b_keeps_23_bytes_a_token_and_hidden_unit() -> None:
    """2 + 2 of inputs, 8 of q, k, v, o, 10.75 of gate and up; and small ones: three fp32 numbers
    a token (two norms) and a row's log-sums of each head."""
    statistics = (2 * 4 + 32 * 4) / 4096
    assert kept(**BF16, lean=LEAN) == pytest.approx(22.75 + statistics, abs=1e-3)
    assert kept(**BF16) == pytest.approx(45.5, abs=0.1)


def test_under_autocast_residuals_are_wide_and_no_weight_is_copied() -> None:
    """fp32 residuals: 4 + 4 instead of 2 + 2; eager keeps the casts of weights as well."""
    statistics = (2 * 4 + 32 * 4) / 4096
    assert kept(**MIXED, lean=LEAN) == pytest.approx(26.75 + statistics, abs=1e-3)
    weights = 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008) / 4096**2
    assert kept(**MIXED) > 45 + weights


TWENTY_B = {
    "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
    "num_attention_heads": 64, "vocab_size": 320, "max_position_embeddings": 4096,
}  # fmt: skip


def test_a_block_of_gpt_neox_keeps_24_bytes_instead_of_36() -> None:
    """2 of its input, which both norms read; 6 of the joined q, k, v, 4 of q and k rotated, 4 of
    attention's result (by head, as a join made q, and by token), 8 of the activation's input.
    Eager keeps 4 of the norms and 8 of the activation beside them."""
    statistics = (2 * 2 * 4 + 64 * 4) / 6144
    lean, eager = (kept(TWENTY_B, **BF16, lean=lean) for lean in (LEAN, ()))
    assert lean == pytest.approx(24 + statistics, abs=0.01)
    assert eager == pytest.approx(36 + statistics, abs=0.01)
