"""The processes of a run: which one this is, and what all of them must agree on.

Nothing of a step goes through here: its collectives are FSDP2's own. What does is a few numbers a
step, in host memory.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.utils._python_dispatch import _disable_current_modes

from memfit.core.errors import DoesNotFit, Error, InvalidRequest, NotCertified, RunFailed
from memfit.train.distributed.presence import NotHere, watched

c10d: Any = dist.distributed_c10d  # whose names its types leave out
TIMEOUT = timedelta(minutes=10)  # of a collective: a rank that hangs ends the run after it
PATIENCE = timedelta(days=7)  # with the first rank, which reads data and certifies for all
LOST = "another rank was lost"
GO_ON = "the same command goes on from the newest checkpoint, also on fewer ranks"
FOLDER = "ranks"  # of a run folder: what all but the first rank write
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where the launcher expects a rank's last words


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank a process is, as its launcher numbers it."""

    rank: int
    size: int
    local_rank: int  # on its machine


def find_place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place that torchrun, or srun, gives a process; None of one that nobody launched.

    torchrun's variables are RANK, WORLD_SIZE and LOCAL_RANK (docs.pytorch.org, elastic/run), srun's
    SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID. Raises InvalidRequest for what is no number, and
    under srun without MASTER_ADDR.
    """
    for names in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ):
        if all(name in environment for name in names):
            try:
                rank, size, local = (int(environment[name]) for name in names)
            except ValueError:
                wrong = ", ".join(f"{name}={environment[name]}" for name in names)
                raise InvalidRequest(f"a launcher set {wrong}, which are no numbers") from None
            if size == 1:
                return None
            if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
                raise InvalidRequest(
                    f"{names[0]}={rank} of {size}, but MASTER_ADDR and MASTER_PORT are not set",
                    hint="set both to the first machine's name and a free port, or use torchrun",
                )
            return Place(rank, size, local)
    return None


class RankLost(RunFailed):
    """A rank was killed, its device failed, or it did not come: others may go on without it."""


class MoreRanks(RunFailed):
    """A run on fewer ranks than it began with has saved and ended, to go on with all."""


class Ranks:
    """One process alone, which agrees with itself."""

    rank = 0
    size = 1
    notes: tuple[str, ...] = ()  # on ranks that were lost before, for run.json
    more: Path | None = None  # a file that asks to save and end, to go on with more ranks

    def gather(self, *values: float) -> list[tuple[float, ...]]:
        """The numbers of all ranks, in their order; every rank calls it and gets the same."""
        return [values]

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in their order."""
        return [text]

    def total(self, value: float) -> float:
        """The sum over ranks, added in their order: the same on all, bit by bit."""
        return sum(numbers[0] for numbers in self.gather(value))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return any(numbers[0] for numbers in self.gather(float(flag)))

    def from_first(self, work: Callable[[], str]) -> str:
        """What the first rank works out, however long that takes; its error is everybody's."""
        return work()

    def wants_more(self) -> bool:
        """Whether this rank is requested to make room for a run on more."""
        return self.rank == 0 and self.more is not None and self.more.exists()

    def wait(self) -> None:
        """Until all ranks are here."""
        self.gather(0.0)

    def home(self, run: Path) -> Path:
        """Where this rank writes what is its own: the run folder for the first one."""
        return run if self.rank == 0 else run / FOLDER / f"rank-{self.rank:05}"


