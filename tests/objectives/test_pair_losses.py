"""Losses of pairs: slopes against autograd, and losses and gradients against TRL's own trainers."""

import json
from dataclasses import replace

import pytest
import torch

from formula_weights import (
    fill_by_formula,
    find_context,
    make_formula_pairs,
    mark_last,
    mismatch,
)
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.objectives import find_objective, objectives
from memfit.records.recipe import Preference
from memfit.records.request import Task
from memfit.train.step.preference import Rewards, judge
from memfit.train.step.rated import find_baseline, judge_rated
from memfit.train.step.step import Batch, RatedBatch, step
from neighbour_programs import run_program
from tiny_models import CONFIGS, gradients_in, make_built, make_recipe

REFERENCE = torch.tensor([-33.0, -18.0, -31.0, -19.0])  # as tests/other_trainers/trl_pairs.py
OF_OTHERS = torch.tensor([-20.0, -30.0, -19.0, -33.0])
PAIRS = [
    (o, t) for o in objectives if find_objective(o).pairs for t in find_objective(o).loss_types
]
RATED = [("kto", t) for t in find_objective("kto").loss_types]
LOSSES = [f"{o} {t}" for o, t in PAIRS]
ALL = {f"{o} {t}": (o, t) for o, t in PAIRS + RATED}


def preference_of(objective, loss, **changes):
    found = find_objective(objective)
    e = 0.1 if found.find_loss(loss).needs_smoothing or loss == "robust" else 0.0
    weight = (0.7 if found.weight is None else found.weight) if found.learns else 0.0
    given = {
        "cross_entropy": weight, "beta": 1.0 if found.scores else 0.3,
        "center": 0.25 if found.scores else 0.0, "label_smoothing": e, "loss_type": loss,
        "gamma": 0.5 if loss == "simpo" else 0.0, "tau": 0.05 if loss == "discopop" else 0.0,
        "reference": "precomputed" if found.refers else "none",
        "desirable": 1.25 if found.rated else 0.0, "undesirable": 0.75 if found.rated else 0.0,
    }  # fmt: skip
    return Preference(**(given | changes))


def test_every_objective_can_be_stated_and_no_other():
    for name in objectives:
        assert Task(objective=name).objective == name
    with pytest.raises(UnknownName, match=r"(?s)`dpoo`.*did you mean `dpo`"):
        Task(objective="dpoo")


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(("objective", "loss"), PAIRS, ids=LOSSES)
def test_slopes_are_autograds(objective, loss, smoothing):
    found = find_objective(objective).find_loss(loss)
    if smoothing and not found.smooths:
        smoothing = 0.0
    if found.needs_smoothing:
        smoothing = smoothing or 0.1
    knobs = preference_of(objective, loss, label_smoothing=smoothing)
    random = torch.Generator().manual_seed(1)
    rewards = torch.randn(2, 40, generator=random, dtype=torch.float64) * 2
    if objective == "orpo":  # beta times a log-probability
        rewards = -rewards.abs()
    rewards.requires_grad_()
    losses, *slopes = found.loss(*rewards, knobs)
    (expected,) = torch.autograd.grad(losses.sum(), rewards)
    torch.testing.assert_close(torch.stack(slopes), expected)


# each is the equation that its source prints, of rewards c and r
WORKED = {
    "sigmoid": (0.0, 0.0, 0.6931471805599453), "simpo": (0.5, 0.0, 0.6931471805599453),
    "sigmoid_norm": (0.0, 0.0, 0.6931471805599453), "robust": (0.0, 0.0, 0.6931471805599453),
    "exo_pair": (0.0, 0.0, 0.5 * (2 * 0.5108256237659907)), "hinge": (0.75, 0.25, 0.5),
    "ipo": (0.0, 0.0, (0.5 / 0.3) ** 2), "apo_zero": (0.0, 0.0, 1.0), "apo_down": (0.0, 0.0, 1.0),
    "sppo_hard": (0.5, -0.5, 0.0), "bco_pair": (0.0, 0.0, 2 * 0.6931471805599453),
    "bradley_terry": (0.5, 0.5, 0.6931471805599453 + 0.25),
    "orpo": (-0.3, -0.3, 0.3 * 0.6931471805599453),
    "nca_pair": (0.0, 0.0, 2 * 0.6931471805599453), "discopop": (0.0, 0.0, 0.8465735902799727),
}  # fmt: skip


@pytest.mark.parametrize(("objective", "loss"), PAIRS, ids=LOSSES)
def test_losses_worked_by_hand(objective, loss):
    chosen, rejected, expected = WORKED[loss]
    knobs = preference_of(objective, loss)
    rewards = (torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected))
    found = find_objective(objective).find_loss(loss).loss(*rewards, knobs)
    assert float(found.values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("objective", "loss"), PAIRS, ids=LOSSES)
