"""Reward functions in processes of their own, with limits of time and memory.

A user's code may loop, take all memory or end its process; an answer that makes it do so has no
reward, and is counted. The limits guard against accidents: the code runs as the user.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.core.system.processes import name_parent
from memfit.core.units import show_bytes
from memfit.records.reinforcement import check_spec
from memfit.train.rl.rewards.functions import BUILT_IN

START_SECONDS = 60.0  # for the imports of a user's file
MOST_FAILURES = 3  # answers judged alone in a row that fail; the rest of the batch is not tried
PIECE = 1 << 16


class Judged(NamedTuple):
    """What one function says of a batch of answers."""

    rewards: tuple[float | None, ...]
    failures: Counter[str]  # answers without a reward: timeout, memory, exited, raised, not finite


def take_finite(values: Sequence[float | None]) -> Judged:
    """Values as rewards: None is none, and one that is not finite counts as a failure, too."""
    good = [value is None or abs(value) <= sys.float_info.max for value in values]
    rewards = tuple(
        float(value) if fine and value is not None else None
        for value, fine in zip(values, good, strict=True)
    )
    return Judged(rewards, +Counter({"not finite": good.count(False)}))


class _Failed(Exception):
    """The function gave no rewards."""

    def __init__(self, kind: str, because: str) -> None:
        super().__init__(because)
        self.kind = kind
        self.because = because


class RewardProcess:
    """One reward function; its process starts with the first request, and anew after a failure.

    spec: a name that ships (`number`, `regex:PATTERN`, `format`, `length`) or `FILE.py:NAME`.
    seconds: of one call; memory: bytes of the process, address space counted. A context manager.
    Raises InvalidRequest: no such function, a file that cannot be loaded.
    """

    def __init__(self, spec: str, *, seconds: float, memory: int) -> None:
        check_readable(spec)
        self.spec = spec
        self._seconds = seconds
        self._memory = memory
        self._child: subprocess.Popen[bytes] | None = None
        self._ends: tuple[int, int] = (-1, -1)
        self._rest = b""

    def __enter__(self) -> RewardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def ready(self) -> None:
        """Start the process; raises InvalidRequest where the function cannot be loaded."""
        self._start()

    def judge(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any],
    ) -> Judged:
        """Rewards of a batch. columns: lists as long as it, or single numbers; what JSON does not
        have (dates, decimals, bytes) comes to the function as its text.

        Where the batch fails as a whole, each answer is judged alone. Raises RunFailed where the
        function raises on every answer, or returns what is no list of as many numbers.
        """
        count = len(completions)
        request = {
            "prompts": list(prompts), "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids], **columns,
        }  # fmt: skip
        try:
            return self._read(self._call(request), count)
        except _Failed as error:
            if count == 1:
                return self._refuse_if_raised(Judged((None,), Counter([error.kind])), error)
        return self._judge_alone(request, count)

    def stop(self) -> None:
        """End the process and all that it started."""
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for end in self._ends:
            os.close(end)

    def _judge_alone(self, request: Mapping[str, Any], count: int) -> Judged:
        rewards: list[float | None] = []
        failures: Counter[str] = Counter()
        in_row, last = 0, _Failed("", "")
        for index in range(count):
            if in_row == MOST_FAILURES:
                rewards.append(None)
                failures[last.kind] += 1
                continue
            own = {
                k: v[index : index + 1] if isinstance(v, list | tuple) else v
                for k, v in request.items()
            }
            try:
                found = self._read(self._call(own), 1)
                rewards.extend(found.rewards)
                failures += found.failures
                in_row = 0
            except _Failed as error:
                rewards.append(None)
                failures[error.kind] += 1
                in_row, last = in_row + 1, error
        return self._refuse_if_raised(Judged(tuple(rewards), failures), last)

    def _refuse_if_raised(self, judged: Judged, last: _Failed) -> Judged:
        """A function that raises whatever the answer is a mistake, not an answer's doing."""
        if judged.failures["raised"] == len(judged.rewards):
            raise RunFailed(
                f"the reward function `{self.spec}` raised on every answer: {last.because}",
                hint="call it as `f(prompts=…, completions=…, completion_ids=…, **columns)`",
            )
        return judged

    def _read(self, answer: dict[str, Any], count: int) -> Judged:
        found = answer["rewards"]
        if len(found) != count:
            raise RunFailed(
                f"the reward function `{self.spec}` returned {len(found)} rewards for {count}"
                " answers",
                hint="return one number, or None, for each answer",
            )
        for value in found:
            if value is not None and not isinstance(value, int | float):
                raise RunFailed(
                    f"the reward function `{self.spec}` returned `{value}`, which is no number",
                    hint="return one number, or None, for each answer",
                )
        return take_finite(found)

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request, or _Failed; a process that may not go on is stopped."""
        self._start()
        until = time.monotonic() + self._seconds
        try:
            self._send(json.dumps(request, default=str).encode() + b"\n", until)
            answer = self._receive(until)
        except _Failed:
            self.stop()
            raise
        if "failed" in answer:
            if answer["failed"] == "memory":  # what it holds by now is unknown
                self.stop()
            raise _Failed(answer["failed"], answer["because"])
        return answer

    def _start(self) -> None:
        if self._child is not None:
            return
        read, theirs_out = os.pipe()
        theirs_in, write = os.pipe()
        module = "memfit.train.rl.rewards.child"
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, self.spec, str(self._memory), str(theirs_in),
             str(theirs_out)],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **name_parent()},
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(write, False)
        self._ends, self._rest = (read, write), b""
        try:
            answer = self._receive(time.monotonic() + START_SECONDS)
        except _Failed as error:
            self.stop()
            answer = {"unusable": f"{error.kind}: {error.because}"}
        if "unusable" in answer:
            self.stop()
            raise InvalidRequest(
                f"the reward function `{self.spec}` cannot be loaded: {answer['unusable']}",
                hint=f"it may take {START_SECONDS:g} s and {show_bytes(self._memory)}",
            )

    def _send(self, content: bytes, until: float) -> None:
        while content:
            self._wait((), (self._ends[1],), until)
            try:
                content = content[os.write(self._ends[1], content[:PIECE]) :]
            except BrokenPipeError:
                raise _Failed("exited", "its process ended") from None

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\n" not in self._rest:
            self._wait((self._ends[0],), (), until)
            if not (piece := os.read(self._ends[0], PIECE)):
                raise _Failed("exited", "its process ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _wait(self, read: Sequence[int], write: Sequence[int], until: float) -> None:
        left = max(0.0, until - time.monotonic())
        if not any(select.select(read, write, (), left)):
            raise _Failed("timeout", f"no answer within {self._seconds:g} s")


def check_readable(spec: str) -> None:
    """Raise InvalidRequest where a reward names neither what ships nor a file that is there."""
    check_spec(spec)
    path, _, _ = spec.rpartition(":")
    if spec.partition(":")[0] not in BUILT_IN and not Path(path).is_file():
        raise InvalidRequest(
            f"`reward.funcs: {spec}`: there is no file `{path}`",
            hint="the path is looked up from where memfit runs",
        )
