"""Reward functions in their process: what hostile and mistaken ones do, and what is made of it."""

import datetime
import math
import os
import time

import pytest

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.train.rl.rewards.process import RewardProcess

CODE = """
import os, sys, time

def size(completions, **_):
    return [len(c) for c in completions]

def columns(prompts, completions, completion_ids, truth, **_):
    return [float(p == "p" and i == [7] and t) for p, i, t in zip(prompts, completion_ids, truth)]

def loops(completions, **_):
    while any("loop" in c for c in completions):
        pass
    return [1.0] * len(completions)

def eats(completions, **_):
    if any("eat" in c for c in completions):
        bytearray(1 << 34)
    return [1.0] * len(completions)

def leaves(completions, **_):
    if any("exit" in c for c in completions):
        sys.exit(0)
    if any("die" in c for c in completions):
        os._exit(0)
    return [1.0] * len(completions)

def prints(completions, **_):
    print("noise" * 1000)
    sys.__stdout__.write('{"rewards": [9]}')
    os.write(1, b'{"rewards": [9]}')
    return [0.25] * len(completions)

def raises(completions, **_):
    return [1 / (c != "bad") for c in completions]

def short(completions, **_):
    return [1.0]

def odd(completions, **_):
    return [float("nan"), float("inf"), None, True, 10**400]

def words(completions, **_):
    return ["1.0" for _ in completions]

async def later(completions, **_):
    return [len(c) for c in completions]

def seen(completions, when, **_):
    return [float(w.startswith("2024-05-06")) for w in when]

def nothing(completions, **_):
    return None

def starts_others(completions, **_):
    import subprocess
    found = subprocess.Popen(["sleep", "600"])
    with open("pid", "w") as file:
        file.write(str(found.pid))
    time.sleep(600)
"""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(CODE)
    opened = []

    def call(name, completions, seconds=30.0, **columns):
        spec = name if ":" in name else f"rewards.py:{name}"
        process = RewardProcess(spec, seconds=seconds, memory=1 << 30)
        opened.append(process)
        ids = [[7] for _ in completions]
        return process.judge(["p"] * len(completions), completions, ids, columns)

    yield call
    for process in opened:
        process.stop()


def test_prompts_answers_tokens_and_columns_reach_the_function(ask):
    assert ask("size", ["a", "bb"]).rewards == (1.0, 2.0)
    assert ask("columns", ["a", "b"], truth=[True, False]).rewards == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "bad", "kind"),
    [("eats", "eat", "memory"), ("leaves", "exit", "raised"), ("leaves", "die", "exited"),
     ("raises", "bad", "raised")],
)  # fmt: skip
def test_an_answer_that_breaks_the_function_costs_its_own_reward_alone(ask, name, bad, kind):
    found = ask(name, ["a", bad, "c"])
    assert found.rewards == (1.0, None, 1.0)
    assert found.failures == {kind: 1}


def test_an_endless_loop_is_a_timeout(ask):
    found = ask("loops", ["a", "loop", "c"], seconds=1.5)
    assert found.rewards == (1.0, None, 1.0)
    assert found.failures == {"timeout": 1}


def test_a_function_that_always_hangs_is_not_waited_for_at_every_answer(ask):
    started = time.monotonic()
    found = ask("loops", ["loop"] * 50, seconds=0.2)
    assert found.rewards == (None,) * 50
    assert found.failures == {"timeout": 50}
    assert time.monotonic() - started < 50  # four processes, not fifty


def test_what_the_function_started_ends_with_it(ask, tmp_path):
    assert ask("starts_others", ["a"], seconds=2.0).rewards == (None,)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except OSError:
        return os.path.exists(f"/proc/{pid}")


def test_prints_are_no_answers(ask, capfd):
    assert ask("prints", ["a", "b"]).rewards == (0.25, 0.25)
    assert capfd.readouterr().out == ""


def test_what_is_no_finite_number_is_counted_and_no_reward(ask):
    found = ask("odd", ["a", "b", "c", "d", "e"])
    assert found.rewards == (None, None, None, 1.0, None)
    assert found.failures == {"not finite": 3}


def test_an_asynchronous_function_is_awaited_as_trl_awaits_it(ask):
    assert ask("later", ["a", "bcd"]).rewards == (1.0, 3.0)


def test_a_column_that_json_has_no_word_for_comes_as_its_text(ask):
    when = [datetime.datetime(2024, 5, 6), datetime.datetime(2023, 5, 6)]  # as parquet has them
    assert ask("seen", ["a", "b"], when=when).rewards == (1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("short", "returned 1 rewards for 2 answers"),
        ("words", "returned `1.0`, which is no number"),
        ("nothing", "raised on every answer: TypeError"),
    ],
)
def test_a_mistaken_function_is_named(ask, name, named):
    with pytest.raises(RunFailed, match=named) as caught:
        ask(name, ["a", "b"])
    assert f"rewards.py:{name}" in caught.value.message


def test_a_function_that_raises_on_every_answer_stops_the_run(ask):
    with pytest.raises(RunFailed, match="ZeroDivisionError"):
        ask("raises", ["bad", "bad"])


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("rewards.py:missing", "has no function `missing`"),
        ("broken.py:size", "SyntaxError"),
        ("leaving.py:size", "SystemExit"),
        ("absent.py:size", "there is no file `absent.py`"),
        ("numbers:x", "no reward that ships .number, regex, format, length."),
        ("regex:", "has no pattern"),
        ("regex:(", "unterminated|missing"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused(ask, tmp_path, spec, named):
    (tmp_path / "broken.py").write_text("def size(:")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(InvalidRequest, match=named):
        ask(spec, ["a"])


def test_it_goes_on_after_a_failure_and_holds_no_descriptor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(CODE)
    before = len(os.listdir("/proc/self/fd"))
    with RewardProcess("rewards.py:leaves", seconds=20, memory=1 << 30) as process:
        for bad in ("die", "a", "exit", "a"):
            found = process.judge(["p"] * 2, [bad, "b"], [[1], [2]], {})
            assert found.rewards[1] == 1.0
    assert len(os.listdir("/proc/self/fd")) == before
    assert math.isfinite(found.rewards[0])