def test_a_micro_batchs_loss_and_slope_are_the_formulas(objective, loss):
    """Of three pairs, one of which is padding: the mean of two, by autograd in fp64."""
    found, knobs = find_objective(objective), preference_of(objective, loss)
    labels = torch.tensor([[1, 2, -100, 3], [1, -100, -100, -100], [1, 1, 1, 1], [2, 2, 2, -100],
                           [-100] * 4, [-100] * 4])  # fmt: skip
    policy = torch.linspace(-6, -1, 6, dtype=torch.float64)
    policy[4:] = 0
    policy.requires_grad_()
    reference = torch.linspace(-5, 1, 6, dtype=torch.float64) if found.refers else None
    compared = policy if reference is None else policy - reference
    if loss in ("ipo", "sigmoid_norm", "simpo", "orpo"):  # the papers of which take means
        compared = compared / torch.tensor([3, 1, 4, 3, 1, 1])
    gains = compared[:4] * knobs.beta
    expected = found.find_loss(loss).loss(gains[::2], gains[1::2], knobs).values.sum() / 2
    nats = -policy[:4:2].sum()
    expected = expected + knobs.cross_entropy * nats / 5
    (slope,) = torch.autograd.grad(expected, policy)
    recipe = make_recipe("llama", objective=objective, preference=knobs)
    rewards = Rewards()
    mine = judge(policy, reference, labels, recipe, 2, rewards, beside=5)
    torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(torch.autograd.grad(mine, policy)[0], slope)
    won = (gains[::2] > gains[1::2]).double().sum()
    sums = torch.stack((gains[::2].sum(), gains[1::2].sum(), won))
    if found.learns:
        sums = torch.cat((sums, (nats * 2 / 5).view(1)))
    torch.testing.assert_close(rewards.sums.double(), sums)


def names_of(objective, loss):
    """TRL's trainer, and its settings for the same loss."""
    knobs = preference_of(objective, loss)
    if objective == "orpo":
        return "orpo", {"beta": knobs.beta}
    if objective == "reward":
        return "reward", {"center_rewards_coefficient": knobs.center}
    if objective == "kto":
        weights = {"desirable_weight": knobs.desirable, "undesirable_weight": knobs.undesirable}
        return "kto", {"beta": knobs.beta, "loss_type": loss, **weights}
    if objective in ("simpo", "cpo"):
        settings = {"loss_type": loss, "cpo_alpha": knobs.cross_entropy, "simpo_gamma": knobs.gamma}
        return "cpo", {"beta": knobs.beta, **settings}
    settings = {"loss_type": [loss], "label_smoothing": knobs.label_smoothing}
    return "dpo", {"beta": knobs.beta, "discopop_tau": 0.05, **settings}


@pytest.fixture(scope="module")
def trl():
    cases = [(f"{o} {t}", *names_of(o, t), CONFIGS["llama"]) for o, t in ALL.values()]
    found = run_program("trl_pairs.py", text=json.dumps(cases))
    return json.loads(found.splitlines()[-1])


CUT = {"loss": "chunked", "loss_chunk": 12}
BOTH_WAYS = {name: (*of, {}) for name, of in ALL.items()} | {
    f"{o} {t}, chunked": (o, t, CUT) for o, t in ALL.values() if not find_objective(o).scores
}


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "loss", "cut"), BOTH_WAYS.values(), ids=BOTH_WAYS)
def test_losses_and_gradients_are_those_of_trl(objective, loss, cut, trl):
    recipe = make_recipe(
        "llama", objective=objective, preference=preference_of(objective, loss),
        micro_batch=4, optimizer={"clip_norm": 0.0}, **cut,
    )  # fmt: skip
    built = make_built(recipe)
    fill_by_formula(built.model, 0.1)
    seen = gradients_in(built)
    ids, labels = make_formula_pairs(12)
    count = 4 if find_objective(objective).rated else 2
    result = step(built, [batch_of(objective, ids, labels, loss=loss)], count)
    expected, gradients = trl[f"{objective} {loss}"]
    assert float(result.loss) == pytest.approx(expected, rel=1e-6)
    assert set(seen) == set(gradients)
    assert distance(seen, {name: torch.tensor(gradients[name]) for name in seen}) < 1e-6


def batch_of(objective, ids, labels, rows=slice(None), loss="kto"):
    """Some of the pairs' rows, with what the objective reads beside them."""
    found = find_objective(objective)
    if found.scores:
        labels = mark_last(ids, labels)
    context = find_context(ids, labels)
    beside = int((labels[::2] != -100).sum())
    if found.learns == "conversations":
        beside += int((context != -100).sum())
    rated = None
    if found.rated:
        rated = RatedBatch(torch.tensor([True, False, True, False])[rows])
        if loss == "kto":
            wrong, of_wrong = mismatch(ids, labels)
            rated = replace(
                rated, input_ids=wrong[rows], labels=of_wrong[rows], reference=OF_OTHERS[rows]
            )
    return Batch(
        ids[rows], labels[rows], reference=REFERENCE[rows] if found.refers else None, rated=rated,
        context=context[rows] if found.learns == "conversations" else None, beside=beside,
    )  # fmt: skip


def distance(mine, theirs):
    """The norm of what gradients differ by, over their norm: of all parameters together."""
    a, b = (torch.cat([g[name].flatten().double() for name in mine]) for g in (mine, theirs))
    return float((a - b).norm() / b.norm())


