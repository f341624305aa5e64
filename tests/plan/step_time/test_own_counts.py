"""What the clock counts of memfit's own step: operations, and bytes that eager operations move."""

from collections import Counter

import pytest
import torch
from counted import WAYS, count_family, count_of_block, make_counted
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.plan.step_time.counts import own_counts
from memfit.plan.step_time.counts.operations import USUAL, find_operations, read_operations
from memfit.plan.step_time.counts.own_counts import NORM, SOFTMAX, SOFTMAX_BACK, count_logits
from memfit.records.recipe import Regularisation
from memfit.records.reinforcement import Rollout
from memfit.train.rl.token_log_probs import token_log_probs
from memfit.train.step.step import Batch, step
from tiny_models import CONFIGS, make_built, make_recipe

FEW = ("qwen3", "gpt2", "olmoe")  # beside Llama: head norms, none of its operations, experts
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
ONCE = {"softmax": 2 * 4, "back": 3 * 4}  # what a soft-max moves where each tensor is read once


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in (USUAL, *FEW) else pytest.mark.wide)
        for name in sorted(CONFIGS)
    ],
)
def test_operations_of_every_familys_block_are_torchs_count(family):
    """In training and in decoding. Other builds of torch differ by a few."""
    for way in WAYS if family == USUAL else ("cast",):
        table, (trained, decoded) = find_operations(family, way), count_family(family, way)
        assert (table.step, table.decode) == (
            pytest.approx(trained, rel=0.05),
            pytest.approx(decoded, rel=0.05),
        )


def test_every_family_is_counted_and_another_one_is_taken_for_llama():
    assert set(read_operations()) == set(CONFIGS)
    assert find_operations("nobody's", "half") == find_operations(USUAL, "half")


def test_a_block_computed_again_runs_a_third_more():
    plain = make_counted("qwen3", "cast")
    again = replace(plain, recompute="full", recompute_blocks=1)
    assert count_of_block(again) == pytest.approx(4 / 3 * count_of_block(plain), rel=0.05)


class Moved(TorchDispatchMode):
    """Bytes of tensors that operations but products and attention read and write."""

    def __init__(self, least=0):
        super().__init__()
        self.least, self.nbytes = least, Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        made = operator(*args, **(kwargs or {}))
        name, of = str(operator), operator._schema.returns
        views = any(r.alias_info and not r.alias_info.is_write for r in of)
        if views or any(word in name for word in ("mm.", "attention", "detach")):
            return made
        # what is picked or filled: the result alone is as large
        read = (
            () if "nll_loss" in name or name.startswith(("aten.gather", "aten.scatter")) else args
        )
        made_ = () if name.startswith(("aten.gather", "aten.scatter")) else (made,)
        flat = [x for one in (*read, *made_) for x in (one if isinstance(one, tuple) else [one])]
        self.nbytes[name] += sum(
            x.numel() * x.element_size()
            for x in flat
            if isinstance(x, torch.Tensor) and x.numel() >= self.least
        )
        return made


def watch(recipe, tokens, least=0):
    built, ids = make_built(recipe), torch.arange(3, 3 + tokens)[None] % 90
    with Moved(least) as moved:
        step(built, [Batch(ids, ids)], tokens)
    return moved.nbytes


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "fp32"])
@pytest.mark.parametrize("loss", ["plain", "chunked", "bent"])
def test_bytes_of_a_logit_are_those_of_torchs_operations(precision, loss):
    recipe = make_recipe(precision=precision, loss="chunked" if loss == "chunked" else "plain")
    recipe = replace(recipe, loss_chunk=512 if loss == "chunked" else 0)
    if loss == "bent":
        recipe = replace(recipe, regularisation=Regularisation(label_smoothing=0.1, z_loss=1e-4))
    tokens = 400  # so that nothing but logits is as large
    logits = tokens * recipe.model.config["vocab_size"]
    found = watch(replace(recipe, micro_batch=1, sequence_length=tokens), tokens, logits)
    seen = sum(found.values()) / logits
    more = SOFTMAX - ONCE["softmax"]
    more += SOFTMAX_BACK - ONCE["back"] if loss == "plain" else 0
    assert count_logits(recipe).both == pytest.approx(seen + more, rel=0.1)


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_bytes_of_a_logit_that_is_scored_are_those_of_torchs_operations(loss):
    recipe = replace(
        make_recipe(precision="bf16-mixed"), loss=loss, loss_chunk=512, objective="grpo",
        rollout=Rollout(),
    )  # fmt: skip
    head, hidden = torch.nn.Linear(8, 97, bias=False), torch.zeros(1, 400, 8)
    labels, logits = torch.zeros(1, 400, dtype=torch.int64), 400 * 97
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Moved(logits) as moved:
        token_log_probs(head, hidden, labels, recipe, None)
    more = (SOFTMAX - ONCE["softmax"]) * (2 if loss == "plain" else 1)
    assert count_logits(recipe).alone == pytest.approx(
        sum(moved.nbytes.values()) / logits + more, rel=0.1
    )


def test_a_fused_loss_stays_as_fitted():
    assert count_logits(make_recipe(loss="fused")) == own_counts.LogitBytes(0.0, 0.0)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_of_head_norms_are_what_qwen3_moves_beyond_llama(way):
    moved = {}
    for family in ("llama", "qwen3"):
        for layers in (1, 2):
            for tokens in (16, 32):
                recipe = make_counted(family, way)
                config = {**recipe.model.config, **SIZES, "num_hidden_layers": layers}
                deep = replace(recipe, model=replace(recipe.model, config=config), micro_batch=1)
                found = watch(replace(deep, sequence_length=tokens), tokens)
                moved[family, layers, tokens] = sum(found.values())

    def of_a_token(family):
        long, short = (moved[family, 2, tokens] - moved[family, 1, tokens] for tokens in (32, 16))
        return (long - short) / 16

    normed = 8 * (8 + 4)
    assert (of_a_token("qwen3") - of_a_token("llama")) / normed == pytest.approx(NORM[way], rel=0.1)
