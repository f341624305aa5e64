"""Label smoothing, z-loss and NEFTune: against torch, transformers and a run's own certificate."""

import pytest
import torch
from msgspec.structs import replace
from tiny_runs import tiny_recipe
from torch.nn import functional as F
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.trainer_pt_utils import LabelSmoother

from memfit import catalog
from memfit.certify.evidence.certificate import make_certificate
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records import from_data
from memfit.records.recipe import Regularisation
from memfit.records.request import Request
from memfit.train.data.prepare import find_bounds
from memfit.train.habits.noise import add_noise
from memfit.train.model.weights import fill_weights
from memfit.train.run.loop import Cadence
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.loss import IGNORE, loss_mean
from memfit.train.step.step import Batch, evaluate, step
from tiny_models import make_recipe

TOKENS, WIDTH, VOCAB = 12, 16, 50
TERMS = {
    "smoothed": Regularisation(label_smoothing=0.1),
    "z-loss": Regularisation(z_loss=1e-2),
    "both": Regularisation(label_smoothing=0.3, z_loss=1e-2),
}


def textbook(head, hidden, labels, terms, cap):
    """The loss by torch's own functions, in fp64."""
    logits = hidden.double() @ head.weight.double().t()
    logits = torch.tanh(logits) * cap if cap else logits
    flat, targets = logits.flatten(0, 1), labels.flatten()
    each = F.cross_entropy(
        flat, targets, ignore_index=IGNORE, reduction="none", label_smoothing=terms.label_smoothing
    )
    each = each + terms.z_loss * (targets != IGNORE) * torch.logsumexp(flat, -1) ** 2
    return each.sum() / int((targets != IGNORE).sum())


@pytest.mark.parametrize("loss", [{"loss": "plain"}, {"loss": "chunked", "loss_chunk": 5}],
                         ids=["plain", "chunked"])  # fmt: skip
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("name", TERMS)
def test_the_loss_and_its_gradients_are_the_textbooks(name, scale, cap, loss):
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, requires_grad=True)
    labels = torch.randint(VOCAB, (2, TOKENS // 2))
    labels[0, :2] = IGNORE
    want = textbook(head, hidden, labels, TERMS[name], cap)
    theirs = torch.autograd.grad(want, [hidden, head.weight])
    recipe = make_recipe("llama", regularisation=TERMS[name], **loss)
    targets = int((labels != IGNORE).sum())
    factor = None if scale is None else torch.tensor(scale)
    found = loss_mean(head, hidden, labels, recipe, targets, factor, cap)
    (found if scale is None else found * factor).backward()
    assert found.item() == pytest.approx(want.item(), rel=1e-6)
    for ours, other in zip((hidden.grad, head.weight.grad), theirs, strict=True):
        torch.testing.assert_close(ours / (scale or 1), other.float(), rtol=1e-5, atol=1e-7)


def test_label_smoothing_is_the_trainers_of_transformers():
    torch.manual_seed(1)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    hidden, labels = torch.randn(2, 6, WIDTH), torch.randint(VOCAB, (2, 6))
    labels[1, 3:] = IGNORE
    theirs = LabelSmoother(epsilon=0.2)({"logits": head(hidden)}, labels)
    recipe = make_recipe("llama", regularisation=Regularisation(label_smoothing=0.2))
    ours = loss_mean(head, hidden, labels, recipe, int((labels != IGNORE).sum()))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_noise_is_transformers_own(dtype):
    ours, theirs = (torch.nn.Embedding(VOCAB, WIDTH, dtype=dtype) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    add_noise(ours, 5.0)
    theirs.neftune_noise_alpha = 5.0
    theirs.register_forward_hook(neftune_post_forward_hook)
    ids = torch.randint(VOCAB, (2, TOKENS))
    for training in (True, False):
        found = []
        for module in (ours.train(training), theirs.train(training)):
            torch.manual_seed(3)
            found.append(module(ids))
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
        assert torch.equal(found[0], ours.weight[ids]) is not training


@pytest.mark.parametrize("alpha", [0.0, 5.0])
def test_a_recipes_noise_is_on_its_models_embedding_while_it_trains(alpha):
    recipe = make_recipe("llama", regularisation=Regularisation(neftune_alpha=alpha))
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    embedding, ids = model.get_input_embeddings(), torch.arange(8)[None]
    far = (embedding(ids) - embedding.weight[ids]).abs().max().item()
    # alpha over the square root of tokens and elements (Jain et al. 2310.05914)
    assert far <= alpha / (8 * embedding.embedding_dim) ** 0.5
    assert (far > 0) == (alpha > 0)


@pytest.mark.parametrize("loss", [{}, {"loss": "chunked", "loss_chunk": 5}])
def test_an_evaluation_is_the_cross_entropy_alone(loss):
    terms = Regularisation(label_smoothing=0.3, z_loss=0.1, neftune_alpha=5.0)
    found = []
    for regularisation in (terms, Regularisation()):
        recipe = make_recipe("llama", regularisation=regularisation, **loss)
        model = build_model(recipe, "cpu")
        fill_weights(model, recipe)
        built = Built(recipe, model, build_optimizer(recipe, model))
        ids = torch.arange(16).remainder(90).view(2, 8)
        batch = Batch(ids, ids.roll(-1, 1))
        found.append(float(evaluate(built, batch)[0]))
        losses = step(built, [batch], 16).loss
        found.append(float(losses))
    assert found[0] == found[2]
    assert found[1] != found[3]


NOISY = {
    "plain": {},
    "chunked, mixed": {"loss": "chunked", "loss_chunk": 20, "precision": "bf16-mixed"},
}


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.wide), "chunked, mixed"])
def test_a_run_holds_what_is_certified_and_goes_on_to_the_same_bits(
    name, go, request_, cache, tmp_path, monkeypatch
):
    terms = Regularisation(label_smoothing=0.1, z_loss=1e-3, neftune_alpha=5.0)
    recipe = tiny_recipe(regularisation=terms, **NOISY[name])
    whole = go(recipe, cadence=Cadence(save_every=2, evaluate_every=3))
    data, held_out = find_bounds(request_, recipe, cache)
    device = catalog.find_device("cpu-x86")
    made = make_certificate(recipe, device, None, None, data=data, held_out=held_out)
    assert whole.phases == {p: n for p, n in made.phases.items() if p != "generate"}

    from memfit.train.run import loop

    plain = loop._take_step

    def fail(session, built, index):
        if index == 3:
            raise RunFailed("a power cut")
        return plain(session, built, index)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_take_step", fail)
        with pytest.raises(RunFailed):
            go(recipe, "cut", cadence=Cadence(save_every=2))
    again = go(recipe, "cut", cadence=Cadence(save_every=2))
    assert again.losses == whole.losses


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"task": {"objective": "dpo"}, "regularisation": {"neftune_alpha": 5}}, "objective: dpo"),
        ({"framework": "trl", "regularisation": {"z_loss": 1e-4}}, "of memfit's own step"),
        ({"optimizer": {"lora_plus": 16}, "method": "full"}, "has no adapters"),
    ],
)
def test_where_it_is_not_it_is_refused(data, message):
    with pytest.raises(InvalidRequest, match=message):
        from_data({"model": "gpt2", **data}, Request, source="a test")


def test_a_recipe_without_it_keeps_its_name():
    recipe = tiny_recipe()
    named = replace(recipe, regularisation=Regularisation(z_loss=0.0))
    assert named.digest == recipe.digest
    assert replace(recipe, regularisation=TERMS["both"]).digest != recipe.digest
