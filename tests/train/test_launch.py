"""Ranks that end: who is told what, how soon, and where a rank hears its place from."""

import gc
from pathlib import Path

import pytest
from tiny_runs import tiny_recipe

import memfit
from memfit.core.errors import DoesNotFit, InvalidRequest, RunFailed
from memfit.records.recipe import Lora, Parallel
from memfit.train.distributed.launch import launch
from memfit.train.distributed.ranks import Place, RankLost, Ranks, explained_loss, find_place

# torch's launcher leaves the files that it gave its processes to the collector
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
KILL_ONE = """
import os, signal, time
if os.environ["RANK"] == "1":
    print("about to go", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(3600)
"""
REFUSE = """
import json, os, sys
words = {"message": "too much", "hint": "ask for less", "code": 3, "explained": True,
         "timestamp": 1}
if os.environ["RANK"] == "1":
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps(words))
    sys.exit(3)
"""
AGREE = """
import os, sys
from pathlib import Path
seen = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
Path(sys.argv[1], "seen-" + os.environ["RANK"]).write_text(repr(seen))
"""


@pytest.fixture(autouse=True)
def collected():
    """Within the test that left them, and not in whichever comes next."""
    yield
    gc.collect()


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path):
    with pytest.raises(RunFailed, match="rank 1 of the run was lost: it was ended by SIGKILL") as e:
        launch(["-c", KILL_ONE], tmp_path, 2)
    assert "the same command again" in e.value.hint
    log = tmp_path / "ranks" / "rank-00001"
    assert (log / "stdout.log").read_text() == "about to go\n"
    assert str(log / "stderr.log") in e.value.hint


def test_what_a_rank_says_is_raised_as_it_said_it(tmp_path):
    with pytest.raises(DoesNotFit, match="too much") as error:
        launch(["-c", REFUSE], tmp_path, 2)
    assert error.value.hint == "ask for less"


def test_each_rank_hears_its_place(tmp_path):
    launch(["-c", AGREE, str(tmp_path)], tmp_path, 2)
    for rank in range(2):
        seen = eval((tmp_path / f"seen-{rank}").read_text())
        found = find_place(seen | {"MASTER_PORT": "1"})
        assert found == Place(rank, 2, rank)
        assert seen["MASTER_ADDR"] == "127.0.0.1"


def test_places_of_other_launchers():
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
    with pytest.raises(InvalidRequest, match="MASTER_ADDR and MASTER_PORT are not set"):
        find_place(slurm)
    where = {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}
    assert find_place(slurm | where) == Place(5, 16, 1)
    assert find_place({}) is None
    assert find_place(slurm | where | {"SLURM_NTASKS": "1"}) is None
    with pytest.raises(InvalidRequest, match="SLURM_PROCID=first"):
        find_place(slurm | where | {"SLURM_PROCID": "first"})


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Timed out waiting 8000ms", "it did not come to a collective in time"),
        ("closed", "gloo: c"),
    ],
)
def test_a_collective_that_took_too_long_is_told_as_that(said, told):
    with pytest.raises(RankLost, match=f"another rank was lost: {told}"), explained_loss():
        raise RuntimeError(f"gloo: {said}")


FAIL = """
import os, sys
sys.path[:0] = [os.environ["SOURCE"]]
from memfit.train.distributed.ranks import leave_word
if os.environ["RANK"] == "0":
    os._exit(leave_word(RuntimeError(os.environ["SAID"])))
"""


@pytest.mark.parametrize(
    ("said", "kind"), [("CUDA error: uncorrectable", RankLost), ("a", RunFailed)]
)
def test_a_device_that_fails_is_a_lost_rank_and_a_bug_is_none(tmp_path, monkeypatch, said, kind):
    monkeypatch.setenv("SAID", said)
    monkeypatch.setenv("SOURCE", str(Path(memfit.__file__).parents[1]))
    with pytest.raises(RunFailed, match=f"RuntimeError: {said}") as error:
        launch(["-c", FAIL], tmp_path, 2)
    assert type(error.value) is kind


def test_a_process_alone_agrees_with_itself(tmp_path):
    ranks = Ranks()
    assert ranks.gather(1.0, 2.0) == [(1.0, 2.0)]
    assert ranks.total(3.0) == 3.0
    assert ranks.any(True)
    assert ranks.from_first(lambda: "yes") == "yes"
    assert ranks.home(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"parallel": Parallel(dp_shard=2), "accumulation": 1}, True),
        ({"micro_batch": 4, "accumulation": 1, "recompute_blocks": 1}, True),
        ({"optimizer": {"implementation": "loop"}}, True),
        ({"parallel": Parallel(dp_shard=2)}, False),  # twice the batch
        ({"seed": 1}, False),
        ({"steps": 7}, False),
        ({"precision": "bf16-mixed"}, False),
        ({"method": "lora", "lora": Lora(rank=2, alpha=1.0, targets=("q_proj",))}, False),
        ({"optimizer": {"learning_rate": 1.0}}, False),
    ],
)
def test_recipes_of_one_course_learn_the_same(changes, same):
    plain, other = tiny_recipe(), tiny_recipe(**changes)
    assert (plain.course == other.course) is same
    assert plain.digest != other.digest
