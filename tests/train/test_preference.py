"""DPO against its published formula, written out over Hugging Face's own class in fp64.

Numeric test 13: loss, log-probabilities of both answers, rewards and gradients to 1e-6 in fp32; the
reference with its adapter off equals a frozen copy exactly.
"""

import copy

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from formula_weights import fill_by_formula, make_formula_pairs
from memfit.adapters.lora import Lora as LoraMethod
from memfit.core.errors import InvalidRequest
from memfit.records.recipe import Lora, Preference
from memfit.train.step.build import build_model
from memfit.train.step.preference import Rewards, judge, row_log_probs
from memfit.train.step.step import Batch, evaluate, log_probs, step
from tiny_models import VOCAB, gradients_in, make_built, make_recipe, start_adapters_at_random

BETA = 0.3
OFF = Preference(beta=BETA, reference="adapter-off")
BEFORE = Preference(beta=BETA, reference="precomputed")


def make_dpo(family="llama", *, preference=None, method="lora", **changes):
    preference = preference or (OFF if method == "lora" else BEFORE)
    given = {"micro_batch": 4, "optimizer": {"clip_norm": 0.0}, **changes}
    return make_recipe(family, objective="dpo", method=method, preference=preference, **given)


def make_pairs(rows=4, tokens=16, seed=0):
    """Rows whose first third is a prompt and whose end is padding of another length in each."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=random)
    ids[1::2, :5] = ids[::2, :5]
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    labels[:, :4] = -100
    for row in range(rows):
        labels[row, tokens - 1 - row :] = -100
    return Batch(ids, labels)


def make_trained(recipe):
    """Adapters away from their zero start, so that policy and reference differ."""
    return start_adapters_at_random(make_built(recipe), 5, 0.3)


def textbook_log_probs(model, batch):
    """log pi(y | x) of each row, as 2305.18290 writes it: a sum over the answer's tokens."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    of_each = logits.log_softmax(-1).gather(2, batch.labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (of_each * (batch.labels != -100)).sum(1)


def textbook_loss(policy, reference, beta=BETA, smoothing=0.0):
    """2305.18290, equation 7; smoothed as cDPO does, equation 3 of its note."""
    ratios = policy - reference
    margin = beta * (ratios[0::2] - ratios[1::2])
    losses = -(1 - smoothing) * margin.sigmoid().log() - smoothing * (-margin).sigmoid().log()
    return losses.mean(), beta * ratios[0::2], beta * ratios[1::2]


def wide(built):
    """Policy and reference in fp64: eager attention of Hugging Face's class, weights merged."""
    recipe = built.recipe
    config = AutoConfig.for_model(**recipe.model.config)
    made = []
    for merged in (True, False):
        twin = copy.deepcopy(built.model).double()
        inner = twin.merge_and_unload() if merged else twin.unload()
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
        model.load_state_dict(inner.state_dict())
        made.append(model.eval())
    return made


LOSSES = {
    "plain": {},
    "chunked, uneven": {"loss": "chunked", "loss_chunk": 12},
    "chunked, one chunk": {"loss": "chunked", "loss_chunk": 64},
}


