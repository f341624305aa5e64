"""Work in a fork: its result, its failure, and that it is done once."""

import os
import sys

import pytest

from memfit.core.system.beside import allow_forks, start_beside

FORKS = sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1
FORKING = pytest.mark.skipif(not FORKS, reason="one core, or a system that does not fork")


@FORKING
def test_the_work_runs_in_another_process_where_that_is_allowed():
    with allow_forks():
        wait = start_beside(os.getpid)
    assert wait() != os.getpid()
    assert start_beside(os.getpid)() == os.getpid()


def test_one_core_does_it_when_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    done = []
    with allow_forks():
        wait = start_beside(lambda: done.append(os.getpid()))
    assert done == []
    wait()
    assert done == [os.getpid()]


@FORKING
@pytest.mark.parametrize("way", ["raises", "is killed", "cannot be pickled"])
def test_what_fails_in_the_fork_is_done_here_and_fails_here(way, monkeypatch):
    here, forks, fork = os.getpid(), [], os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(fork()) or forks[-1])

    def work():
        if way == "raises":
            raise LookupError("asked for")
        if os.getpid() == here:
            return "done here"
        if way == "is killed":
            os.kill(os.getpid(), 9)
        return lambda: None

    with allow_forks():
        wait = start_beside(work)
    if way == "raises":
        with pytest.raises(LookupError, match="asked for"):
            wait()
    else:
        assert wait() == "done here"
    with pytest.raises(ChildProcessError):
        os.waitpid(forks[0], os.WNOHANG)  # it is not left behind


def test_a_machine_without_room_for_a_fork_does_the_work_itself(monkeypatch):
    def refuse():
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", refuse, raising=False)
    with allow_forks():
        assert start_beside(os.getpid)() == os.getpid()
