"""Answers to held-out prompts while a model trains, beside transformers' `generate`."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import tiny_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.records.habits import RunRequest
from memfit.records.recipe import Parallel
from memfit.records.shapes import RowBounds
from memfit.train.data.prepare import build_samplers, read_data
from memfit.train.data.tokens import Corpus
from memfit.train.habits.samples import Samples, check_samples, choose_samples
from memfit.train.measure.counters import synthetic_micro, to_batch
from memfit.train.run.loop import Cadence
from memfit.train.step.build import Built, build_model
from memfit.train.step.step import evaluate
from size_oracle import Births, highest

BOUNDS = RowBounds(tokens=32, documents=0, longest=32)


def read_rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("packing", [True, False])
def test_answers_are_those_of_transformers_generate(go, request_, cache, tmp_path, packing):
    recipe = tiny_recipe(packing=packing, micro_batch=2, optimizer={"learning_rate": 0.02})
    cadence = Cadence(
        evaluate_every=1, samples=3, sample_every=4, sample_tokens=12, trackers=("tensorboard",)
    )
    run = go(recipe, cadence=cadence)
    log = read_rows(tmp_path / "run")
    # at every fourth evaluation, and at the last
    assert [row["step"] for row in log if "samples" in row] == [4, 6]
    assert len(log[-1]["samples"]) == 3
    data = read_data(request_, recipe.model, cache)
    _, held_out = build_samplers(request_, recipe, data)
    samples = choose_samples(held_out.corpus, cadence, held_out.bounds_once(), data.tokenizer)
    folder = tmp_path / "run" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt, shown in zip(samples.prompts, log[-1]["samples"], strict=True):
        ids = torch.tensor([prompt])
        most = min(12, samples.limit - len(prompt))
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most,
            eos_token_id=samples.end, pad_token_id=0,
        )[0, len(prompt) :]  # fmt: skip
        assert shown["completion"] == tokenizer.decode(theirs, skip_special_tokens=True)
        assert shown["prompt"] == tokenizer.decode(prompt, skip_special_tokens=True)
    assert any(shown["completion"] for shown in log[-1]["samples"])
    assert [(a.step, a.reward) for a in run.answers] == [(4, None)] * 3 + [(6, None)] * 3
    # the same run without them learns the same
    assert go(recipe, "without", cadence=Cadence(evaluate_every=1)).losses == run.losses
    (events,) = [p for p in (tmp_path / "run").rglob("events.*")]
    board = EventAccumulator(str(events)).Reload()
    assert sum("sample_1" in tag for tag in board.Tags()["tensors"]) == 1


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_answers_hold_no_more_than_an_evaluation(loss):
    """Of as many prompts as a micro-batch has rows, as long as held-out rows may be."""
    chunk = {"loss_chunk": 8} if loss == "chunked" else {}
    recipe = tiny_recipe(packing=False, loss=loss, **chunk)
    torch.manual_seed(0)
    model = build_model(recipe, "cpu")
    built = Built(recipe, model, None)
    batch = to_batch(synthetic_micro(recipe, read_model(recipe.model).architecture.vocab), "cpu")
    known = [*model.parameters(), *model.buffers()]
    with Births(*known, *(t for t in batch.tensors if t is not None)) as births:
        evaluate(built, batch)
    inputs = sum(t.nbytes for t in (batch.input_ids, batch.labels))
    certified = highest(births) + inputs
    prompts = tuple(tuple(range(1, 20 + 2 * row)) for row in range(2 * recipe.micro_batch))
    samples = Samples(prompts, 64, recipe.sequence_length, None, str)
    with Births(*known) as births:
        found = samples.answer(built)
    assert len(found) == 2 * recipe.micro_batch
    assert 0.5 * certified < highest(births) <= certified


def test_prompts_are_what_comes_before_what_is_learned():
    tokens = np.arange(1, 101, dtype="uint32")
    offsets = np.array([0, 10, 11, 91, 100])  # of the second, a single token, nothing is asked
    learned = np.ones(100, dtype="uint8")
    learned[:4] = 0  # 4 tokens of a question, then an answer
    learned[91:96] = 0
    corpus = Corpus(tokens, offsets, learned, "", ())
    tokenizer = SimpleNamespace(end=0, decode=str)
    run = RunRequest(samples=3, sample_tokens=5)
    wide = replace(BOUNDS, tokens=40, longest=40)
    asked = choose_samples(corpus, run, wide, tokenizer)
    text = tuple(range(12, 44))  # the first 32 tokens of 80
    assert asked.prompts == ((1, 2, 3, 4), text, (92, 93, 94, 95, 96))
    # of texts, half; what is as long as a row leaves no room for an answer
    assert choose_samples(corpus._replace(learned=None), run, BOUNDS, tokenizer).prompts == (
        (1, 2, 3, 4, 5), (92, 93, 94, 95),
    )  # fmt: skip
    short = replace(BOUNDS, tokens=4, longest=4)
    with pytest.raises(InvalidRequest, match=r"prompt of less than 4 tokens"):
        choose_samples(corpus, run, short, tokenizer)


def test_what_has_no_prompts_is_refused():
    run = RunRequest(samples=2)
    with pytest.raises(InvalidRequest, match="names no held-out data"):
        check_samples(tiny_recipe(), run, held_out=False)
    for objective in ("dpo", "grpo"):
        with pytest.raises(InvalidRequest, match=f"`objective: {objective}` has no such rows"):
            check_samples(tiny_recipe(objective=objective), run, held_out=True)
    with pytest.raises(InvalidRequest, match=r"`parallel.cp: 2` no rank"):
        check_samples(tiny_recipe(parallel=Parallel(cp=2)), run, held_out=True)
