"""Callbacks of a user's own file: what they see, that they can end a run, beside transformers."""

import pytest
import torch
from tiny_runs import tiny_recipe
from transformers import Trainer, TrainerCallback, TrainingArguments

from memfit.core.errors import InvalidRequest, RunFailed, UnknownName
from memfit.records import read_json
from memfit.records.results import Run
from memfit.screens.report import _progress
from memfit.train.run.loop import Cadence

OWN = """
from memfit.train.habits.callbacks import Stop

seen = []


def enough(row, folder):
    seen.append(row["step"])
    if row["step"] == 3:
        return Stop("three are enough")


def quiet(row, folder):
    return row["step"]  # anything else than a Stop ends nothing
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def count_theirs(folder):
    """Steps of transformers' Trainer whose callback asks to stop after the third of six."""

    class Enough(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 3

    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x, labels=None):
            return {"loss": (self.weight * x).sum()}

    args = TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=1, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = [{"x": torch.ones(1)}] * 6
    trainer = Trainer(One(), args, train_dataset=rows, callbacks=[Enough()])
    trainer.train()
    return trainer.state.global_step


def test_a_callback_ends_the_run_where_transformers_ends_it(go, own, tmp_path):
    recipe = tiny_recipe(steps=6)
    cadence = Cadence(callbacks=(f"{own}:enough", f"{own}:quiet"))
    run = go(recipe, cadence=cadence)
    assert run.finished
    assert run.steps_done == len(run.losses) == count_theirs(tmp_path / "theirs") == 3
    assert run.ended_early == (
        f"`run.callbacks: {own}:enough` ended the run after step 3: three are enough"
    )
    assert read_json(tmp_path / "run" / "run.json", Run) == run
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert "3 of 6 steps (finished early: `run.callbacks:" in _progress(run, recipe.steps)
    assert go(recipe, cadence=cadence) == run  # finished: nothing is trained anew
    # what it learned until then is what the run would have learned
    whole = go(recipe, "whole")
    assert whole.losses[:3] == run.losses
    assert not whole.ended_early


@pytest.mark.parametrize("save_every", [1, 50])
def test_a_run_that_is_lost_after_its_callback_ended_it_ends_there_too(
    go, own, monkeypatch, save_every
):
    cadence = Cadence(callbacks=(f"{own}:enough",), save_every=save_every)

    def fail(*_):
        raise RunFailed("a full disk")

    with monkeypatch.context() as patched:
        patched.setattr("memfit.train.run.loop._export", fail)
        with pytest.raises(RunFailed):
            go(tiny_recipe(steps=6), cadence=cadence)
    run = go(tiny_recipe(steps=6), cadence=cadence)
    assert run.steps_done == 3
    assert "three are enough" in run.ended_early


def test_a_stop_at_the_last_step_is_no_early_end(go, own):
    run = go(tiny_recipe(steps=3), cadence=Cadence(callbacks=(f"{own}:enough",)))
    assert run.steps_done == 3
    assert run.state == "finished"


@pytest.mark.parametrize(
    ("text", "spec", "message"),
    [
        (OWN, "none.py:enough", "there is no file"),
        (OWN, "own.py:others", "has no function `others`"),
        ("1 / 0", "own.py:enough", "cannot be run: ZeroDivisionError"),
        (OWN, "nobody", "`nobody`"),
    ],
)
def test_a_function_that_there_is_not_is_refused_before_the_first_step(
    go, tmp_path, monkeypatch, text, spec, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(text)
    with pytest.raises((InvalidRequest, UnknownName), match=message):
        go(tiny_recipe(), cadence=Cadence(callbacks=(spec,)))
    assert not (tmp_path / "run" / "log.jsonl").exists()
