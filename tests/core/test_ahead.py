"""A process that is started before its work is known: taken once, never left behind."""

import subprocess
import sys
import time

import pytest

from memfit.core.system import ahead

ECHO = "import sys\nprint(sys.argv[1:], sys.stdin.read())\n"
FAILING = "import sys\nif '--ahead' in sys.argv: raise SystemExit(1)\n"
WAITING = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "echoing.py").write_text(ECHO)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ahead, "_started", {})
    return "echoing"


def answer(module):
    with ahead.take(module) as child:
        return child.communicate("words")[0].strip()


def test_it_is_taken_once_and_then_one_is_started_as_it_is_needed(module):
    ahead.start_ahead(module)
    assert answer(module) == "['--ahead'] words"
    assert answer(module) == "[] words"


def test_one_that_has_ended_is_not_taken(module, tmp_path):
    (tmp_path / "echoing.py").write_text(FAILING + ECHO)
    ahead.start_ahead(module)
    ahead._started[module].wait(60)
    assert answer(module) == "[] words"


def test_a_system_without_room_for_it_starts_it_when_it_is_needed(module, monkeypatch):
    def refuse(*arguments, **options):
        raise BlockingIOError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        ahead.start_ahead(module)
    assert answer(module) == "[] words"


def test_one_that_is_never_taken_ends_with_its_starter(module, tmp_path):
    (tmp_path / "waiting.py").write_text(WAITING)
    code = (
        "from memfit.core.system import ahead\nahead.start_ahead('waiting')\n"
        "print(ahead._started['waiting'].stdout.readline())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=ahead.child_environment(),
    )  # fmt: skip
    until = time.monotonic() + 60
    while time.monotonic() < until:
        asked = ["ps", "-o", "stat=", "-p", done.stdout.strip()]
        found = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()
        if not found or found.startswith("Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"process {done.stdout} goes on")
