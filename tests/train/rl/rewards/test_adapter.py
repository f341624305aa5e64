"""A reward model's adapter on the base that is trained: its scores, and what is refused."""

import json

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from memfit.adapters.shared.stored import check_stored
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.records.model import ModelReference
from memfit.records.recipe import Lora
from memfit.records.reinforcement import Policy, RewardAdapter, RewardSettings, Rollout
from memfit.train.rl.rewards.adapter import scores_of
from memfit.train.rl.rewards.process import take_finite
from memfit.train.step.build import build_model, check_census
from reward_adapters import change_config, classifier, read_adapter, reward_of, write_adapter
from tiny_models import CONFIGS, make_built, make_recipe

ROLLOUT = Rollout(num_generations=2, max_prompt_length=6, max_completion_length=6)
ROWS = [([5, 6, 7], [9, 4]), ([8], [3, 3, 3, 3, 2, 1]), ([4, 9, 4, 9, 4, 9], [7]), ([1, 2], [2])]
TARGETS = ("k_proj", "o_proj")  # the policy has q_proj and v_proj


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base, and a reward model's adapter of it."""
    root = tmp_path_factory.mktemp("reward")
    classifier(CONFIGS["llama"]).save_pretrained(root / "base")
    # a policy's own head, which a classifier's file lacks
    file = root / "base" / "model.safetensors"
    held = load_file(file)
    del held["score.weight"]
    torch.manual_seed(5)
    held["lm_head.weight"] = torch.randn_like(held["model.embed_tokens.weight"]) / 8
    save_file(held, file, metadata={"format": "pt"})
    return root / "base", write_adapter(root / "adapter", root / "base", targets=TARGETS)


def recipe_of(place, objective="grpo", *, reward=None, **changes):
    base, adapter = place
    config = json.loads((base / "config.json").read_text())
    made = make_recipe(
        objective=objective, method="lora", micro_batch=2, accumulation=2,
        sequence_length=ROLLOUT.width, rollout=ROLLOUT, policy=Policy(), weights="pretrained",
        reward=reward_of(adapter, targets=TARGETS) if reward is None else reward, **changes,
    )  # fmt: skip
    return replace(made, model=ModelReference(name="base", source=str(base), config=config))


@pytest.mark.parametrize("objective", ["grpo", "ppo"])
def test_scores_are_those_of_transformers_and_peft_and_the_policy_runs_again_after_them(
    place, objective
):
    """Of rows of different lengths, each alone and without padding; padding changes nothing."""
    rollout = replace(ROLLOUT, num_generations=1 if objective == "ppo" else 2)
    built = make_built(replace(recipe_of(place, objective), rollout=rollout))
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    before = built.model(ids).logits
    found = scores_of(built, ROLLOUT)(*map(list, zip(*ROWS, strict=True)))
    theirs = read_adapter(place[1], place[0])
    with torch.no_grad():
        expected = [float(theirs(torch.tensor([p + a])).logits) for p, a in ROWS]
    assert found == pytest.approx(expected, abs=1e-6)
    assert len({round(score, 4) for score in found}) == len(ROWS)
    torch.testing.assert_close(built.model(ids).logits, before, rtol=0, atol=0)
    trained = [n for n, p in built.model.named_parameters() if p.requires_grad]
    assert trained
    assert not any("reward" in name for name in trained)


def test_an_adapter_of_one_model_is_frozen_beside_codes_and_never_coded_itself():
    """In the precision's own format, as embeddings are; a base in four bits is the policy's."""
    adapter = RewardAdapter(rank=8, alpha=8.0, targets=("q_proj", "o_proj"))
    recipe = make_recipe(
        config=CONFIGS["llama"] | {"hidden_size": 64, "intermediate_size": 128}, method="lora",
        objective="ppo", base_format="nf4", precision="bf16-mixed", rollout=ROLLOUT,
        sequence_length=ROLLOUT.width, policy=Policy(beta=0.05),
        reward=RewardSettings(funcs=("adapter:nowhere",), adapter=adapter),
    )  # fmt: skip
    recipe = replace(recipe, rollout=replace(ROLLOUT, num_generations=1))
    model = build_model(recipe, "meta")
    check_census(model, recipe)
    rows = {n: p for n, p in model.named_parameters() if ".reward." in n or "reward_score" in n}
    layers = read_model(recipe.model).architecture.layers
    assert len(rows) == layers * 2 * 2 + 1
    assert {p.dtype for p in rows.values()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in rows.values())


