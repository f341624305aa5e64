"""Log-probability and entropy of each answer's tokens, against Hugging Face's own logits."""

import pytest
import torch
from torch.distributions import Categorical

from memfit.core.errors import InvalidRequest
from memfit.records.reinforcement import Policy
from memfit.train.rl.policy_loss import Answers, Counts
from memfit.train.rl.rows import answer_mask, lay_out
from memfit.train.step.step import Batch, answer_log_probs, step
from tiny_models import gradients_in, hugging_face, make_built, make_recipe

PROMPTS, ANSWERS = [[5, 6, 7], [8, 9]], [[11, 12, 13, 14], [15, 1]]
HEAT = 0.7
WAYS = {"plain": {}, "chunked": {"loss": "chunked", "loss_chunk": 3}}


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("way", WAYS)
def test_log_probs_and_entropy_are_those_of_the_class(family, way):
    """gemma2 bends its logits before they are cooled, and granite divides them."""
    recipe = make_recipe(family, **WAYS[way])
    built = make_built(recipe)
    batch = lay_out(PROMPTS, ANSWERS, 9)
    found = answer_log_probs(built, batch, HEAT)
    model = hugging_face(recipe, built.model.state_dict()).eval()
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0].detach() / HEAT
        chance = Categorical(logits=logits[len(prompt) - 1 : -1])
        at = slice(len(prompt) - 1, len(prompt) - 1 + len(answer))
        expected = chance.log_prob(torch.tensor(answer))
        assert torch.allclose(found.log_probs[row, at], expected, atol=2e-6, rtol=0)
        assert torch.allclose(found.entropy[row, at], chance.entropy(), atol=2e-6, rtol=0)
    outside = answer_mask(batch.labels, torch.tensor([True, True])) == 0
    assert found.log_probs[outside].abs().max() == 0
    assert found.entropy[outside].abs().max() == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_chunked_gradients_are_the_plain_ones(family, precision):
    found = {}
    for way, changes in WAYS.items():
        recipe = make_recipe(family, precision=precision, **changes)
        built = make_built(recipe)
        batch = lay_out(PROMPTS, ANSWERS, 9)
        mask = answer_mask(batch.labels, torch.tensor([True, True]))
        answers = Answers(
            "grpo", Policy(), Counts(2, float(mask.sum()), 4), HEAT, mask, torch.tensor([1.0, -2.0])
        )
        found[way] = gradients_in(built)
        step(built, [Batch(batch.input_ids, batch.labels, answers=answers)], 1)
    most = max(float(g.abs().max()) for g in found["plain"].values())
    far = max(float((found["plain"][n] - g).abs().max()) for n, g in found["chunked"].items())
    assert found["chunked"].keys() == found["plain"].keys()
    assert far / most < (1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize(
    ("prompt", "answer", "named"),
    [([], [1], "0 prompt"), ([1], [], "0 answer"), ([1] * 4, [2] * 6, "10")],
)
def test_a_row_that_cannot_be_is_refused(prompt, answer, named):
    with pytest.raises(InvalidRequest, match=named):
        lay_out([prompt], [answer], 9)
