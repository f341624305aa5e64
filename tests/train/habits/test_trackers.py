"""Trackers get what the log gets, through accelerate's own classes."""

import json

import accelerate.tracking
import pytest
from msgspec.structs import replace
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import tiny_recipe

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.records.habits import RunRequest
from memfit.train.run.loop import Cadence, train
from typed_commands import ASKED, quick, write


class Kept(accelerate.tracking.GeneralTracker):
    """A tracker of accelerate's kind that keeps what it is given."""

    name, requires_logging_directory = "kept", False
    fails = 0

    def __init__(self, run_name):
        super().__init__()

    @property
    def tracker(self):
        return self

    def start(self):
        Kept.rows, Kept.closed = [], False

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **_):
        if Kept.fails and step >= Kept.fails:
            raise ConnectionError("nobody answers")
        Kept.rows.append({"step": step, **values})

    def finish(self):
        Kept.closed = True


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "kept", Kept)
    monkeypatch.setattr(Kept, "fails", 0)
    return Kept


def read_rows(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_tracker_gets_every_number_of_the_log(kept, go, tmp_path):
    go(tiny_recipe(), cadence=Cadence(evaluate_every=3, trackers=("kept",)))
    rows = read_rows(tmp_path / "run")
    wanted = [
        {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        for row in rows
    ]
    assert kept.rows == wanted
    assert any("evaluation_loss" in row for row in kept.rows)
    assert kept.closed


def test_tensorboard_is_accelerates(request_, cache, tmp_path):
    asked = replace(request_, run=RunRequest(trackers=("tensorboard",)))
    run = train(tiny_recipe(), asked, tmp_path / "run", cache=cache)
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    shown = [(event.step, event.value) for event in board.Scalars("loss")]
    assert shown == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in run.losses]


@pytest.mark.parametrize(
    ("words", "trackers"),
    [
        (["--tensorboard"], ("tensorboard",)),
        (["--tensorboard", "--set", "run.trackers=[wandb]"], ("wandb", "tensorboard")),
        (["--tensorboard", "--set", "run.trackers=[tensorboard]"], ("tensorboard",)),
        ([], ()),
    ],
)
def test_the_flag_is_the_key(words, trackers, tmp_path, monkeypatch):
    asked = []

    def stop(request, *_, **__):
        asked.append(request.run.trackers)
        raise InvalidRequest("far enough")

    monkeypatch.setattr(api, "train", stop)
    quick("train", write(tmp_path, ASKED), *words)
    assert asked == [trackers]


def test_a_tracker_that_fails_ends_no_run(kept, go, monkeypatch):
    monkeypatch.setattr(kept, "fails", 3)
    run = go(tiny_recipe(), cadence=Cadence(trackers=("kept",)))
    assert run.finished
    assert [row["step"] for row in kept.rows] == [1, 2]
    (said,) = [text for text in run.warnings if "run.trackers" in text]
    assert "`run.trackers: kept` failed and gets nothing more: nobody answers" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "is no tracker that accelerate knows"), ("aim", "its library is not installed")],
)
def test_a_tracker_that_is_not_there_is_refused_before_the_first_step(name, message, go, tmp_path):
    with pytest.raises(InvalidRequest, match=message) as caught:
        go(tiny_recipe(), cadence=Cadence(trackers=(name,)))
    assert caught.value.hint
    assert not (tmp_path / "run" / "checkpoints").exists()
