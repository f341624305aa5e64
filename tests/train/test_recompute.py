"""Blocks recomputed whole, in part and not at all: the same numbers, other bytes, other work."""

from collections import Counter

import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import catalog
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Lora
from memfit.train.step import build, recompute
from memfit.train.step.step import step
from tiny_models import (
    CONFIGS,
    FAMILIES,
    gradients_in,
    make_batch,
    make_built,
    make_recipe,
    targets_of,
)

H100 = catalog.find_device("h100-sxm")
DROPPED = Lora(rank=4, alpha=8.0, dropout=0.5, targets=("q_proj", "down_proj"))
WAYS = {
    "selective": {"selective_blocks": 3},
    "one whole, one selective": {"recompute_blocks": 1, "selective_blocks": 1},
    "whole": {"recompute_blocks": 3},
}
SETTINGS = {
    "fp32": ("llama", {}),
    "mixed": ("llama", {"precision": "bf16-mixed"}),
    "lora with dropout": ("llama", {"method": "lora", "lora": DROPPED}),
    "lora with dropout, bf16, chunked": (
        "llama", {"method": "lora", "lora": DROPPED, "precision": "bf16", "base_format": "bf16",
                  "loss": "chunked", "loss_chunk": 5}
    ),
    "math": ("llama", {"attention": "math"}),
}  # fmt: skip


def one_step(recipe, rng=7):
    """Loss and every gradient of one step; adapters begin away from zero."""
    built = make_built(recipe)
    torch.manual_seed(rng)
    with torch.no_grad():
        for name, parameter in built.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    gradients, batch = gradients_in(built), make_batch(ignored=3)
    loss = step(built, [batch], targets_of(batch)).loss
    return loss, gradients


def differences(recipe, ways):
    """How many of loss and gradients differ in any bit from those with every block kept."""
    loss, expected = one_step(recipe)
    again, gradients = one_step(replace(recipe, **ways))
    assert expected.keys() == gradients.keys()
    unequal = sum(not torch.equal(expected[name], gradients[name]) for name in expected)
    return unequal + (not torch.equal(loss, again))


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradients_are_those_without_bit_by_bit(name, ways):
    family, changes = SETTINGS[name]
    assert differences(make_recipe(family, **changes), ways) == 0


SELECTIVE = [family for family in FAMILIES if family != "gpt_oss"]


@pytest.mark.parametrize("family", SELECTIVE)
def test_every_family_is_recomputed_selectively_bit_by_bit(family):
    assert differences(make_recipe(family), {"selective_blocks": 3}) == 0


class Operators(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operators(recipe):
    """Of one step, under a dispatch mode of torch's own."""
    built, batch = make_built(recipe), make_batch()
    with Operators() as mode:
        step(built, [batch], targets_of(batch))
    return mode.seen


@pytest.mark.parametrize("family", SELECTIVE)
def test_no_product_with_a_weight_and_no_fused_attention_runs_twice(family):
    kept, again = (
        operators(make_recipe(family, selective_blocks=blocks)) for blocks in (0, 3)
    )  # fmt: skip
    for operator in map(str, recompute.SAVED):
        assert again[operator] == kept[operator], operator
    assert sum(again.values()) > sum(kept.values())


SELECTIVE = [family for family in FAMILIES if family != "gpt_oss"]


@pytest.mark.parametrize("family", SELECTIVE)
def test_everything_kept_is_asked_for(family, monkeypatch):
    """Outside reference: torch's own record of what a recomputation took."""
    stores, made = [], recompute.create_selective_checkpoint_contexts

    def watched(policy):
        contexts = made(policy)
        stores.append(contexts[0].storage)
        return contexts

    monkeypatch.setattr(recompute, "create_selective_checkpoint_contexts", watched)
    operators(make_recipe(family, selective_blocks=3))
    left = [
        str(operator) for store in stores for operator, found in store.items()
        for value in (found.values() if isinstance(found, dict) else found)
        if operator in recompute.SAVED and type(value) is not object  # its mark of what was taken
    ]  # fmt: skip
    assert len(stores) == 3
    assert left == []


def test_a_selective_block_of_llama_keeps_22_75_bytes():
    """Input, q, k, v, attention's result, its projection, gate and up, in 16 bits.

    Beside them 4 bytes a head and token of attention's log-sums, and 24 of its generator's state.
    """
    hidden, ffn, heads, tokens = 4096, 11008, 32, 64
    config = CONFIGS["llama"] | {
        "hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }  # fmt: skip

    def kept(layers):
        recipe = make_recipe(
            config=config | {"num_hidden_layers": layers}, selective_blocks=layers,
            precision="bf16", base_format="bf16", sequence_length=tokens, micro_batch=1,
        )  # fmt: skip
        return trace(recipe, H100).ledger.by_kind(Phase.LOSS)[Kind.ACTIVATIONS]

    block = kept(3) - kept(2) - 4 * heads * tokens - 24
    assert block / (tokens * hidden) == 2 + 3 * 2 + 2 + 2 + 2 * 2 * ffn / hidden == 22.75


def test_experts_that_add_their_bias_in_place_are_refused(monkeypatch):
    """And torch still refuses them: where it no longer does, nor need memfit."""
    recipe = make_recipe("gpt_oss", selective_blocks=3)
    with pytest.raises(InvalidRequest, match="keeps products, and the experts of `gpt_oss` add"):
        build.build_model(recipe, "meta")
    monkeypatch.setattr(build, "check_selective", lambda *_: None)
    with pytest.raises(RuntimeError, match="has been mutated"):
        one_step(recipe)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lean": ("norm", "mlp")}, "`lean: norm, mlp` keeps no more than that already"),
        (
            {"method": "lora", "base_format": "nf4", "precision": "bf16"},
            "those of `base_format: nf4` are bitsandbytes'",
        ),
        ({"method": "dora"}, "`method: dora` multiplies its adapters to measure weights"),
    ],
)
def test_products_that_are_not_torchs_own_are_refused(changes, said):
    lora = {} if "lean" in changes else {"lora": Lora(rank=4, alpha=8.0, targets=("q_proj",))}
    recipe = make_recipe(selective_blocks=3, **lora, **changes)
    with pytest.raises(InvalidRequest, match=said):
        build.build_model(recipe, "meta")


def test_adapters_products_are_made_again():
    lora = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj"))
    kept, again = (
        operators(make_recipe(method="lora", lora=lora, selective_blocks=n))["aten.mm.default"]
        for n in (0, 3)
    )
    assert again - kept == 3 * 2 * 2  # blocks, targets, A and B


def test_more_blocks_than_there_are_are_refused():
    with pytest.raises(InvalidRequest, match="recompute of 4 blocks, but `llama` has 3"):
        build.build_model(make_recipe(recompute_blocks=2, selective_blocks=2), "meta")
