"""Runs that sample answers on two ranks: one process's log, and no bit lost to `kill -9`."""

import json

import pytest
from rollouts_on_ranks import run
from tiny_rollouts import write_data

from memfit.records import read_json
from memfit.records.results import Run

KILLED, LOST = -9, 5  # exit statuses: of the rank, and of the other one
CLOCKS = ("seconds", "tokens_per_second", "memory_peak_allocated", "watched")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each order came to: statuses and its folder."""
    folder = tmp_path_factory.mktemp("sampled")
    data = write_data(folder / "data")
    held_out = data.read_text().splitlines()[:3]  # which two ranks share unevenly
    (data.parent / "held_out.jsonl").write_text("\n".join(held_out))
    orders = {
        "alone": (1, folder / "alone", -1, ""),
        "whole": (2, folder / "whole", -1, ""),
        "sampling": (2, folder / "killed", 1, "rollout"),
        "updating": (2, folder / "killed", 0, "update"),
        "again": (2, folder / "killed", -1, ""),
    }
    return {
        name: (run(world, to, *end, data, folder / "cache"), to)
        for name, (world, to, *end) in orders.items()
    }


def log_of(folder):
    """The lines of a run's log, without what a clock or a counter says."""
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in line.items() if not k.endswith("_seconds") and "per_second" not in k
         and k not in CLOCKS}
        for line in lines
    ]  # fmt: skip


@pytest.mark.slow
def test_ranks_learn_what_one_process_does(runs):
    (alone, one), (whole, two) = runs["alone"], runs["whole"]
    assert alone == [0]
    assert whole == [0, 0]
    assert len(log_of(one)) == 4
    for ours, theirs in zip(log_of(two), log_of(one), strict=True):
        assert ours["samples"] == theirs["samples"]
        assert ours.pop("ranks") == 2
        assert ours.keys() == theirs.keys()
        compared = ("loss", "reward", "reward_std", "kl", "grad_norm", "entropy", "rewards")
        for key in (*compared, *(k for k in theirs if k.startswith("evaluation_"))):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
    assert "evaluation_reward" in log_of(one)[-1]
    run = read_json(two / "run.json", Run)
    assert run.finished
    assert len(run.ranks) == 2


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_ends_with_the_same_bits(runs):
    """Rank 1 while it samples, then rank 0 while it learns; each time after the checkpoint."""
    assert runs["sampling"][0] == [LOST, KILLED]
    assert runs["updating"][0] == [KILLED, LOST]
    again, folder = runs["again"]
    assert again == [0, 0]
    whole = runs["whole"][1]
    assert log_of(folder) == log_of(whole)
    for file in sorted((whole / "model").glob("*.safetensors")):
        assert (folder / "model" / file.name).read_bytes() == file.read_bytes(), file.name
    assert list((whole / "model").glob("*.safetensors"))
