"""A share of the data that is held out, against datasets' own split."""

import numpy as np
import pytest
from datasets import Dataset
from msgspec.structs import replace
from tiny_runs import tiny_recipe, write_text

from memfit.core.errors import InvalidRequest
from memfit.records import from_data
from memfit.records.request import Request
from memfit.records.shapes import evaluation_shapes
from memfit.train.data.prepare import build_samplers, find_bounds, read_data
from memfit.train.data.tokens import divide
from memfit.train.run.loop import Cadence, train

SHARE = 0.3


@pytest.fixture
def asked(request_, tmp_path):
    data = write_text(tmp_path / "own", 11)
    return replace(
        request_, task=replace(request_.task, data=str(data), evaluation="", evaluation_share=SHARE)
    )


def chosen(corpus):
    return np.flatnonzero(corpus.chosen).tolist()


@pytest.mark.parametrize("seed", [0, 3])
def test_the_documents_held_out_are_datasets_own(seed, asked, cache):
    data = read_data(replace(asked, seed=seed), tiny_recipe().model, cache)
    theirs = Dataset.from_dict({"i": list(range(11))}).train_test_split(SHARE, seed=seed)
    assert chosen(data.held_out) == sorted(theirs["test"]["i"])
    assert chosen(data.training) == sorted(theirs["train"]["i"])


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("objective", ["pretrain", "sft"])
def test_rows_hold_their_own_documents_and_every_token_once(packing, objective, asked, cache):
    recipe = tiny_recipe(packing=packing, objective=objective)
    task = replace(asked.task, objective=objective)
    data = read_data(replace(asked, task=task), recipe.model, cache)
    training, held_out = build_samplers(replace(asked, task=task), recipe, data)
    for sampler, corpus in ((training, data.training), (held_out, data.held_out)):
        seen = {document: 0 for document in chosen(corpus)}
        for index in range(int(-(-sampler._rows.per_epoch // 1))):
            for piece in sampler._rows.row(index, once=True):
                seen[piece.document] += piece.length
        lengths = np.diff(corpus.offsets)
        assert seen == {document: lengths[document] for document in seen}


def test_pairs_stay_together(asked, cache):
    corpus = read_data(asked, tiny_recipe().model, cache).training._replace(chosen=None)
    even = corpus._replace(offsets=corpus.offsets[:11])
    for part in divide(even, SHARE, 0, 2):
        assert (part.chosen[::2] == part.chosen[1::2]).all()


def test_a_run_evaluates_what_it_does_not_learn_and_goes_on(asked, cache, tmp_path):
    recipe = tiny_recipe()
    run = train(recipe, asked, tmp_path / "run", cache=cache, cadence=Cadence(save_every=2))
    data = read_data(asked, recipe.model, cache)
    # a document's first token is predicted by none
    tokens = int(data.held_out.lengths.sum())
    assert run.measurements["loss.evaluation"].counter.startswith("all ")
    counted = int(run.measurements["loss.evaluation"].counter.split()[1].replace(",", ""))
    assert tokens - tokens // 10 < counted < tokens
    _, held_out = find_bounds(asked, recipe, cache)
    assert evaluation_shapes(recipe, held_out)
    assert train(recipe, asked, tmp_path / "run", cache=cache) == run
    other = replace(asked, seed=1)
    with pytest.raises(InvalidRequest, match="of data"):
        train(recipe, other, tmp_path / "run", cache=cache)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"evaluation": "x", "evaluation_share": 0.1}, "both say what is held out"),
    ],
)
def test_what_contradicts_it_is_refused(task, message):
    with pytest.raises(InvalidRequest, match=message):
        from_data({"model": "gpt2", "task": task}, Request, source="a test")


def test_a_single_document_cannot_be_divided(asked, cache, tmp_path):
    text = tmp_path / "one.txt"
    text.write_text("the cat sat on a mat\n" * 30)
    one = replace(asked, task=replace(asked.task, data=str(text)))
    with pytest.raises(InvalidRequest, match="leaves 0 to train on"):
        read_data(one, tiny_recipe().model, cache)