@pytest.mark.parametrize("changes", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_loss_log_probs_rewards_and_gradients_equal_the_published_formula(family, changes):
    built = make_trained(make_dpo(family, **changes))
    batch = make_pairs()
    policy, reference = wide(built)
    with torch.no_grad():
        frozen = textbook_log_probs(reference, batch)
    own = textbook_log_probs(policy, batch).detach()
    loss, chosen, rejected = textbook_loss(own, frozen)
    narrow = log_probs(built, batch)
    torch.testing.assert_close(narrow.double(), own, rtol=1e-6, atol=0)
    with LoraMethod().switched_off(built.model):
        base = log_probs(built, batch)
    torch.testing.assert_close(base.double(), frozen, rtol=1e-6, atol=0)
    result = step(built, [batch], 2)
    assert float(result.loss) == pytest.approx(float(textbook_loss(narrow, base)[0]), rel=1e-6)
    # sums of -60 are rounded to 4e-6 in fp32, before beta and the difference of four of them
    assert float(result.loss) == pytest.approx(float(loss), abs=BETA * 4 * 4e-6)
    won = (chosen > rejected).double().sum()
    expected = torch.stack((chosen.sum(), rejected.sum(), won))
    torch.testing.assert_close(result.rewards.double(), expected, rtol=2e-5, atol=2e-6)
    assert float(own.min()) < -20  # sums of many tokens, and not all alike


@pytest.mark.parametrize("changes", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_gradients_equal_autograd_through_the_formula(method, changes):
    recipe = make_dpo(method=method, **changes)
    built = make_trained(recipe)
    batch = make_pairs()
    if method == "full":
        batch = replace_reference(batch, torch.linspace(-60, -50, 4))
    seen = gradients_in(built)
    twin = make_trained(replace(recipe, loss="plain", loss_chunk=0)).model.double()
    own = textbook_log_probs(twin, batch)
    reference = batch.reference
    if reference is None:
        with torch.no_grad(), twin.disable_adapter():
            reference = textbook_log_probs(twin, batch)
    textbook_loss(own, reference.double())[0].backward()
    step(built, [batch], 2)
    for name, parameter in twin.named_parameters():
        if parameter.requires_grad:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(
                seen[name].double(), parameter.grad, rtol=1e-4, atol=2e-6 * scale
            )


def replace_reference(batch, reference):
    return Batch(batch.input_ids, batch.labels, reference=reference)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_judging_equals_the_formula_and_autograd_in_fp64(smoothing):
    policy = torch.linspace(-40, 3, 8, dtype=torch.float64).requires_grad_()
    reference = torch.linspace(-30, -20, 8, dtype=torch.float64)
    loss, *_ = textbook_loss(policy, reference, smoothing=smoothing)
    (expected,) = torch.autograd.grad(loss, policy)
    rewards = Rewards()
    preference = Preference(beta=BETA, label_smoothing=smoothing, reference="precomputed")
    recipe = make_dpo(method="full", preference=preference)
    mine = judge(policy, reference, torch.ones(8, 3), recipe, 4, rewards)
    (slope,) = torch.autograd.grad(mine, policy)
    torch.testing.assert_close(mine, loss)
    torch.testing.assert_close(slope, expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_the_adapter_switched_off_is_a_frozen_copy_exactly(precision, loss):
    chunk = 12 if loss == "chunked" else 0
    base = "bf16" if precision == "bf16" else "fp32"
    recipe = make_dpo(precision=precision, base_format=base, loss=loss, loss_chunk=chunk)
    built = make_trained(recipe)
    batch = make_pairs()
    plain = replace(recipe, method="full", lora=Lora(), preference=BEFORE)
    alone = build_model(plain, "cpu")
    stored = LoraMethod().base_parameters(built.model)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            parameter.copy_(stored[name])
    separate = copy.copy(built)
    object.__setattr__(separate, "model", alone)
    expected = log_probs(separate, batch)
    with LoraMethod().switched_off(built.model):
        assert torch.equal(log_probs(built, batch), expected)
    assert not torch.equal(log_probs(built, batch), expected)
    live = step(built, [batch], 2)
    again = make_trained(replace(recipe, preference=BEFORE))
    given = step(again, [replace_reference(batch, expected)], 2)
    assert torch.equal(live.loss, given.loss)
    assert torch.equal(live.rewards, given.rewards)
    for a, b in zip(built.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_at_the_start_no_answer_is_preferred():
    built = make_built(make_dpo())
    result = step(built, [make_pairs()], 2)
    assert float(result.loss) == pytest.approx(0.6931471805599453, rel=1e-6)  # log 2
    assert result.rewards.tolist() == [0.0, 0.0, 0.0]


def test_how_pairs_are_cut_into_micro_batches_changes_nothing():
    halves = [make_pairs(2, seed=s) for s in (1, 2)]
    whole = Batch(*(torch.cat([getattr(h, k) for h in halves]) for k in ("input_ids", "labels")))
    found = []
    for batches, micro in ((halves, 2), ([whole], 4)):
        built = make_trained(make_dpo(micro_batch=micro, accumulation=len(batches)))
        seen = gradients_in(built)
        found.append((step(built, batches, 2), seen))
    (a, one), (b, two) = found
    torch.testing.assert_close(a.loss, b.loss)
    torch.testing.assert_close(a.rewards, b.rewards)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-7)


def test_evaluation_counts_pairs_and_passes_over_rows_without_an_answer():
    built = make_trained(make_dpo())
    batch = make_pairs()
    rewards = Rewards()
    loss, pairs = evaluate(built, batch, rewards)
    assert int(pairs) == 2
    filled = Batch(torch.cat([batch.input_ids, batch.input_ids]),
                   torch.cat([batch.labels, torch.full_like(batch.labels, -100)]))  # fmt: skip
    more = Rewards()
    same, still = evaluate(built, filled, more)
    assert int(still) == 2
    torch.testing.assert_close(same, loss)
    torch.testing.assert_close(more.sums, rewards.sums)


def test_recomputed_blocks_change_no_gradient():
    found = []
    for blocks in (0, 3):
        built = make_trained(make_dpo(recompute_blocks=blocks))
        seen = gradients_in(built)
        step(built, [make_pairs()], 2)
        found.append(seen)
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])


def test_rewards_are_told_where_weights_are_updated_within_backward():
    found = []
    for within in (False, True):
        built = make_trained(make_dpo(optimizer={"clip_norm": 0.0, "in_backward": within}))
        found.append(step(built, [make_pairs()], 2))
    after, inside = found
    assert torch.equal(after.rewards, inside.rewards)
    assert torch.equal(after.loss, inside.loss)


def test_gradients_are_learned_from():
    built = make_built(make_dpo(optimizer={"learning_rate": 3e-2, "clip_norm": 0.0}))
    batch = make_pairs()
    found = [step(built, [batch], 2) for _ in range(25)]
    assert float(found[0].loss) > 0.69 > 0.3 > float(found[-1].loss)
    chosen, rejected, won = found[-1].rewards.tolist()
    assert won == 2
    assert chosen > rejected


REFUSED = {
    "odd rows": ({"micro_batch": 3}, "pairs of rows"),
    "packed": ({"packing": True}, "row by row"),
    "adapter-off without adapter": ({"method": "full", "preference": OFF}, "has no adapter"),
    "no reference": ({"preference": Preference(beta=0.1)}, "without a reference"),
    "no beta": ({"preference": Preference(reference="precomputed")}, "teaches nothing"),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compared_is_refused(changes, said):
    with pytest.raises(InvalidRequest, match=said):
        build_model(make_dpo(**changes), "cpu")


def test_a_batch_without_its_precomputed_reference_is_refused():
    built = make_built(make_dpo(preference=BEFORE))
    with pytest.raises(InvalidRequest, match="without its reference"):
        step(built, [make_pairs()], 2)


def test_half_precision_with_a_scaled_loss_follows_fp32():
    recipe = make_dpo(loss="chunked", loss_chunk=12)
    half = replace(recipe, precision="fp16-mixed", base_format="fp32")
    found = []
    for one in (recipe, half):
        built = make_trained(one)
        result = step(built, [make_pairs()], 2)
        found.append(float(result.loss))
    assert found[1] == pytest.approx(found[0], rel=2e-2)


def test_row_log_probs_without_a_gradient_equal_those_with_one():
    built = make_trained(make_dpo(loss="chunked", loss_chunk=12))
    head = built.model.get_base_model().lm_head
    hidden = torch.randn(4, 16, 32)
    labels = make_pairs().labels
    with torch.no_grad():
        alone = row_log_probs(head, hidden, labels, built.recipe, None)
    with_one = row_log_probs(head, hidden.requires_grad_(), labels, built.recipe, None)
    assert torch.equal(alone, with_one.detach())


# DPOTrainer(...).compute_loss of trl 1.16.0 (torch 2.13.0, transformers 5.23.0, fp32, a CPU) of
# these weights and tokens: beta 0.3, loss_type sigmoid, a LoRA adapter, its copy before training
# as the reference (B = 0). Made once; trl is no dependency of memfit.
TRL = {"loss": 3.0026345252990723, "chosen": 0.7856758236885071, "rejected": 3.724581241607666}


@pytest.mark.parametrize("changes", LOSSES.values(), ids=LOSSES)
def test_loss_and_rewards_equal_those_of_trl(changes):
    built = make_built(
        make_dpo(preference=Preference(beta=0.3, reference="adapter-off"), **changes)
    )
    fill_by_formula(built.model)
    ids, labels = make_formula_pairs()
    result = step(built, [Batch(ids, labels)], 2)
    assert float(result.loss) == pytest.approx(TRL["loss"], rel=1e-6)
    chosen, rejected, _ = (result.rewards / 2).tolist()
    assert chosen == pytest.approx(TRL["chosen"], rel=1e-5)
    assert rejected == pytest.approx(TRL["rejected"], rel=1e-5)
