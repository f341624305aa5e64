"""PPO's iteration: losses and gradients against plain autograd, and the value's own adapter.

The oracle runs one row at a time through peft's own `set_adapter` and `disable_adapter` and writes
the equations of 1506.02438 and 1707.06347 out in plain numbers, as TRL 1.12's `PPOTrainer` does.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from torch.func import functional_call

from memfit.records.ledger import Phase
from memfit.records.recipe import Freeze
from memfit.records.reinforcement import Policy, RewardSettings, Rollout, ValueSettings
from memfit.train.generation.settings import Completion
from memfit.train.rl.judging import Judges
from memfit.train.rl.learn import Learning, iterate
from memfit.train.rl.rehearsal import Constant
from memfit.train.rl.rewards.process import Judged
from memfit.train.rl.rollout import Prompt, Sampling
from memfit.train.step.step import row_values
from tiny_models import draw_answers, gradients_in, make_batch, make_built, make_recipe

MOST, END = 6, 1
LENGTHS = (3, 6, 1, 4)
SCORES = (1.0, -0.5, 2.0, 0.25)
PROMPTS = ([5, 6, 7], [8, 9, 3, 4, 6], [5, 6, 7], [8, 9])
ROLLOUT = Rollout(
    num_generations=1, max_prompt_length=5, max_completion_length=MOST, temperature=0.8
)
POLICY = Policy(beta=0.3, num_iterations=2)
SETTINGS = {
    "plain": (POLICY, ValueSettings()),
    "discounted": (POLICY, ValueSettings(gamma=0.9, lam=0.7)),
    "clipped": (replace(POLICY, epsilon=0.01, epsilon_high=0.01),
                ValueSettings(cliprange_value=0.01, vf_coef=0.5)),
    "white rewards": (POLICY, ValueSettings(whiten_rewards=True)),
    "without a reference": (replace(POLICY, beta=0.0), ValueSettings()),
    "one update": (replace(POLICY, num_iterations=1), ValueSettings()),
}  # fmt: skip


def make_answers():
    return draw_answers(LENGTHS, MOST, END)


class Scores(Constant):
    """Stated rewards of each prompt; NaN is none."""

    scores = SCORES

    def judge(self, prompts, completions, completion_ids, columns):
        own = [self.scores[int(prompt)] for prompt in prompts]
        return Judged(tuple(None if s != s else s for s in own), Counter())


def make_learning(policy, value, answers, judge=Scores):
    judges = Judges(RewardSettings(funcs=("number",)), start=judge)
    prompts = [Prompt(ids, {"prompt": str(n)}) for n, ids in enumerate(PROMPTS)]

    def sample(built, prompts, rollout, end, seed):
        rows = [next(n for n, p in enumerate(PROMPTS) if p is ids) for ids in prompts]
        return [
            Completion(answers[n], [0.0] * len(answers[n]),
                       "stop_token" if answers[n][-1] == END else "length")
            for n in rows
        ]  # fmt: skip

    sampling = Sampling(ROLLOUT, prompts, len(PROMPTS), judges, str, sample, END, 0)
    return Learning("ppo", policy, sampling, value)


def make(cut=4, family="llama", **changes):
    recipe = make_recipe(
        family, objective="ppo", micro_batch=cut, accumulation=4 // cut, rollout=ROLLOUT,
        sequence_length=ROLLOUT.width, **{"method": "lora", "policy": POLICY, **changes},
    )  # fmt: skip
    recipe = replace(recipe, optimizer=replace(recipe.optimizer, clip_norm=0.0, learning_rate=0.02))
    built = make_built(recipe)
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():  # away from the start, at which the policy is the reference
        for name, parameter in built.model.named_parameters():
            if ".lora_B." in name or name.endswith("score.weight"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=random))
            elif not built.recipe.adapted and parameter.requires_grad:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=random))
    return built


class Alone:
    """One of the models that full training has, with weights of its own and the others' modules."""

    def __init__(self, built, of):
        self.model, named = built.model, dict(built.model.named_parameters())
        self.own = {n: p for n, p in named.items() if not n.startswith("value.")}
        if of == "value":
            self.own |= {
                n.removeprefix("value."): p for n, p in named.items() if n.startswith("value.")
            }
        if of == "reference":
            self.own |= dict(make_built(built.recipe).model.named_parameters())

    def __call__(self, ids, part=""):
        own = {n.removeprefix(part): p for n, p in self.own.items() if n.startswith(part)}
        return functional_call(self.model.get_submodule(part.rstrip(".")), own, (ids,))


