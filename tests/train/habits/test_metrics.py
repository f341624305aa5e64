"""Figures of evaluations by a user's own functions, beside transformers' Trainer."""

import json

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny_runs import tiny_recipe
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.families import read_model
from memfit.records.recipe import Parallel
from memfit.train.data.prepare import build_samplers, read_data
from memfit.train.distributed.ranks import Ranks
from memfit.train.habits.metrics import Metrics, Predicted, check_metrics
from memfit.train.measure.counters import synthetic_micro, to_batch
from memfit.train.model.weights import fill_weights
from memfit.train.run.loop import Cadence, train
from memfit.train.step.build import Built, build_model
from memfit.train.step.step import evaluate
from size_oracle import Births, highest

OWN = """
import numpy as np

calls = []


def accuracy(predictions, labels):
    here = labels != -100
    calls.append(predictions.shape)
    return {"accuracy": float((predictions == labels)[here].mean()), "read": int(here.sum())}


def wrong(predictions, labels):  # falls where the accuracy rises
    return 1 - accuracy(predictions, labels)["accuracy"]


def late(predictions, labels):
    if len(calls_of_late) > 1:
        raise ValueError("not today")
    calls_of_late.append(1)
    return {"late": 1.0}


calls_of_late = []


def flawed(predictions, labels):
    return predictions.no_such_thing


def endless(predictions, labels):
    return float("inf")


def loss(predictions, labels):
    return 0.0
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def read_rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def compute_theirs(model, rows, folder):
    """transformers' Trainer: the likeliest tokens in place of logits, shifted by the function."""

    def compute(found):
        predictions, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
        here = labels != -100
        return {"accuracy": (predictions == labels)[here].mean()}

    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], per_device_eval_batch_size=2,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model, args, eval_dataset=rows, compute_metrics=compute,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
    )  # fmt: skip
    return trainer.evaluate()["eval_accuracy"]


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_figures_are_those_of_transformers_trainer(go, own, request_, cache, tmp_path, loss):
    chunk = {"loss_chunk": 24} if loss == "chunked" else {}
    recipe = tiny_recipe(packing=False, loss=loss, optimizer={"learning_rate": 0.02}, **chunk)
    run = go(recipe, cadence=Cadence(evaluate_every=3, metrics=(f"{own}:accuracy",)))
    _, held_out = build_samplers(request_, recipe, read_data(request_, recipe.model, cache))
    rows = []
    for micro in held_out.all_once():
        for ids, labels in zip(micro.input_ids, micro.labels, strict=True):
            if (labels != -100).any():
                # theirs are not shifted, so that a row has the last one's token, too
                ids = np.concatenate([ids, [max(0, labels[-1])]])
                theirs = np.concatenate([[-100], labels])
                rows.append({"input_ids": torch.tensor(ids), "labels": torch.tensor(theirs)})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    theirs = compute_theirs(model, rows, tmp_path / "theirs")
    log = read_rows(tmp_path / "run")
    assert log[-1]["evaluation_accuracy"] == pytest.approx(theirs, abs=1e-12)
    assert 0.02 < theirs < 1
    assert log[-1]["evaluation_read"] == log[-1]["evaluation_targets"]
    assert [r["step"] for r in log if "evaluation_accuracy" in r] == [3, 6]
    measured = run.measurements["metric.accuracy"]
    assert measured.value == log[-1]["evaluation_accuracy"]
    assert measured.unit == f"by `{own}:accuracy`"


