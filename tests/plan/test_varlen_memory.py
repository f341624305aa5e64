"""Documents under one call of attention's kernel: plan against certificate, to the byte."""

import pytest
from msgspec.structs import replace
from test_memory import H100, predict, recipe_of, tensors

from memfit.certify import trace
from memfit.meta import workspace
from memfit.plan.step_time.read import read_basis
from memfit.records.ledger import Phase
from memfit.records.recipe import LEAN

BF16 = {"precision": "bf16", "base_format": "bf16"}
CASES = {
    "full": ("llama", BF16),
    "full, lean, accumulated": ("llama", {**BF16, "lean": LEAN, "accumulation": 2}),
    "full, recomputed and selective": (
        "llama", {**BF16, "recompute_blocks": 1, "selective_blocks": 1}
    ),
    "full, mixed": ("llama", {"precision": "bf16-mixed", "lean": LEAN, "recompute_blocks": 1}),
    "lora": ("llama", {**BF16, "method": "lora"}),
    "lora, lean, mixed": (
        "llama", {"method": "lora", "precision": "bf16-mixed", "base_format": "bf16", "lean": LEAN}
    ),
    "activations on the host": ("llama", {**BF16, "offload": "activations"}),
    "joined q, k, v": ("gpt_neox", BF16),
    "values narrower than keys": ("deepseek_v3", BF16),
    "a window": ("mistral", {**BF16, "sliding_window": 7}),
}  # fmt: skip


def packed(name):
    family, changes = CASES[name]
    made = recipe_of(family, {**changes, "attention": "varlen", "packing": True})
    config = made.model.config
    if family == "deepseek_v3":  # heads of 16 elements: the kernel takes multiples of 8
        config = config | {"qk_nope_head_dim": 16 - config["qk_rope_head_dim"]}
    return replace(made, device=H100.id, model=replace(made.model, config=config))


@pytest.mark.parametrize("name", CASES)
def test_the_prediction_equals_the_trace(name):
    recipe = packed(name)
    ledger, traced = predict(recipe, H100), trace(recipe, H100)
    for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.EVALUATE):
        assert tensors(ledger, phase) == tensors(traced.ledger, phase), phase


def test_each_document_takes_128_rows_more_of_the_kernel_s_accumulators():
    """32 heads of 128 elements, of which keys have 8; as mha_varlen_bwd allocates."""
    query, key = (4096, 32, 128), (4096, 8, 128)
    one, two = (sum(workspace.varlen_backward(query, key, n, 2)) for n in (1, 2))
    softmax_d, dq_accum, expanded = 32 * 4224 * 4, 4224 * 32 * 128 * 4, 2 * 4096 * 32 * 128 * 2
    assert one == softmax_d + dq_accum + expanded
    assert two - one == 128 * 32 * 129 * 4


def test_its_time_is_flash_s_whose_kernel_it_is():
    recipe = packed("full")
    bases = [read_basis(replace(recipe, attention=kernel)) for kernel in ("varlen", "flash")]
    assert bases[0] == bases[1]
    assert bases[0].kernel == "flash2"
