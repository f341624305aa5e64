"""kill -9 at random moments, each followed by the same command."""

import random
import signal
import time
from pathlib import Path

import killed_run
import pytest
from tiny_runs import write_text

from forked import fork
from memfit.records import read_json
from memfit.records.results import Run
from memfit.train.checkpoint.files import find_damage

MODEL = Path("model") / "model.safetensors"


def end(process):
    """Wait for the process; its exit status."""
    process.join()
    return process.exitcode


def wait_for(found, seconds=60):
    limit = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < limit, "the moment to kill never came"
        time.sleep(0.0002)


def checkpoints(folder):
    return sorted((folder / "checkpoints").glob("step-*"))


def newest(folder):
    """The step of the newest checkpoint, complete or not."""
    return max((int(p.name.removeprefix("step-")) for p in checkpoints(folder)), default=0)


def half_written(folder):
    return list((folder / "checkpoints").glob(".unfinished-step-??????"))


@pytest.mark.slow
@pytest.mark.parametrize("kills", [6, pytest.param(10, marks=pytest.mark.wide)])
def test_killed_at_random_moments_a_run_ends_with_the_same_bits(kills, tmp_path):
    data, cache = write_text(tmp_path / "data"), tmp_path / "cache"
    assert end(fork(killed_run.run, tmp_path / "whole", data, cache)) == 0
    folder, chance = tmp_path / "cut", random.Random(20)
    amid_save = 0
    for attempt in range(kills):
        known = newest(folder)
        process = fork(killed_run.run, folder, data, cache)
        if attempt % 2:  # while a checkpoint is being written
            wait_for(lambda: half_written(folder))
            time.sleep(chance.uniform(0, 0.003))
        elif more := chance.randrange(4):  # some steps on
            wait_for(lambda goal=known + 2 * more: newest(folder) >= goal)
            time.sleep(chance.uniform(0, 0.02))
        else:  # while everything is still being read
            time.sleep(chance.uniform(0, 0.3))
        process.kill()
        assert end(process) == -signal.SIGKILL, "it had ended before its moment"
        amid_save += bool(half_written(folder))
        assert not (folder / "model").exists(), "killed too late to prove anything"
        assert all(not find_damage(c) for c in checkpoints(folder)), "half a checkpoint is visible"
    assert amid_save, "no kill fell into a save"
    assert end(fork(killed_run.run, folder, data, cache)) == 0
    assert (folder / MODEL).read_bytes() == (tmp_path / "whole" / MODEL).read_bytes()
    whole, cut = (read_json(tmp_path / name / "run.json", Run) for name in ("whole", "cut"))
    assert cut.losses == whole.losses
    assert not list((folder / "checkpoints").glob(".*"))