def test_a_run_ends_with_the_best_by_a_figure_of_ones_own(go, own):
    cadence = Cadence(
        evaluate_every=1, save_every=50, best_by="wrong", best_is="least", patience=2,
        metrics=(f"{own}:wrong", f"{own}:accuracy"),
    )  # fmt: skip
    recipe = tiny_recipe(steps=12, optimizer={"learning_rate": 0.4, "schedule": "constant"})
    run = go(recipe, cadence=cadence)
    assert run.steps_done < 12
    assert "`run.patience` ended the run" in run.ended_early
    most = Cadence(
        evaluate_every=1, save_every=50, best_by="accuracy", patience=2,
        metrics=(f"{own}:wrong", f"{own}:accuracy"),
    )  # fmt: skip
    other = go(recipe, "most", cadence=most)
    assert other.losses == run.losses
    ends = (run.measurements["best.wrong"], other.measurements["best.accuracy"])
    assert ends[0].value == pytest.approx(1 - ends[1].value, abs=1e-12)
    assert ends[0].counter == ends[1].counter


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_an_evaluation_with_figures_holds_no_byte_more_than_without(loss):
    """So that what a certificate says of an evaluation holds of both."""
    chunk = {"loss_chunk": 8} if loss == "chunked" else {}
    recipe = tiny_recipe(loss=loss, **chunk)
    torch.manual_seed(0)
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, None)
    vocab = read_model(recipe.model).architecture.vocab
    micro = synthetic_micro(recipe, vocab)
    peaks = []
    for predicted in (None, Predicted()):
        batch = to_batch(micro, built.device)
        if predicted is not None:
            from dataclasses import replace as with_changes

            batch = with_changes(batch, see=predicted.see)
        known = [
            *model.parameters(),
            *model.buffers(),
            *(t for t in batch.tensors if t is not None),
        ]
        with Births(*known) as births:
            loss_sum, _ = evaluate(built, batch)
        peaks.append(highest(births))
        if predicted is not None:
            predicted.end_batch(micro.labels)
            shown, labels = predicted.gather(Ranks())
            with torch.no_grad():
                logits = model(input_ids=batch.input_ids[:, :1]).logits
            assert shown[0, 0] == int(logits[0, 0].argmax())
            assert np.array_equal(labels, micro.labels)
        del loss_sum
    assert peaks[1] == peaks[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flawed", "fails of .* AttributeError"), ("endless", "`endless` is inf"),
        ("loss", "gives `loss`, which is a figure of `memfit`"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_serve_is_refused_before_the_first_step(
    go, own, tmp_path, name, message
):
    with pytest.raises(InvalidRequest, match=message):
        go(tiny_recipe(), cadence=Cadence(metrics=(f"{own}:{name}",)))
    assert not (tmp_path / "run" / "log.jsonl").exists()
    with pytest.raises(InvalidRequest, match="is no figure") as caught:
        go(tiny_recipe(), cadence=Cadence(metrics=(f"{own}:accuracy",), best_by="acuracy"))
    assert "one of: loss, accuracy, read" in caught.value.hint


def test_a_function_that_fails_later_is_named_and_called_no_more_unless_it_decides(go, own):
    run = go(tiny_recipe(), cadence=Cadence(evaluate_every=1, metrics=(f"{own}:late",)))
    assert run.finished
    (warning,) = run.warnings
    assert f"`run.metrics: {own}:late` failed: ValueError('not today')" in warning
    cadence = Cadence(evaluate_every=1, metrics=(f"{own}:late",), best_by="late")
    with pytest.raises(RunFailed, match=r"`run.best_by: late` compares by it"):
        go(tiny_recipe(), "other", cadence=cadence)


def test_what_has_no_predictions_is_refused(request_, cache, tmp_path):
    without = replace(request_, task=replace(request_.task, evaluation=""))
    with pytest.raises(InvalidRequest, match="names no held-out data"):
        train(
            tiny_recipe(), without, tmp_path / "run", cache=cache, cadence=Cadence(metrics=("a",))
        )
    with pytest.raises(InvalidRequest, match="`objective: dpo` predicts none"):
        check_metrics(tiny_recipe(objective="dpo"), ("a",), held_out=True)
    cut = tiny_recipe(parallel=Parallel(tp=2))
    with pytest.raises(InvalidRequest, match=r"`parallel.tp: 2` no rank has the logits"):
        check_metrics(cut, ("a",), held_out=True)


def test_rows_of_ranks_stand_as_one_process_reads_them(own):
    """Ranks read micro-batches in turn; rows that are shorter than others are filled up."""
    rows = [np.arange(4)[None] + 10 * k for k in range(4)]
    rows[3] = rows[3][:, :2]

    def see(some):
        predicted = Predicted()
        for labels in some:
            predicted.see(torch.nn.functional.one_hot(torch.tensor(labels.ravel()), 50).float())
            predicted.end_batch(labels)
        return predicted

    whole, one, two = see(rows), see(rows[::2]), see(rows[1::2])

    class Two(Ranks):
        size = 2

        def gather_texts(self, text):
            return [text, self.other]

    ranks, other = Two(), Two()
    texts = []
    other.gather_texts = lambda text: texts.append(text) or [text, text]
    two.gather(other)
    ranks.other = texts[0]
    for found, expected in zip(one.gather(ranks), whole.gather(Ranks()), strict=True):
        assert np.array_equal(found, expected)
    metrics = Metrics([f"{own}:accuracy"], "", print)
    metrics.rehearse(rows[0])
    assert metrics.compute(whole, Ranks()) == {"accuracy": 1.0, "read": 14.0}