class Alike(Ranks):
    """One of several ranks of which all say what this one does: in a trace, where no other is, and
    in a rehearsal, where all do the same."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather(self, *values: float) -> list[tuple[float, ...]]:
        """See `Ranks`."""
        return [values] * self.size

    def gather_texts(self, text: str) -> list[str]:
        """See `Ranks`."""
        return [text] * self.size


class Joined(Ranks):
    """One of several processes, within `join`."""

    def __init__(self, place: Place, store: Any) -> None:
        self.rank, self.size = place.rank, place.size
        self._store = store
        self._questions = 0

    def gather(self, *values: float) -> list[tuple[float, ...]]:
        """See `Ranks`."""
        found = self._exchange(lambda: torch.tensor(values, dtype=torch.float64))
        return [tuple(numbers) for numbers in found]

    def gather_texts(self, text: str) -> list[str]:
        """See `Ranks`: lengths first, then bytes, padded to the longest."""
        content = text.encode()
        lengths = [int(numbers[0]) for numbers in self.gather(float(len(content)))]

        def padded() -> torch.Tensor:
            mine = torch.zeros(max(lengths), dtype=torch.uint8)
            mine[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            return mine

        found = self._exchange(padded)
        return [bytes(line[:length]).decode() for line, length in zip(found, lengths, strict=True)]

    def _exchange(self, make: Callable[[], torch.Tensor]) -> list[list[Any]]:
        """The values of all ranks' tensors. No watcher counts them: they are no part of a step."""
        with explained_loss(), _disable_current_modes():
            mine = make()
            found = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(found, mine)
            return [tensor.tolist() for tensor in found]

    def from_first(self, work: Callable[[], str]) -> str:
        """See `Ranks`."""
        self._questions += 1
        key = f"first/{self._questions}"
        if self.rank == 0:
            try:
                answer = work()
            except Error as error:
                self._store.set(key, json.dumps([error.exit_code, error.message, error.hint]))
                raise
            self._store.set(key, json.dumps([0, answer, ""]))
            return answer
        with _deadly_interrupts():
            self._store.wait([key], PATIENCE)
        code, message, hint = json.loads(self._store.get(key))
        if code:
            raise KINDS.get(code, RunFailed)(message, hint=hint)
        return str(message)


KINDS: dict[int, type[Error]] = {
    kind.exit_code: kind for kind in (InvalidRequest, DoesNotFit, NotCertified, RunFailed)
}


@contextmanager
def join(place: Place, device_type: str) -> Iterator[Ranks]:
    """Be that rank among the others: gloo between hosts' memories, NCCL between GPUs.

    Raises RunFailed where the others do not come, or one is lost later.
    """
    backend = "gloo"
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise InvalidRequest(
                "the recipe is for a GPU, and torch finds none here",
                hint="run it on machines with them; `memfit certify` needs none",
            )
        torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    c10d.default_pg_timeout = TIMEOUT  # of the groups of a mesh: torch's own is 30 min for gloo
    with ExitStack() as opened:
        with explained_loss(), _deadly_interrupts():
            meeting = rendezvous("env://", place.rank, place.size, timeout=TIMEOUT)
            store, rank, size = next(iter(meeting))
            own = c10d.PrefixStore("memfit", store)
            opened.enter_context(watched(rank, size, own, lambda lost: _end(rank, lost)))
            dist.init_process_group(
                backend, store=c10d.PrefixStore("step", store), rank=rank, world_size=size,
                timeout=TIMEOUT,
            )  # fmt: skip
        opened.callback(dist.destroy_process_group)
        yield Joined(place, own)


@contextmanager
def _deadly_interrupts() -> Iterator[None]:
    """Let Ctrl-C end this process at once, without a word.

    For waiting in torch for other ranks: there Python's own handler is called only after it.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(rank: int, lost: int) -> None:
    """End this process, which waits for a rank that is gone and has not noticed."""
    who = f"the process of rank {lost}" + (" or of one that it knew of" if rank else "")
    error = RankLost(f"{LOST}: {who} is gone", hint=GO_ON)
    sys.stderr.write(f"error: {error}\n")
    sys.stderr.flush()
    os._exit(leave_word(error))  # no thread can end what the main one waits for


def leave_word(error: BaseException) -> int:
    """Write why this rank ends where its launcher looks; the exit code."""
    code = error.exit_code if isinstance(error, Error) else 1
    message = error.message if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, Error) else ""
    if path := os.environ.get(ERROR_FILE):
        words = {
            "message": message, "hint": hint, "code": code, "explained": isinstance(error, Error),
            "more": isinstance(error, MoreRanks),
            "timestamp": int(time.time()),
        }  # fmt: skip
        Path(path).write_text(json.dumps(words))
    return code


def _is_lost(error: RuntimeError) -> bool:
    """Whether a collective failed: another rank is gone, or did not come in time."""
    kinds = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    text = str(error)
    return isinstance(error, kinds) or "gloo" in text or "Connection" in text


@contextmanager
def explained_loss() -> Iterator[None]:
    """Turn what a lost rank does to the others into RunFailed."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        first = str(error).strip().partition("\n")[0]
        if "imed out" in first or "timeout" in first.lower():
            first = f"it did not come to a collective in time ({first})"
        raise RankLost(f"{LOST}: {first}", hint=GO_ON) from None
    except NotHere as error:
        raise RankLost(f"{LOST}: {error.message}", hint=GO_ON) from None