def test_a_score_that_is_no_number_is_no_reward():
    found = take_finite([1.5, float("nan"), float("inf"), -2.0])
    assert found.rewards == (1.5, None, None, -2.0)
    assert found.failures == {"not finite": 2}
    assert not take_finite([0.0]).failures


def test_what_is_stored_must_be_what_is_stated(place):
    check_stored(recipe_of(place))
    for changes, words in (
        ({"rank": 8}, "`reward.adapter.rank` is 8, and .* has 4"),
        ({"targets": ("q_proj", "o_proj")}, "`reward.adapter.targets` is o_proj, q_proj, and .*"),
        ({"alpha": 4.0}, "`reward.adapter.alpha` is 4.0, and .* has 8.0"),
        ({"scaling": "rank-stabilised"}, "`reward.adapter.scaling` is rank-stabilised"),
    ):
        recipe = recipe_of(place)
        own = replace(recipe.reward.adapter, **changes)
        own = replace(own, targets=tuple(sorted(own.targets)))
        with pytest.raises(InvalidRequest, match=words):
            check_stored(replace(recipe, reward=replace(recipe.reward, adapter=own)))


def spoil(folder, change) -> None:
    """Write other tensors into an adapter's file."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


HEAD = "base_model.model.score.weight"
DOWN = "base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight"


def turned(tensors):
    tensors[DOWN] = tensors[DOWN][:2].contiguous()


SPOILT = {
    "another base": (
        lambda f: change_config(f, base_model_name_or_path="else/where"),
        "is an adapter of `else/where`, and the model is `.*base`",
    ),
    "dora": (lambda f: change_config(f, use_dora=True), "`use_dora: True`.*`use_dora: False`"),
    "a rank of its own": (
        lambda f: change_config(f, rank_pattern={"k_proj": 2}), "has `rank_pattern: {'k_proj': 2}`"
    ),
    "a pattern": (lambda f: change_config(f, target_modules=".*proj"), "is no list of names"),
    "no head": (lambda f: change_config(f, modules_to_save=None), "has `modules_to_save: None`"),
    "no file": (lambda f: (f / "adapter_model.safetensors").unlink(), "cannot read"),
    "no tensor of a target": (
        lambda f: spoil(f, lambda t: t.pop(DOWN)), "has no tensor `.*k_proj.lora_A.weight`"
    ),
    "another rank": (lambda f: spoil(f, turned), r"has shape \(2, .*needs \(4, "),
    "no tensor of the head": (
        lambda f: spoil(f, lambda t: t.pop(HEAD)), "`.*score.weight`, the score's head"
    ),
    "more than the targets": (
        lambda f: spoil(f, lambda t: t.update(extra=torch.zeros(1))), "has a tensor `extra`"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), SPOILT.values(), ids=SPOILT)
def test_an_adapter_that_is_not_for_this_base_is_refused_by_name(place, tmp_path, change, words):
    adapter = write_adapter(tmp_path / "adapter", place[0], targets=TARGETS)
    recipe = recipe_of((place[0], adapter))
    check_stored(recipe)
    change(adapter)
    with pytest.raises(InvalidRequest, match=words) as raised:
        check_stored(recipe)
    assert raised.value.hint


def test_a_head_of_several_numbers_is_refused(place, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", place[0], targets=TARGETS, labels=3)
    with pytest.raises(InvalidRequest, match=r"has shape \(3, .*needs \(1, ") as raised:
        check_stored(recipe_of((place[0], adapter)))
    assert "num_labels=1" in raised.value.hint


def test_a_target_that_the_base_has_not_is_refused(place):
    reward = reward_of(place[1], targets=("query_key_value",))
    with pytest.raises(InvalidRequest, match=r"`reward\.adapter\.targets`: `query_key"):
        build_model(recipe_of(place, reward=reward), "meta")


def test_a_base_that_is_trained_itself_bears_no_reward(place):
    with pytest.raises(InvalidRequest, match=r"adapter:.*under `method: full`"):
        build_model(replace(recipe_of(place), method="full", lora=Lora()), "meta")
