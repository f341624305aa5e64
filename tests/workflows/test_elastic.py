"""A rank is killed, and the run ends finished by itself: on fewer ranks, then on all again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from forked_ranks import ranks_forked
from msgspec.structs import replace

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.records import from_data, read_json, to_data
from memfit.records.request import Request
from memfit.records.results import Run
from memfit.workflows import elastic
from memfit.workflows.elastic import change_ranks
from memfit.workflows.prepare_run import prepare_moved, read_prepared
from typed_commands import quick

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
TEXT = "a few words of text that a tokenizer can learn from and some more of them\n" * 60
PATIENCE = pytest.mark.timeout(3600)  # the processes of four ranks import libraries seven times
# torch's launcher leaves the files that it gave its processes to the collector
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def ask(tmp_path, count, batch=24, steps=120, **more):
    data = tmp_path / "data.txt"
    data.write_text(TEXT)
    return {
        "model": CONFIG, "weights": "random", "precision": "fp32", "micro_batch": 2,
        "loss": "plain", "method": "full", "recompute": "none", "parallel": {"dp_shard": count},
        "optimizer": {"name": "adamw", "learning_rate": 0.001},
        "hardware": {"device": "cpu", "count": count},
        "task": {"data": str(data), "sequence_length": 32, "global_batch": batch, "steps": steps},
        **more,
    }  # fmt: skip


def find_ranks(launcher):
    """The ranks' processes that a launcher has, by rank."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            told = (stat.parent / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        rank = [word for word in told if word.startswith(b"RANK=")]
        if parent == launcher and rank:
            found[int(rank[0][5:])] = int(stat.parent.name)
    return found


@contextmanager
def train(tmp_path, request, *flags):
    file, folder = tmp_path / "request.json", tmp_path / "run"
    file.write_text(json.dumps(request))
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    path = os.pathsep.join(p for p in sys.path if p)
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "memfit", "train", str(file), "--folder", str(folder), *flags],
            env={**os.environ, **quiet, "PYTHONPATH": path}, stdout=said, stderr=said,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_steps(tmp_path, process, steps):
    log = tmp_path / "run" / "log.jsonl"
    while not (log.exists() and log.read_bytes().count(b"\n") >= steps):
        assert process.poll() is None, (tmp_path / "said").read_text()
        time.sleep(0.01)


def rows(tmp_path):
    return list(map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines()))


def train_and_lose(tmp_path, request, steps, *flags):
    """`memfit train` in this process, the second rank killed after so many steps: (code, stderr).

    The ranks are forks, and what was lost is planned and certified anew in this process, too:
    processes of their own, as in the test before, would import all libraries again.
    """
    file, folder, over = tmp_path / "request.json", tmp_path / "run", threading.Event()
    file.write_text(json.dumps(request))

    def lose(ranks):
        log = folder / "log.jsonl"
        while not over.wait(0.01):
            if log.exists() and log.read_bytes().count(b"\n") >= steps:
                os.kill(ranks[1], signal.SIGKILL)
                return

    with ranks_forked() as ranks, patch.object(elastic, "prepare_apart", prepare_here):
        killer = threading.Thread(target=lose, args=(ranks,))
        killer.start()
        try:
            code, _, said = quick("train", file, "--folder", folder, *flags)
        finally:
            over.set()
            killer.join()
    for pid in ranks.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return code, said


def prepare_here(request, folder, *, say, override, moved):
    assert moved
    prepare_moved(request, folder, say=say, override=override)
    return read_prepared(folder)


@pytest.mark.slow
@pytest.mark.wide  # in processes of their own; the next test loses a rank in this one
@PATIENCE
@pytest.mark.parametrize("count", [2, 4])
def test_a_run_that_loses_a_rank_ends_finished_on_fewer(tmp_path, count):
    steps = 30  # a checkpoint every 3
    with train(tmp_path, ask(tmp_path, count, steps=steps)) as process:
        wait_for_steps(tmp_path, process, 8)
        lost = find_ranks(process.pid)[count - 1]
        os.kill(lost, signal.SIGKILL)
        code = process.wait()
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    run = check_moved(tmp_path, said, count)
    assert run.recipe.parallel.world == count - 1
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    ranks = [row["ranks"] for row in found]
    kept = ranks.index(count - 1)  # steps that the newest checkpoint had
    assert ranks == [count] * kept + [count - 1] * (steps - kept)
    assert kept >= 6  # of 8 steps or more, at most those since the newest checkpoint were lost
    assert find_ranks(process.pid) == {}


def check_moved(tmp_path, said, count, batch=24):
    """The run is finished, and what was lost is said; the request stays the user's."""
    assert f"rank {count - 1} of the run was lost: it was ended by SIGKILL" in said
    run = read_json(tmp_path / "run" / "run.json", Run)
    assert run.finished
    assert run.recipe.global_batch == batch
    assert any(f"on {count - 1} of {count} ranks" in text for text in run.warnings)
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["recipe_digest"] == run.recipe_digest
    assert json.loads((tmp_path / "run" / "request.json").read_text())["hardware"]["count"] == count
    return run


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_a_run_goes_on_without_a_lost_rank_and_with_all_after_a_while(tmp_path):
    asked = ask(tmp_path, 2, batch=8, steps=30)  # a checkpoint every 3
    code, said = train_and_lose(tmp_path, asked, 8, "--regain", "0.01 s")  # before it has begun
    assert code == 0, said
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 31))
    ranks = [row["ranks"] for row in found]
    fewer = ranks.count(1)
    kept = ranks.index(1)
    assert ranks == [2] * kept + [1] * fewer + [2] * (30 - kept - fewer)
    assert kept >= 6  # of 8 steps or more, at most those since the newest checkpoint were lost
    assert kept + fewer < 30
    run = check_moved(tmp_path, said, 2, batch=8)
    assert run.recipe.parallel.world == 2
    assert any("all 2 ranks run again" in text for text in run.warnings)


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_without_restarts_a_lost_rank_ends_the_run(tmp_path):
    code, said = train_and_lose(tmp_path, ask(tmp_path, 2, batch=8), 1, "--restarts", "0")
    assert code == 5
    assert "the same command again" in said


def plan(tmp_path, count, **changes):
    made = from_data(ask(tmp_path, count), Request, source="the test")
    return api.plan(replace(made, **changes) if changes else made, levers=False)


def test_fewer_ranks_have_the_same_batch_and_course(tmp_path):
    made = plan(tmp_path, 4)
    for count in (3, 2, 1):
        smaller = change_ranks(made, count)
        again = api.plan(smaller, levers=False).recipe
        assert from_data(to_data(smaller), Request, source="the test") == smaller
        assert again.parallel.world == count
        assert again.global_batch == made.recipe.global_batch
        assert again.course == made.recipe.course
        assert again.digest != made.recipe.digest


def test_a_batch_that_cannot_be_shared_has_no_mesh(tmp_path):
    made = api.plan(from_data(ask(tmp_path, 4, batch=8), Request, source="the test"), levers=False)
    assert change_ranks(made, 3) is None
    assert change_ranks(made, 2).micro_batch == 2


def test_a_regain_that_is_no_time_is_refused():
    with pytest.raises(InvalidRequest, match="soon"):
        api.read_elastic(3, "soon")