def test_how_pairs_are_cut_into_micro_batches_changes_nothing():
    ids, labels = make_formula_pairs(12)
    for objective, loss in [*PAIRS, ("kto", "apo_zero_unpaired")]:
        found = []
        for rows in (2, 4):
            preference = preference_of(objective, loss)
            recipe = make_recipe(
                "llama", objective=objective, preference=preference, micro_batch=rows,
                accumulation=4 // rows, optimizer={"clip_norm": 0.0},
            )  # fmt: skip
            built = make_built(recipe)
            fill_by_formula(built.model, 0.1)
            seen = gradients_in(built)
            parts = [
                batch_of(objective, ids, labels, slice(at, at + rows), loss)
                for at in range(0, 4, rows)
            ]
            found.append((step(built, parts, 4 if find_objective(objective).rated else 2), seen))
        (a, one), (b, two) = found
        torch.testing.assert_close(a.loss, b.loss)
        torch.testing.assert_close(a.rewards, b.rewards)
        assert distance(one, two) < 1e-6, loss


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_rated_answers_are_judged_by_the_formula(loss):
    """2402.01306, equation 8, of four answers and one row of padding, by autograd in fp64."""
    knobs = preference_of("kto", loss)
    labels = torch.tensor([[1, 2], [3, -100], [4, 5], [6, 7], [-100, -100]])
    desirable = torch.tensor([True, False, False, True, False])
    policy = torch.linspace(-6, -1, 5, dtype=torch.float64).requires_grad_()
    reference = torch.linspace(-5, -3, 5, dtype=torch.float64)
    own, below = torch.linspace(-4, -1, 5).double(), torch.linspace(-5, 9, 5).double()
    own[4] = below[4] = 0
    z0 = None
    expected_z0 = 0.0
    if loss == "kto":
        z0 = find_baseline(own, below + 6.0, labels)
        assert float(z0) == 0.0  # it is never below
        z0 = find_baseline(own, below - 6.0, labels)
        expected_z0 = float((own - below + 6.0)[:4].mean())
        assert float(z0) == pytest.approx(expected_z0)
    gains = knobs.beta * (policy - reference - expected_z0)
    values = torch.where(desirable, 1.25 * (1 - gains.sigmoid()), 0.75 * (1 - (-gains).sigmoid()))
    expected = values[:4].sum() / 4
    (slope,) = torch.autograd.grad(expected, policy)
    recipe = make_recipe("llama", objective="kto", preference=knobs)
    rewards = Rewards()
    mine = judge_rated(policy, reference, z0, desirable, labels, recipe, 4, rewards)
    torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(torch.autograd.grad(mine, policy)[0], slope)
    plain = (knobs.beta * (policy - reference)).tolist()
    sums = [
        plain[0] + plain[3],
        plain[1] + plain[2],
        2,
        2,
        *([] if z0 is None else [4 * float(z0)]),
    ]
    assert rewards.sums.tolist() == pytest.approx(sums)


def test_a_baseline_is_of_its_micro_batch_and_says_so():
    ids, labels = make_formula_pairs(12)
    found = []
    for rows in (2, 4):
        recipe = make_recipe(
            "llama", objective="kto", preference=preference_of("kto", "kto"), micro_batch=rows,
            accumulation=4 // rows, optimizer={"clip_norm": 0.0},
        )  # fmt: skip
        built = make_built(recipe)
        fill_by_formula(built.model, 0.1)
        parts = [batch_of("kto", ids, labels, slice(at, at + rows)) for at in range(0, 4, rows)]
        found.append((recipe.course, float(step(built, parts, 4).loss)))
    (one, a), (other, b) = found
    assert one != other
    assert a != pytest.approx(b, rel=1e-6)


REFUSED = {
    "weights of pairs": ("dpo", {"desirable": 2.0}, "whose answers are pairs"),
    "unknown": ("dpo", {"loss_type": "sigmoud"}, "did you mean `sigmoid`"),
    "sorted": ("dpo", {"loss_type": "aot"}, "depend on how it is cut"),
    "a beta of scores": ("reward", {"loss_type": "bradley_terry"}, "are rewards as they are"),
    "a centre of log-probabilities": ("dpo", {"center": 0.1}, "which has no scores"),
    "of another objective": ("simpo", {"loss_type": "ipo"}, "is not a loss of `objective: simpo`"),
    "not smoothed": ("dpo", {"loss_type": "hinge", "label_smoothing": 0.1}, "which has none"),
    "not smoothed at all": ("dpo", {"loss_type": "exo_pair"}, "whose logarithm it takes"),
}


@pytest.mark.parametrize(("objective", "changes", "said"), REFUSED.values(), ids=REFUSED)
def test_what_a_loss_does_not_have_is_refused(objective, changes, said):
    with pytest.raises(InvalidRequest) as raised:
        find_objective(objective).check(Preference(beta=0.1, **changes))
    assert said in f"{raised.value.message} {raised.value.hint}"
