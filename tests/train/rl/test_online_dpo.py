"""Online DPO: which of two sampled answers is chosen, and the loss of such pairs, beside TRL's."""

import dataclasses
import json
from contextlib import contextmanager

import pytest
import torch
from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.records.recipe import Freeze
from memfit.records.reinforcement import Policy, RewardSettings, Rollout
from memfit.train.checkpoint.whole import load_checkpoint, save_checkpoint
from memfit.train.generation.settings import Completion
from memfit.train.rl.advantages import find_judged_pairs, order_pairs
from memfit.train.rl.judging import Judges
from memfit.train.rl.learn import Learning, iterate
from memfit.train.rl.policy_loss import Answers, Counts, policy_loss
from memfit.train.rl.rollout import Prompt, Sampling, roll_out
from memfit.train.rl.rows import answer_mask, lay_out
from memfit.train.rl.sampling import sample_in_slots
from memfit.train.step.step import answer_log_probs, step
from neighbour_programs import run_program
from tiny_models import (
    CONFIGS,
    gradients_in,
    make_batch,
    make_built,
    make_recipe,
    start_adapters_at_random,
)

CASES = (
    "sigmoid", "ipo", "beta", "missing end", "two functions", "all equal", "chunked",
    "as its reference",
)  # fmt: skip
NAN, END = float("nan"), 1
ROLLOUT = Rollout(num_generations=2, max_prompt_length=5, max_completion_length=5, temperature=0.6)
PAIRS = Policy(loss_type="sigmoid", beta=0.3)
REWARDS = """
def even(completion_ids, **_):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]

def some(completion_ids, **_):
    return [None if n in (1, 6) else float(n % 3) for n, _ in enumerate(completion_ids)]

def first(completion_ids, **_):
    return [float(ids[0] % 2) for ids in completion_ids]

def nobody(completion_ids, **_):
    return [None] * len(completion_ids)
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    run_program("trl_online.py", home / "found.json")
    return json.loads((home / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_loss_gradients_and_figures_are_trls(compared, case):
    """TRL 1.16's OnlineDPOTrainer, one micro-batch a step."""
    found = compared[case]
    assert found["ours"] == pytest.approx(found["loss"], rel=1e-6, abs=1e-6)
    assert found["gradients"] < 1e-6
    assert found["our figures"] == pytest.approx(found["figures"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_cut_into_micro_batches_it_stays_the_same(compared, case):
    found = compared[case]
    assert found["cut"] == pytest.approx(found["ours"], rel=1e-6)
    assert found["cut gradients"] < 1e-5


@pytest.mark.slow
def test_every_case_is_held(compared):
    assert set(compared) == set(CASES)


def test_of_equal_rewards_the_first_answer_is_chosen():
    found = order_pairs(torch.tensor([0.0, 1.0, 1.0, 0.0, 0.5, 0.5]))
    assert found.tolist() == [-1, 1, 1, -1, 1, -1]


def test_a_pair_counts_where_both_answers_have_a_reward():
    found = find_judged_pairs(torch.tensor([0.0, 1.0, NAN, 0.0, 0.5, NAN, NAN, NAN]))
    assert found.tolist() == [True, True, *[False] * 6]


def told(loss_type, mask, log_probs, reference, ahead, rows, beta=0.3):
    """Loss, slopes and sums of `policy_loss`."""
    log_probs = log_probs.clone().requires_grad_()
    answers = Answers(
        "online_dpo", Policy(loss_type=loss_type, beta=beta), Counts(rows, 0.0, 9), 1.0, mask,
        ahead, None, reference,
    )  # fmt: skip
    found = policy_loss(log_probs, answers)
    found.loss.backward()
    return found.loss.detach(), log_probs.grad, found.sums


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_the_loss_and_its_slopes_are_the_formula_s(loss_type):
    """Rafailov et al. (2305.18290, equation 7) and Azar et al. (2310.12036, equation 17), in fp64;
    the last pair does not count."""
    random = torch.Generator().manual_seed(5)
    mask = (torch.arange(7) < torch.tensor([3, 7, 1, 4, 5, 2]).unsqueeze(1)).double()
    mask[4:] = 0
    log_probs, reference = (
        -torch.rand(6, 7, generator=random, dtype=torch.float64) * 4 for _ in "12"
    )
    ahead = torch.tensor([1.0, -1, -1, 1, 1, -1]).double()
    loss, slope, sums = told(loss_type, mask, log_probs, reference, ahead, 4)
    free = log_probs.clone().requires_grad_()
    ratio = ((free - reference) * mask).sum(1)
    margins = torch.stack((ratio[0] - ratio[1], ratio[3] - ratio[2]))
    if loss_type == "sigmoid":
        expected = -torch.nn.functional.logsigmoid(0.3 * margins).mean()
    else:
        expected = (margins - 1 / 0.6).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(slope, free.grad, atol=1e-12, rtol=1e-12)
    ratio, margins = ratio.detach(), margins.detach()
    by_hand = [
        float(0.3 * (ratio[0] + ratio[3])), float(0.3 * (ratio[1] + ratio[2])),
        float(ratio[:4].sum()), float((margins > 0).sum()), float(mask.sum()),
    ]  # fmt: skip
    assert sums.tolist() == pytest.approx(by_hand, abs=1e-12)


@contextmanager
def making(folder):
    """What makes a `Learning` of reward functions in a folder."""
    (folder / "rewards.py").write_text(REWARDS)
    opened = []

    def made(*, policy=PAIRS, rollout=ROLLOUT, reward="even", groups=4, penalty=0.0, sample=None):
        judges = Judges(RewardSettings(funcs=(f"{folder / 'rewards.py'}:{reward}",)))
        opened.append(judges)
        prompts = [Prompt([n + 3, n + 4, 2][: 2 + n % 2], {"prompt": str(n)}) for n in range(6)]
        sampling = Sampling(
            rollout, prompts, groups, judges, lambda ids: " ".join(map(str, ids)),
            sample or sample_in_slots, END, 3, penalty,
        )  # fmt: skip
        return Learning("online_dpo", policy, sampling)

    yield made
    for judges in opened:
        judges.__exit__(None, None, None)


@pytest.fixture
def make(tmp_path):
    with making(tmp_path) as made:
        yield made


def built_for(micro_batch=4, **changes):
    recipe = make_recipe(
        "llama", micro_batch=micro_batch, accumulation=8 // micro_batch, method="lora", **changes
    )
    return start_adapters_at_random(make_built(recipe), 2, 0.1)


@torch.no_grad()
def plain_log_probs(model, learning, experience):
    """(answers,) under the model's own chances, by its own forward."""
    found = []
    for prompt, answer in zip(experience.prompts, experience.completions, strict=True):
        ids = torch.tensor([[*prompt.ids, *answer.ids]])
        logits = model(ids, use_cache=False).logits[0, len(prompt.ids) - 1 : -1]
        chances = torch.log_softmax(logits, -1)
        found.append(chances.gather(1, torch.tensor(answer.ids)[:, None]).sum())
    return torch.stack(found)


def test_an_iteration_s_loss_is_of_the_model_s_own_chances_beside_its_base(tmp_path):
    """Answers are sampled at 0.6; the loss is of chances at 1, with adapters on and off."""
    built = built_for(optimizer={"clip_norm": 0.0})
    with making(tmp_path) as make:
        learning = make()
        experience = roll_out(built, learning.sampling, 0)
        figures = iterate(built_for(optimizer={"clip_norm": 0.0}), learning, 0).figures
    model = built.model.eval()
    own = plain_log_probs(model, learning, experience)
    scales = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_B"):
            scales[name] = module.scaling
            module.scaling = dict.fromkeys(module.scaling, 0.0) if isinstance(
                module.scaling, dict
            ) else 0.0  # fmt: skip
    assert scales
    base = plain_log_probs(model, learning, experience)
    for name, module in model.named_modules():
        if name in scales:
            module.scaling = scales[name]
    ratios = (own - base).view(-1, 2)
    ahead = order_pairs(experience.rewards).view(-1, 2)
    margins = (ratios * ahead).sum(1)
    expected = -torch.nn.functional.logsigmoid(0.3 * margins).mean()
    assert float((own - base).abs().max()) > 1e-2
    assert figures["loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    assert figures["reward_margin"] == pytest.approx(float(0.3 * margins.mean()), abs=1e-6)
    assert figures["reward_accuracy"] == float((margins > 0).float().mean())
    assert "clipped_low" not in figures


METHODS = {
    "full": {"method": "full"},
    "freeze": {"method": "freeze", "freeze": Freeze(last_blocks=2)},
    "tied": {"config": CONFIGS["llama"] | {"tie_word_embeddings": True}},
    "recomputed": {"recompute_blocks": 2, "precision": "bf16-mixed"},
}


def whole_for(**changes):
    """A model whose own weights are trained, at a rate that moves them."""
    recipe = make_recipe(
        "llama", micro_batch=4, accumulation=2, objective="online_dpo", policy=PAIRS,
        rollout=ROLLOUT, sequence_length=ROLLOUT.width,
        optimizer={"clip_norm": 0.0, "learning_rate": 0.02}, **changes,
    )  # fmt: skip
    return make_built(recipe)


@pytest.mark.parametrize("changes", METHODS.values(), ids=METHODS)
def test_what_is_trained_itself_is_compared_with_a_copy_of_what_it_was(tmp_path, changes):
    """The loss of a second iteration, by hand, beside a model that nobody trained."""
    built, fresh = whole_for(**changes), whole_for(**changes)
    with making(tmp_path) as make:
        learning = make()
        iterate(built, learning, 0)
        experience = roll_out(built, learning.sampling, 1)
        own = plain_log_probs(built.model.eval(), learning, experience)
        built.model.train()
        figures = iterate(built, learning, 1).figures
    base = plain_log_probs(fresh.model.eval(), learning, experience)
    margins = ((own - base).view(-1, 2) * order_pairs(experience.rewards).view(-1, 2)).sum(1)
    expected = -torch.nn.functional.logsigmoid(0.3 * margins).mean()
    assert float((own - base).abs().max()) > 1e-2
    near = {"rel": 0.05} if "precision" in changes else {"abs": 1e-6}
    assert figures["loss"] == pytest.approx(float(expected), **near)
    assert figures["reward_margin"] == pytest.approx(float(0.3 * margins.mean()), **near)
    batch = make_batch()
    with find_adapter(built.recipe).switched_off(built.model):
        again = answer_log_probs(built, batch, 1.0).log_probs
    assert torch.equal(again, answer_log_probs(fresh, batch, 1.0).log_probs)
    assert not torch.equal(again, answer_log_probs(built, batch, 1.0).log_probs)


def test_a_run_of_all_weights_goes_on_to_the_bit(make, tmp_path):
    """No checkpoint has the reference: it is made of the starting weights again."""
    learning, whole, cut = make(), whole_for(), whole_for()
    figures = [iterate(whole, learning, i).figures for i in range(3)]
    iterate(cut, learning, 0)
    saved = save_checkpoint(tmp_path, 1, cut, "data")
    held = sum(p.nbytes for p in cut.model.parameters())
    assert (saved / "weights.safetensors").stat().st_size < 1.1 * held
    resumed = whole_for()
    load_checkpoint(saved, resumed, "data")
    again = [iterate(resumed, learning, i).figures for i in (1, 2)]
    for name, value in whole.model.named_parameters():
        assert torch.equal(value, dict(resumed.model.named_parameters())[name]), name
    for name in ("loss", "kl", "reward_margin", "grad_norm"):
        assert [f.get(name) for f in figures[1:]] == [f.get(name) for f in again], name


def test_pairs_of_which_nobody_judged_an_answer_teach_nothing(tmp_path):
    """Answers 1 and 6 have no reward: what is learned is what pairs 1 and 2 teach alone."""
    gradients = []
    with making(tmp_path) as make:
        for chosen in (range(8), range(2, 6)):
            built = built_for(optimizer={"clip_norm": 0.0})
            learning = make(reward="some")
            experience = roll_out(built, learning.sampling, 0)
            found = gradients_in(built)
            if len(chosen) == 8:
                figures = iterate(built, learning, 0).figures
                assert figures["unjudged"] == pytest.approx(2 / 8)
            else:
                kept = [experience.completions[i] for i in chosen]
                prompts = [experience.prompts[i] for i in chosen]
                rewards = dict(zip([c.ids for c in kept], [2.0, 0.0, 1.0, 2.0], strict=True))
                _teach(built, prompts, kept, [rewards[c.ids] for c in kept])
            gradients.append(dict(found))
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name], atol=1e-7, rtol=1e-5)


def _teach(built, prompts, completions, rewards):
    batch = lay_out([p.ids for p in prompts], [c.ids for c in completions], 10)
    with find_adapter(built.recipe).switched_off(built.model):
        reference = answer_log_probs(built, batch, 1.0).log_probs
    mask = answer_mask(batch.labels, torch.ones(4, dtype=torch.bool))
    answers = Answers(
        "online_dpo", PAIRS, Counts(4, float(mask.sum()), 5), 1.0, mask,
        order_pairs(torch.tensor(rewards)), None, reference,
    )  # fmt: skip
    step(built, [type(batch)(batch.input_ids, batch.labels, answers=answers)], 1)


def test_a_rollout_that_nobody_judged_changes_nothing_but_states(make):
    built = built_for()
    figures = iterate(built, make(reward="nobody"), 0).figures
    assert figures["loss"] == 0.0
    assert figures["grad_norm"] == 0.0


def test_answers_that_reach_their_limit_pay_for_it(make):
    ends = {"stop_token": [5, END], "length": [6, 8, 6, 8, 6]}
    order = ["length", "stop_token"] * 3 + ["stop_token", "length"]

    def sample(built, prompts, rollout, end, seed):
        return [Completion(tuple(ends[why]), (0.0,) * len(ends[why]), why) for why in order]

    built = built_for()
    plain = roll_out(built, make(sample=sample).sampling, 0)
    fined = roll_out(built, make(sample=sample, penalty=2.0).sampling, 0)
    assert plain.rewards.tolist() == pytest.approx([1.0, 0.0] * 3 + [0.0, 1.0])
    assert fined.rewards.tolist() == pytest.approx([-1.0, 0.0] * 3 + [0.0, -1.0])
    assert fined.by_function.tolist() == plain.by_function.tolist()
    assert order_pairs(fined.rewards).tolist() == [-1, 1] * 3 + [1, -1]


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_micro_batches_change_nothing(make, loss_type):
    learning = make(policy=replace(PAIRS, loss_type=loss_type), reward="some")
    found = []
    for rows in (8, 4, 2):
        built = built_for(rows, optimizer={"clip_norm": 0.0})
        gradients = gradients_in(built)
        found.append((iterate(built, learning, 0).figures, dict(gradients)))
    for figures, gradients in found[1:]:
        for name in ("loss", "kl", "reward_margin", "reward_accuracy", "entropy"):
            assert figures[name] == pytest.approx(found[0][0][name], abs=1e-6)
        for name, value in gradients.items():
            torch.testing.assert_close(value, found[0][1][name], atol=1e-7, rtol=1e-5)


def test_ties_are_left_to_other_prompts_where_asked(make):
    """`rollout.dynamic_sampling` draws further prompts in place of pairs of equal rewards."""
    built = built_for()
    learning = make(rollout=replace(ROLLOUT, dynamic_sampling=5), reward="first")
    made = roll_out(built, learning.sampling, 0)
    assert made.sampled_groups > 4
    plain = roll_out(built, make(reward="first").sampling, 0)
    assert plain.even_groups > 0
    kept = made.rewards.view(-1, 2)
    assert int((kept[:, 0] != kept[:, 1]).sum()) > int(
        (plain.rewards.view(-1, 2).diff(dim=1) != 0).sum()
    )


def test_the_base_keeps_every_bit(make):
    built = built_for()
    before = {n: p.clone() for n, p in built.model.named_parameters()}
    learning = dataclasses.replace(make(), policy=replace(PAIRS, loss_type="ipo"))
    for iteration in range(5):
        iterate(built, learning, iteration)
    changed = {n for n, p in built.model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {n for n in before if ".lora_" in n}
