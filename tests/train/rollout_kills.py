"""Killing runs that sample answers within a named part of an iteration."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
PARTS = ("rollout", "reward", "score", "update", "save")
OF_VALUES = ("rollout", "reward", "score", "values", "update", "save")
LATEST = 3  # of a part's beginnings after a start, at which one it is killed


def parts_of(objective: str) -> tuple[str, ...]:
    """The parts of an iteration of an objective; `score` is the reference's forward, too."""
    return OF_VALUES if objective.startswith("ppo") else PARTS


class Runs:
    """A process that starts runs; see killed_rollouts.py."""

    def __init__(self, process: subprocess.Popen[str], data: Path, cache: Path) -> None:
        self._process, self._data, self._cache = process, data, cache
        self.seconds: dict[str, list[float]] = {}  # of each part, every time that was seen whole

    def whole(self, folder: Path) -> None:
        """A run that nobody disturbs, or the rest of one."""
        self._start(folder)
        began = "", 0.0
        while True:
            line, now = self._read(), time.monotonic()
            if line in OF_VALUES:
                began = line, now
            elif line == "." and began[0]:
                self.seconds.setdefault(began[0], []).append(now - began[1])
                began = "", 0.0
            elif line.startswith("ended"):
                assert line == "ended 0", "the run failed"
                return

    def kill(self, folder: Path, part: str, chance: random.Random) -> bool:
        """Kill it at a random moment of a part; whether it was still in that part."""
        times = 2 if part == "update" else 1  # in each iteration
        pid, left = self._start(folder), chance.randint(1, LATEST * times)
        last = ""
        while left:
            last = self._read()
            assert not last.startswith("ended"), "it had ended before its moment"
            left -= last == part
        time.sleep(chance.uniform(0, median(self.seconds[part])))
        os.kill(pid, signal.SIGKILL)
        while not (line := self._read()).startswith("ended"):
            last = line
        assert os.WTERMSIG(int(line.split()[1])) == signal.SIGKILL
        return last == part

    def _start(self, folder: Path) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{folder} {self._data} {self._cache}\n")
        self._process.stdin.flush()
        while not (line := self._read()).startswith("began"):
            pass
        return int(line.split()[1])

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the process that starts runs is gone"
        return line.strip()


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    found = (folder / "checkpoints").glob("step-*")
    return max((int(path.name.removeprefix("step-")) for path in found), default=0)


@contextmanager
def start_runs(data: Path, cache: Path, objective: str = "grpo") -> Iterator[Runs]:
    """A process that starts runs of an objective over these prompts."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), *(p for p in sys.path if p)])
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with subprocess.Popen(
        [sys.executable, str(HERE / "killed_rollouts.py"), objective],
        env={**os.environ, **quiet, "PYTHONPATH": path},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield Runs(process, data, cache)
        assert process.stdin is not None
        process.stdin.close()