def run_rows(built, answers, of):
    """Of each row: log-probabilities of its answer's tokens, or values of its places."""
    model, found = built.model, []
    run = model if built.recipe.adapted else Alone(built, of)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, start = torch.tensor([[*prompt, *answer]]), len(prompt) - 1
        if of == "value":
            base = model.get_base_model() if built.recipe.adapted else model
            prefix = f"{base.base_model_prefix}."
            made = base.model(ids) if built.recipe.adapted else run(ids, prefix)
            values = base.score(made.last_hidden_state)[0, :, 0]
            found.append(values[start : start + min(len(answer) + 1, MOST)])
            continue
        logits = run(ids).logits[0] / ROLLOUT.temperature
        chances = torch.log_softmax(logits, -1)
        found.append(chances[range(start, start + len(answer)), answer])
    return found


def run_as(built, answers, of):
    """The same under peft's own choice of the adapter, or of one of three models."""
    if not built.recipe.adapted:
        return run_rows(built, answers, of)
    if of == "reference":
        with built.model.disable_adapter():
            return run_rows(built, answers, of)
    built.model.set_adapter("value" if of == "value" else "default")
    try:
        return run_rows(built, answers, of)
    finally:
        built.model.set_adapter("default")
        for name, parameter in built.model.named_parameters():
            parameter.requires_grad_(".lora_" in name or name.endswith("score.weight"))


def restate(built, answers, policy, value, before):
    """The loss of one update; before: log-probabilities, the reference's, and values, detached."""
    old, reference, was = before
    gains, goals, rewards = [], [], []
    for row, answer in enumerate(answers):
        n, places = len(answer), len(was[row])
        own = [0.0] * places
        for at in range(n):
            own[at] = -policy.beta * float(old[row][at] - reference[row][at])
        own[places - 1] += SCORES[row]
        rewards.append(torch.tensor(own))
    if value.whiten_rewards:
        every = torch.cat(rewards)
        spread = (every.var() + 1e-8).sqrt()
        rewards = [(r - every.mean()) / spread + every.mean() for r in rewards]
    for row, answer in enumerate(answers):
        places, running = len(was[row]), 0.0
        mine = [0.0] * places
        for at in reversed(range(places)):
            after = float(was[row][at + 1]) if at + 1 < places else 0.0
            surprise = float(rewards[row][at]) + value.gamma * after - float(was[row][at])
            running = surprise + value.gamma * value.lam * running
            mine[at] = running
        gains += mine[: len(answer)]
        goals.append(torch.tensor(mine) + was[row])
    gains = torch.tensor(gains)
    gains = (gains - gains.mean()) / (gains.var() + 1e-8).sqrt()
    ratio = (torch.cat(run_as(built, answers, "policy")) - torch.cat(old)).exp()
    bound = ratio.clamp(1 - policy.epsilon, 1 + policy.epsilon_high)
    loss = torch.maximum(-gains * ratio, -gains * bound).mean()
    loss.backward()
    now, was, goals = torch.cat(run_as(built, answers, "value")), torch.cat(was), torch.cat(goals)
    near = torch.clamp(now, was - value.cliprange_value, was + value.cliprange_value)
    squares = torch.maximum((now - goals).square(), (near - goals).square())
    of_value = 0.5 * value.vf_coef * squares.mean()
    of_value.backward()
    return float((loss + of_value).detach()), float(squares.detach().mean() / 2)


def restated_updates(policy, value, answers, **changes):
    """Losses and gradients of all updates with one rollout, by the recipe's own optimizer."""
    built = make(**changes)
    with torch.no_grad():
        before = [run_as(built, answers, of) for of in ("policy", "reference", "value")]
    found = []
    for _ in range(policy.num_iterations):
        losses = restate(built, answers, policy, value, before)
        named = built.model.named_parameters()
        gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        found.append((*losses, gradients))
        built.optimizer.step()
        built.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("cut", [4, 2])
@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradients_are_those_of_plain_autograd(name, cut):
    policy, value = SETTINGS[name]
    answers = make_answers()
    theirs = restated_updates(policy, value, answers)
    built = make(cut)
    gradients = gradients_in(built)
    made = iterate(built, make_learning(policy, value, answers), 0).figures
    loss, _, expected = theirs[-1]
    assert made["loss"] == pytest.approx(loss, abs=1e-6)
    assert made["value_loss"] == pytest.approx(
        sum(t[1] for t in theirs) / len(theirs), abs=1e-6, rel=1e-5
    )
    assert gradients.keys() == expected.keys()
    assert any(".value." in n for n in gradients)
    most = max(float(g.abs().max()) for g in expected.values())
    for key, gradient in expected.items():
        assert float((gradients[key] - gradient).abs().max()) < 1e-6 * most, key
    if name == "clipped":
        assert made["clipped_low"] + made["clipped_high"] > 0
        assert made["clipped_values"] > 0


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"method": "full"}),
        ("gpt_neox", {"method": "full"}),
        ("qwen3", {"method": "full"}),  # whose head is its embedding
        ("llama", {"method": "freeze", "freeze": Freeze(last_blocks=2)}),
    ],
)
def test_all_weights_are_learned_as_three_models_would_be(family, changes):
    """By functional calls of each model's own weights; the frozen ones of freeze are shared."""
    policy, value = SETTINGS["clipped"]
    answers = make_answers()
    theirs = restated_updates(policy, value, answers, family=family, **changes)
    built = make(2, family=family, **changes)
    gradients = gradients_in(built)
    made = iterate(built, make_learning(policy, value, answers), 0).figures
    loss, _, expected = theirs[-1]
    assert made["loss"] == pytest.approx(loss, abs=1e-6)
    assert gradients.keys() == expected.keys()
    own = {n.removeprefix("value.") for n in expected if n.startswith("value.")}
    heads = {"lm_head.weight", "score.weight"}
    assert own == {n for n in expected if not n.startswith("value.")} - heads
    most = max(float(g.abs().max()) for g in expected.values())
    for key, gradient in expected.items():
        # behind an update by AdamW, which divides small gradients by themselves
        assert float((gradients[key] - gradient).abs().max()) < 1e-5 * most, key


