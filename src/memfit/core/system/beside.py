"""Work that a fork of this process does while this process does other work."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from memfit.core.system.processes import end_fork_with

Found = TypeVar("Found")
_ALLOWED: ContextVar[bool] = ContextVar("this process may fork", default=False)


@contextmanager
def allow_forks() -> Iterator[None]:
    """Meanwhile `start_beside` may fork: for a process of memfit's own, whose threads hold nothing
    that a fork would need."""
    token = _ALLOWED.set(True)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def start_beside(work: Callable[[], Found]) -> Callable[[], Found]:
    """Start the work, and return what waits for its result.

    The result is pickled. Where this process may not fork or has one core alone, and where the fork
    came to no result, the work is done here, and raises here, when the caller waits for its result.
    """
    if not (_ALLOWED.get() and sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1):
        return work
    reading, writing = os.pipe()
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:  # no memory, or no room for one more process
        os.close(reading)
        os.close(writing)
        return work
    if child == 0:
        _work_and_end(work, writing, parent)
    os.close(writing)

    def wait() -> Found:
        with os.fdopen(reading, "rb") as answers:
            answer = answers.read()
        _, status = os.waitpid(child, 0)
        if status != 0:
            return work()
        found: Found = pickle.loads(answer)  # written by a fork of this very process
        return found

    return wait


def _work_and_end(work: Callable[[], object], writing: int, parent: int) -> None:
    """Never returns: a fork that went on would be a second process that does its parent's work."""
    code = 1
    try:
        end_fork_with(parent)
        answer = pickle.dumps(work())
        with os.fdopen(writing, "wb") as out:
            out.write(answer)
        code = 0
    finally:
        os._exit(code)
