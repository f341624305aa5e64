"""Processes that are forked from one which has imported what runs import; each can be killed.

Python's own fork server, one of a session: a process that imports torch, transformers and peft by
itself takes 3 to 6 CPU seconds before it does anything.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["preloaded"])  # a file beside this one
QUIET = {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip


def fork(work: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """A process that does the work, a function of a module that it can import.

    Its exit code is that of an error of memfit's, 1 of any other, whose stack goes to stderr.
    """
    paths = [str(HERE), str(HERE / "train"), *filter(None, sys.path)]
    wanted = QUIET | {"PYTHONPATH": os.pathsep.join(paths)}
    before = dict(os.environ)
    os.environ.update(wanted)  # of the server, which begins with the first process
    try:
        process = SERVER.Process(target=_do, args=(work, arguments))
        process.start()
    finally:
        for name in wanted:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in wanted if name in before})
    return process


def _do(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    from memfit.core.errors import Error

    code = 0
    try:
        work(*arguments)
    except Error as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # a thread of gloo's would wait for ranks that do not come


def end_server() -> None:
    """End the server and wait for it, so that its CPU seconds are counted."""
    _forkserver._stop()
