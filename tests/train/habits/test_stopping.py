"""The best evaluation, early stopping and the checkpoints that stay, as transformers has them."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from tiny_runs import tiny_recipe
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import rotate_checkpoints

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records.habits import RunRequest, count_every
from memfit.train.checkpoint.files import Keep
from memfit.train.habits.stopping import judge
from memfit.train.run.loop import Cadence, train


def judge_theirs(values, run, folder):
    """The step of the best evaluation and of the one that stops, by transformers' own classes."""
    args = TrainingArguments(
        output_dir=str(folder), eval_strategy="steps", eval_steps=1, save_steps=1,
        load_best_model_at_end=True, metric_for_best_model=run.best_by, use_cpu=True,
    )  # fmt: skip
    trainer, state, control = SimpleNamespace(args=args), TrainerState(), TrainerControl()
    trainer.state = state
    callback = EarlyStoppingCallback(run.patience, run.min_improvement)
    stopped = 0
    for step, value in values:
        metrics, state.global_step = {f"eval_{run.best_by}": value}, step
        callback.on_evaluate(args, state, control, metrics)
        Trainer._determine_best_metric(trainer, metrics, None)
        if control.should_training_stop:
            stopped = step
            break
    return state.best_global_step, state.best_metric, stopped


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("best_by", ["loss", "reward_accuracy"])
def test_the_best_and_the_stop_are_transformers_own(seed, best_by, tmp_path):
    chance = random.Random(seed)
    run = RunRequest(
        best_by=best_by, patience=chance.randint(1, 4), min_improvement=chance.choice([0, 0.1])
    )
    values = [(5 * i, round(chance.uniform(0, 1), 1)) for i in range(1, 30)]
    step, value, stopped = judge_theirs(values, run, tmp_path)
    stops = [values[n - 1][0] for n in range(1, 30) if judge(values[:n], run).stops]
    assert stops[0] == stopped
    seen = [one for one in values if one[0] <= stopped]
    assert judge(seen, run)[:2] == (step, value)


@pytest.mark.parametrize("newest", [1, 2, 3])
@pytest.mark.parametrize("best", [0, 2, 5, 9])
def test_the_checkpoints_that_stay_are_transformers_own(newest, best, tmp_path):
    for step in range(1, 10):
        (tmp_path / "ours" / f"step-{step:06}").mkdir(parents=True)
        (tmp_path / "theirs" / f"checkpoint-{step}").mkdir(parents=True)
        written = tmp_path / "ours" / f"step-{step:06}"
        before = best if best <= step else 0
        for folder in Keep(newest, before).leaves(tmp_path / "ours", written):
            folder.rmdir()
        name = str(tmp_path / "theirs" / f"checkpoint-{before}") if before else None
        rotate_checkpoints(str(tmp_path / "theirs"), newest, name)
        ours = {int(p.name.removeprefix("step-")) for p in (tmp_path / "ours").iterdir()}
        theirs = {int(p.name.rpartition("-")[2]) for p in (tmp_path / "theirs").iterdir()}
        assert ours == theirs


@pytest.mark.parametrize(("stated", "steps"), [(0.1, 95), (0.5, 7), (3, 100), (0.01, 10)])
def test_intervals_are_counted_as_transformers_does(stated, steps, tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path), eval_strategy="steps", eval_steps=stated, save_steps=stated,
        use_cpu=True,
    )  # fmt: skip
    state = TrainerState()
    state.compute_steps(args, steps)
    assert count_every(stated, steps) == state.eval_steps == state.save_steps


def read_rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


RISING = {"learning_rate": 0.4, "schedule": "constant", "warmup_steps": 0}  # and soon too much


@pytest.fixture
def bad(tmp_path):
    return tiny_recipe(steps=12, optimizer=RISING)


def test_a_run_that_gets_no_better_stops_and_ends_with_the_best_weights(go, bad, tmp_path):
    cadence = Cadence(save_every=50, evaluate_every=1, best_by="loss", patience=3)
    run = go(bad, cadence=cadence)
    losses = dict(run.evaluations)
    best = min(losses, key=losses.get)
    assert run.finished
    assert best < run.steps_done == best + 3 < bad.steps
    assert run.measurements["best.loss"].value == losses[best]
    rows = read_rows(tmp_path / "run")
    assert {row["evaluation_whole"] for row in rows} == {True}
    # the model that is written is the best one: a run of so many steps ends with the same bits
    short = go(replace(bad, steps=best), "short", cadence=Cadence(save_every=50))
    assert short.finished
    ours, theirs = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").named_parameters())
        for name in ("run", "short")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_was_stopped_before_it_ends_goes_on_to_the_same_end(
    go, bad, tmp_path, monkeypatch
):
    cadence = Cadence(save_every=1, evaluate_every=1, best_by="loss", patience=3)
    whole = go(bad, cadence=cadence)

    def fail(*_):
        raise RunFailed("a full disk")

    with monkeypatch.context() as patched:
        patched.setattr("memfit.train.run.loop._export", fail)
        with pytest.raises(RunFailed):
            go(bad, "again", cadence=cadence)
    again = go(bad, "again", cadence=cadence)
    assert again.steps_done == whole.steps_done
    assert again.losses == whole.losses
    assert again.evaluations == whole.evaluations


def test_the_last_checkpoints_stay_and_the_best_among_them(go, bad, tmp_path):
    cadence = Cadence(save_every=1, evaluate_every=1, best_by="loss", keep=3)
    run = go(replace(bad, optimizer=replace(bad.optimizer, learning_rate=4.0)), cadence=cadence)
    losses = dict(run.evaluations)
    best = min(losses, key=losses.get)
    held = sorted(int(p.name[5:]) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert best < 10
    assert held == [best, 11, 12]


def test_what_cannot_be_compared_is_refused(go, request_, cache, tmp_path):
    with pytest.raises(InvalidRequest, match=r"`run.best_by: accuracy` is no figure") as caught:
        go(tiny_recipe(), cadence=Cadence(evaluate_every=1, best_by="accuracy"))
    assert "one of: loss" in caught.value.hint
    without = replace(request_, task=replace(request_.task, evaluation=""))
    with pytest.raises(InvalidRequest, match="names no held-out data"):
        train(
            tiny_recipe(), without, tmp_path / "other", cache=cache, cadence=Cadence(best_by="loss")
        )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"patience": 3}, "does not say by what"),
        ({"save_every": 2.5}, "is no number of steps"),
        ({"best_by": "loss", "min_improvement": 0.1}, "has an effect on `run.patience`"),
    ],
)
def test_keys_without_an_effect_are_refused(keys, message):
    with pytest.raises(InvalidRequest, match=message):
        RunRequest(**keys)


def test_the_request_says_how_often(request_, cache, tmp_path):
    asked = replace(request_, run=RunRequest(save_every=0.5, evaluate_every=2, keep=5))
    train(tiny_recipe(), asked, tmp_path / "run", cache=cache)
    rows = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows if "evaluation_loss" in row] == [2, 4, 6]
    held = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert held == ["step-000003", "step-000006"]
