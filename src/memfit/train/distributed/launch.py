"""Starting the ranks of one machine, through torch's elastic launcher, and hearing how they ended.

folder/ranks/rank-00001/   stderr.log   what a rank says that is not the first one
                           error.json   why it ended, where it did
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from memfit.core.errors import Error, InvalidRequest, RunFailed
from memfit.core.system.processes import name_parent
from memfit.train.distributed.ranks import ERROR_FILE, FOLDER, KINDS, LOST, MoreRanks, RankLost

LAST = 60  # seconds that ranks have to save and end, once one of them is lost or Ctrl-C is pressed
# what torch says of a device, or a network, that failed; anything else would fail again on fewer
DEVICE_LOST = ("CUDA error", "NCCL error", "uncorrectable", "AcceleratorError")
RESUME = "start the same command again: it goes on from the newest checkpoint"


def launch(arguments: Sequence[str], run: Path, count: int) -> None:
    """Run `python arguments` once a rank, `count` times, and wait for all to end.

    The first rank writes to this process's terminal, the others to files of the run folder. When
    one ends badly the others are ended within `LAST` seconds. Raises what the first rank to fail
    raised, RankLost for a rank that was killed or whose device failed, MoreRanks where the run made
    room for more, and RunFailed when interrupted.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,  # on fewer ranks a certificate of their own is needed: workflows/elastic.py
        logs_specs=Logs(run),
    )
    try:
        with _surroundings(count):
            elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        raise _explain(error.failures, run) from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise RunFailed(f"interrupted by {name}", hint=RESUME) from None


class Logs(LogsSpecs):
    """The first rank on the terminal, all others in files of their own in the run folder."""

    def __init__(self, run: Path) -> None:
        super().__init__(str(run / FOLDER))
        self._run = run

    @property
    def root_log_dir(self) -> str:
        """Where the files are."""
        return str(self._run / FOLDER)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Of each local rank: "" is the terminal."""
        logs: dict[str, dict[int, str]] = {"stdout": {}, "stderr": {}, "error": {}}
        for local, environment in envs.items():
            home = self._run / FOLDER / f"rank-{int(environment['RANK']):05}"
            home.mkdir(parents=True, exist_ok=True)
            error = home / "error.json"
            error.unlink(missing_ok=True)
            environment[ERROR_FILE] = logs["error"][local] = str(error)
            for stream in ("stdout", "stderr"):
                logs[stream][local] = str(home / f"{stream}.log") if local else ""
        none = os.devnull
        return LogsDest(logs["stdout"], logs["stderr"], {}, {}, logs["error"], none, none)


@contextmanager
def _surroundings(count: int) -> Iterator[None]:
    """What the ranks inherit: an even share of the cores, and sockets that stay in this machine.

    The launcher's own log would repeat, with its stack, what memfit says in a sentence.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // count)),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(LAST),
        **name_parent(),
    }
    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
        for name in new:
            os.environ.pop(name, None)


def check_devices(count: int, device_type: str) -> None:
    """Raise InvalidRequest where this machine has fewer GPUs than ranks."""
    found = torch.cuda.device_count()
    if device_type == "cuda" and found < count:
        raise InvalidRequest(
            f"the request is for {count} GPUs of one machine, and torch finds {found} here",
            hint="set `hardware.count`, or start it under torchrun on the machines that have them",
        )


def _explain(failures: dict[int, ProcessFailure], run: Path) -> Error:
    """The rank that failed first of itself: not one that was ended, or that lost the others."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int, int]:
        rank, failure = item
        ended = failure.exitcode == -signal.SIGTERM
        lost = str(_words(failure).get("message", "")).startswith(LOST)
        return ended, lost, failure.timestamp, rank

    rank, failure = min(failures.items(), key=order)
    words = _words(failure)
    if words.get("more"):
        return MoreRanks(str(words["message"]))
    if words.get("explained") and not str(words["message"]).startswith(LOST):
        kind = KINDS.get(int(words["code"]), RunFailed)
        return kind(str(words["message"]), hint=str(words["hint"]))
    log = run / FOLDER / f"rank-{rank:05}" / "stderr.log"
    how = str(words.get("message", ""))
    if failure.exitcode < 0:
        how = f"it was ended by {failure.signal_name()}"
    gone = failure.exitcode < 0 or how.startswith(LOST) or any(word in how for word in DEVICE_LOST)
    kind = RankLost if gone else RunFailed
    return kind(
        f"rank {rank} of the run was lost: {how or f'exit code {failure.exitcode}'}",
        hint=f"{RESUME}, also on fewer ranks" + (f"; `{log}` is its log" if log.exists() else ""),
    )


def _words(failure: ProcessFailure) -> dict[str, Any]:
    data = failure.error_file_data
    return data if "explained" in data else {}
