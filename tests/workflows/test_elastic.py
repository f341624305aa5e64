"""A rank is killed, and the run ends finished by itself: on fewer ranks, then on all again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.records import from_data, read_json, to_data
from memfit.records.request import Request
from memfit.records.results import Run
from memfit.workflows.elastic import change_ranks

CONFIG = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
TEXT = "a few words of text that a tokenizer can learn from and some more of them\n" * 60
LONGEST = 240  # seconds for a moment to come


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


def train(tmp_path, request, *flags):
    file, folder = tmp_path / "request.json", tmp_path / "run"
    file.write_text(json.dumps(request))
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    path = os.pathsep.join(p for p in sys.path if p)
    with (tmp_path / "said").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "memfit", "train", str(file), "--folder", str(folder), *flags],
            env={**os.environ, **quiet, "PYTHONPATH": path}, stdout=said, stderr=said,
        )  # fmt: skip


def wait_for_steps(tmp_path, process, steps):
    log, limit = tmp_path / "run" / "log.jsonl", time.monotonic() + LONGEST
    while not (log.exists() and log.read_bytes().count(b"\n") >= steps):
        assert process.poll() is None, (tmp_path / "said").read_text()
        assert time.monotonic() < limit
        time.sleep(0.01)


def rows(tmp_path):
    return list(map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.wide)])
def test_a_run_that_loses_a_rank_ends_finished_on_fewer(tmp_path, count):
    steps = 60  # a checkpoint every 6
    with train(tmp_path, ask(tmp_path, count, steps=steps)) as process:
        wait_for_steps(tmp_path, process, 14)
        lost = find_ranks(process.pid)[count - 1]
        os.kill(lost, signal.SIGKILL)
        code = process.wait(LONGEST)
    said = (tmp_path / "said").read_text()
    assert code == 0, said
    assert f"rank {count - 1} of the run was lost: it was ended by SIGKILL" in said
    run = read_json(tmp_path / "run" / "run.json", Run)
    assert run.finished
    assert run.recipe.parallel.world == count - 1
    assert run.recipe.global_batch == 24
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    ranks = [row["ranks"] for row in found]
    kept = ranks.index(count - 1)  # steps that the newest checkpoint had
    assert ranks == [count] * kept + [count - 1] * (steps - kept)
    assert kept >= 12  # of 14 steps or more, at most those since the newest checkpoint were lost
    assert any(f"on {count - 1} of {count} ranks" in text for text in run.warnings)
    certificate = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert certificate["recipe_digest"] == run.recipe_digest
    assert json.loads((tmp_path / "run" / "request.json").read_text())["hardware"]["count"] == count
    assert find_ranks(process.pid) == {}


@pytest.mark.slow
def test_all_ranks_run_again_after_a_while(tmp_path):
    with train(tmp_path, ask(tmp_path, 2, steps=150), "--regain", "1 s") as process:
        wait_for_steps(tmp_path, process, 35)
        os.kill(find_ranks(process.pid)[1], signal.SIGKILL)
        assert process.wait(LONGEST) == 0, (tmp_path / "said").read_text()
    ranks = [row["ranks"] for row in rows(tmp_path)]
    assert len(ranks) == 150
    fewer = ranks.count(1)
    kept = ranks.index(1)
    assert ranks == [2] * kept + [1] * fewer + [2] * (150 - kept - fewer)
    assert kept + fewer < 150
    run = read_json(tmp_path / "run" / "run.json", Run)
    assert run.recipe.parallel.world == 2
    assert any("all 2 ranks run again" in text for text in run.warnings)


@pytest.mark.slow
def test_without_restarts_a_lost_rank_ends_the_run(tmp_path):
    with train(tmp_path, ask(tmp_path, 2), "--restarts", "0") as process:
        wait_for_steps(tmp_path, process, 1)
        os.kill(find_ranks(process.pid)[1], signal.SIGKILL)
        assert process.wait(LONGEST) == 5
    assert "the same command again" in (tmp_path / "said").read_text()


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
