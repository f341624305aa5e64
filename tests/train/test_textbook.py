"""The step's parts against what textbooks and Hugging Face's classes say of them.

With the neighbours that docs/numerics.toml names, these are the numeric tests of memfit's step.
"""

import pytest
import torch
from test_step import PACKABLE, pack
from torch import nn

from memfit.train.model.hugging_face import parts
from memfit.train.step.loss import loss_mean
from memfit.train.step.preference import row_log_probs
from memfit.train.step.step import Batch, step
from tiny_models import (
    CONFIGS,
    FAMILIES,
    hugging_face,
    make_batch,
    make_built,
    make_recipe,
    targets_of,
)

LOGITS = {"fp32": 1e-5, "bf16": 2e-2}  # of the largest logit


@pytest.mark.parametrize("precision", LOGITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_hugging_faces_class(family, precision):
    recipe = make_recipe(family, precision=precision, base_format=precision)
    built, batch = make_built(recipe), make_batch()
    dtype = getattr(torch, recipe.trainable_dtype)
    theirs = hugging_face(recipe, built.model.state_dict(), dtype)
    with torch.no_grad():
        made, said = (
            model(input_ids=batch.input_ids, use_cache=False).logits.float()
            for model in (built.model, theirs)
        )
    assert float((made - said).abs().max()) <= LOGITS[precision] * float(said.abs().max())


MADE = {"loss": loss_mean, "log-probabilities": row_log_probs}


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("chunk", [0, 3])
def test_slopes_are_those_of_finite_differences(chunk, made, cap):
    """From numbers in fp64; the steps are wide, because losses are fp32 whatever their inputs are.

    torch's gradcheck cannot ask: the chunks' backward gives its gradients away and runs once.
    """
    head, labels = nn.Linear(4, 7, bias=False), torch.tensor([[1, -100, 6, 0], [-100, 5, 5, -100]])
    del head.weight
    recipe = make_recipe(loss="chunked" if chunk else "plain", loss_chunk=chunk)
    counted = {"target_tokens": 5} if made == "loss" else {}

    def loss(hidden, weight):
        head.weight = weight
        return MADE[made](head, hidden, labels, recipe, cap=cap, **counted).sum()

    random = torch.Generator().manual_seed(1)
    given = [
        torch.randn(shape, dtype=torch.float64, generator=random).requires_grad_()
        for shape in ((2, 4, 4), (7, 4))
    ]
    slopes = torch.autograd.grad(loss(*given), given)
    with torch.no_grad():
        for values, slope in zip(given, slopes, strict=True):
            for place in range(values.numel()):
                found = []
                for way in (1e-2, -1e-2):
                    values.view(-1)[place] += way
                    found.append(float(loss(*given)))
                    values.view(-1)[place] -= way
                expected = pytest.approx((found[0] - found[1]) / 2e-2, rel=2e-3, abs=3e-4)
                assert float(slope.reshape(-1)[place]) == expected


@pytest.mark.parametrize("chunk", [0, 7])
def test_a_loss_of_16_bit_logits_is_computed_in_fp32(chunk):
    """The cross-entropy of the very logits that bf16 gives, in fp64: bf16 would be 1e-3 off."""
    torch.manual_seed(0)
    head = nn.Linear(48, 301, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(2, 100, 48, dtype=torch.bfloat16)
    labels = torch.randint(0, 301, (2, 100))
    labels[0, :30] = -100
    recipe = make_recipe(precision="bf16", loss="chunked" if chunk else "plain", loss_chunk=chunk)
    targets = int((labels != -100).sum())
    loss = loss_mean(head, hidden.requires_grad_(), labels, recipe, targets)
    logits = head(hidden).double().flatten(0, 1)
    exact = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)


def test_50_steps_of_a_cut_batch_drift_to_no_side():
    """1x8 against 4x2: differences of 50 losses, of rows with unequal counts of targets."""
    steps, found = 50, []
    config = CONFIGS["llama"] | {"num_hidden_layers": 1}
    for rows in (8, 2):
        recipe = make_recipe(
            config=config, micro_batch=rows, accumulation=8 // rows,
            optimizer={"learning_rate": 1e-3},
        )  # fmt: skip
        built, losses = make_built(recipe), []
        for seed in range(steps):
            whole = make_batch(8, seed=seed)
            for row in range(8):
                whole.labels[row, : 2 * row] = -100
            cut = zip(whole.input_ids.split(rows), whole.labels.split(rows), strict=True)
            losses.append(step(built, [Batch(*part) for part in cut], targets_of(whole)).loss)
        found.append(torch.stack(losses))
    apart = found[0] - found[1]
    assert float(apart.abs().max()) <= 1e-4
    assert abs(float(apart.mean())) <= 1e-5


@pytest.mark.parametrize(("family", "attention"), PACKABLE)
def test_nothing_that_follows_depends_on_an_earlier_document(family, attention):
    """The slope of one document's logits by the other's embeddings is 0, of experts as well."""
    built = make_built(make_recipe(family, attention=attention, packing=True))
    packed, _ = pack(((7, 9),))
    seen, where = [], parts(built.model)

    def keep(module, arguments, out):
        seen.append(out.detach().requires_grad_())
        return seen[0]

    with where.embedding.register_forward_hook(keep):
        out = where.backbone(
            input_ids=packed.input_ids, position_ids=packed.position_ids,
            documents=packed.documents, use_cache=False,
        )  # fmt: skip
    (slope,) = torch.autograd.grad(where.head(out.last_hidden_state)[:, 7:].square().sum(), seen)
    assert not slope[:, :7].any()
    assert slope[:, 7:].any()