def test_a_value_of_all_weights_begins_as_the_policy():
    """And the first numbers of the policy are those that it has without a value."""
    recipe = replace(make(method="full").recipe, policy=POLICY)
    named = dict(make_built(recipe).model.named_parameters())
    plain = make_built(make_recipe("llama", objective="pretrain", method="full")).model
    for name, weight in plain.named_parameters():
        assert torch.equal(named[name], weight), name
        if name != "lm_head.weight":
            assert torch.equal(named[f"value.{name}"], weight), name
            assert named[f"value.{name}"] is not named[name]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_blocks_that_are_recomputed_change_nothing(method):
    """The value's adapter, or its copy of the weights, runs in its backward, too, where its blocks
    are made a second time."""
    answers, found = make_answers(), []
    for blocks in (0, 3):
        built = make(2, recompute_blocks=blocks, method=method)
        gradients = gradients_in(built)
        iterate(built, make_learning(POLICY, ValueSettings(), answers), 0)
        found.append(gradients)
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient)


@pytest.mark.parametrize(("recomputed", "method"), [(0, "lora"), (3, "lora"), (0, "full")])
def test_activations_that_wait_on_the_host_change_no_bit(recomputed, method):
    """Neither the policy's nor the value's, whose blocks are the same modules."""
    answers, found = make_answers(), []
    for offload in ("none", "activations"):
        built = make(2, recompute_blocks=recomputed, offload=offload, method=method)
        gradients = gradients_in(built)
        iterate(built, make_learning(POLICY, ValueSettings(), answers), 0)
        found.append(gradients)
    assert [n for n, g in found[0].items() if not torch.equal(g, found[1][n])] == []


def test_an_answer_that_nobody_judged_teaches_nothing():
    class Without(Scores):
        scores = (1.0, float("nan"), 2.0, 0.25)

    found = []
    for last in (END + 4, END + 5):
        answers = make_answers()
        answers[1][-1] = last
        built = make()
        gradients = gradients_in(built)
        made = iterate(built, make_learning(POLICY, ValueSettings(), answers, Without), 0)
        assert made.figures["unjudged"] == 0.25
        found.append(gradients)
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=0, atol=0)


def test_policy_and_value_are_learned_one_after_the_other():
    """Each phase in its turn, and the policy's adapter runs once values have been learned."""
    built, seen = make(2), []
    observer = SimpleNamespace(
        enter=seen.append, register_batch=lambda *_: None, register_cache=lambda *_: None
    )
    one = replace(POLICY, num_iterations=1)
    iterate(built, make_learning(one, ValueSettings(), make_answers()), 0, observer=observer)
    assert seen == [
        Phase.SCORE, Phase.REFERENCE, Phase.VALUES,
        *[Phase.FORWARD] * 2, Phase.LOSS, Phase.BACKWARD,  # the inputs', and the step's
        *[Phase.ACCUMULATE] * 3, Phase.OPTIMIZER_STEP,
    ]  # fmt: skip
    batch = make_batch()
    valued = row_values(built, batch)
    assert valued.shape == batch.labels.shape
    hidden = built.model.base_model.model.model(batch.input_ids).last_hidden_state
    assert not torch.allclose(built.model.base_model.model.score(hidden)[..., 0], valued)


def test_the_base_is_as_it_was():
    built = make(2)
    before = {n: p.clone() for n, p in built.model.named_parameters()}
    for number in range(3):
        iterate(built, make_learning(POLICY, ValueSettings(), make_answers()), number)
    for name, parameter in built.model.named_parameters():
        learned = ".lora_" in name or name.endswith("score.weight")
        assert torch.equal(parameter, before[name]) != learned, name
