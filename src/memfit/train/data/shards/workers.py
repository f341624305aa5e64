"""Processes that tokenise shards side by side.

One process reads the tokenizer, without torch, and forks as many as there are cores; what it holds
is shared by all. Each gets one shard at a time, writes its tokens as a part (see `parts`) and says
so. They end when the process that started them is gone: they read the end of their pipe.

    python -m memfit.train.data.shards.workers      started with an Order on stdin
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NamedTuple

from memfit.core.errors import Error, InvalidRequest, RunFailed
from memfit.core.system.memory import find_free, read_anonymous
from memfit.core.units import KIB, MIB
from memfit.train.data.shards.encode import encode_shard
from memfit.train.data.shards.parts import write_part
from memfit.train.data.shards.split import SHARD, Item
from memfit.train.data.tokenizer import Chat, Tokenizer, read_tokenizer

ENOUGH = 4 * SHARD  # bytes of data: fewer are tokenised sooner than processes start
AHEAD = 4  # shards for each process that may be finished before an earlier one is
LAST = 10  # seconds for processes to end by themselves: one may be within a shard
SPARE = 1.25  # a shard may take so much more than those before it
ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # one core a process
    "TRANSFORMERS_VERBOSITY": "error",
    # glibc keeps what a shard's encodings held for the next one's
    "MALLOC_TRIM_THRESHOLD_": str(128 * MIB), "MALLOC_MMAP_THRESHOLD_": str(32 * MIB),
}  # fmt: skip
Shards = Iterator[tuple[int, tuple[Item, ...]]]


class Order(NamedTuple):
    """What the processes need to know."""

    source: str  # of the tokenizer
    fingerprint: str
    chat: tuple[str, str]  # of `tokenizer.Chat`
    objective: str
    folder: Path  # for parts
    pipes: tuple[int, ...]  # file descriptors, one a process


class Workers:
    """The processes, as the one that started them sees them."""

    def __init__(self, child: subprocess.Popen[bytes], pipes: list[Connection], free: int) -> None:
        self._child = child
        self._pipes = pipes
        self._free = free  # bytes that they may hold in all
        self._peak = 0  # bytes that one held

    def run(self, shards: Shards, done: set[int], first: int) -> Iterator[int]:
        """Tokenise shards; yields the numbers of those whose part is there, in order from `first`.

        done: shards whose part is there already. Raises what reading and tokenising raise, for the
        first shard that has an error; RunFailed where a process was ended.
        """
        finished, failed = set(done), dict[int, Exception]()
        idle, busy = list(self._pipes), dict[Connection, int]()
        sent = first  # shards from `first` on that were sent, or are done already
        exhausted = False
        while True:
            while not exhausted and not failed and sent - first < AHEAD * len(self._pipes):
                if sent not in finished and len(busy) >= self._allowed():
                    break
                try:
                    number, shard = next(shards)
                except StopIteration:
                    exhausted = True
                    break
                except InvalidRequest as error:
                    failed[sent] = error
                    break
                sent = number + 1
                if number not in finished:
                    pipe = idle.pop()
                    busy[pipe] = number
                    self._send(pipe, (number, shard))
            while first in finished:
                yield first
                first += 1
            if first in failed:
                raise failed[first]
            if exhausted and first == sent:
                return
            for pipe in [p for p in wait(list(busy)) if isinstance(p, Connection)]:
                number = busy.pop(pipe)
                idle.append(pipe)
                problem = self._receive(pipe)
                if problem is None:
                    finished.add(number)
                else:
                    failed[number] = problem

    def _allowed(self) -> int:
        """How many may work at once: one, until it is known what it holds."""
        if not self._peak:
            return 1
        return max(1, min(len(self._pipes), int(self._free / (SPARE * self._peak))))

    def _send(self, pipe: Connection, what: object) -> None:
        try:
            pipe.send(what)
        except OSError:
            raise self._gone() from None

    def _receive(self, pipe: Connection) -> Exception | None:
        """What a process says of its shard: None, or its error."""
        try:
            problem, self._peak = pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None
        if isinstance(problem, str):
            raise RuntimeError(problem)
        return problem  # type: ignore[no-any-return]

    def _gone(self) -> RunFailed:
        return RunFailed(
            "a process that tokenises the data was ended",
            hint="memory ran out, or somebody ended it; start the same command again: what is"
            " tokenised stays",
        )

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout=LAST)
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


@contextlib.contextmanager
def start_workers(
    size: int, tokenizer: Tokenizer, objective: str, folder: Path, memory: int | None
) -> Iterator[Workers | None]:
    """Processes for `size` bytes of data; None where this process alone does as well.

    memory: bytes that all processes of this command may hold; None: what the machine has. None also
    where that is too little for another process, or the tokenizer is not what its source says.
    """
    free, own = find_free(memory), read_anonymous() or 0
    if size < ENOUGH or _count_cores() < 2 or free < 2 * own or not hasattr(os, "fork"):
        yield None
        return
    workers = _start(tokenizer, objective, folder, free)
    try:
        yield workers
    finally:
        if workers is not None:
            workers.close()


def _start(tokenizer: Tokenizer, objective: str, folder: Path, free: int) -> Workers | None:
    pairs = [Pipe() for _ in range(_count_cores())]
    theirs = tuple(there.fileno() for _, there in pairs)
    template, learns = tokenizer.chat_settings
    order = Order(
        tokenizer.source, tokenizer.fingerprint, (template, learns), objective, folder, theirs
    )
    child = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=theirs,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    for _, there in pairs:
        there.close()
    workers = Workers(child, [here for here, _ in pairs], free)
    with contextlib.suppress(BrokenPipeError):
        pickle.dump(order, child.stdin)
        child.stdin.close()
    if child.stdout.readline() != b"ready\n":
        workers.close()
        return None
    return workers


def _count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main() -> None:
    """Read the tokenizer, fork one process a pipe, and wait for them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that started this decides
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers do without; it is large
    order: Order = pickle.load(sys.stdin.buffer)
    tokenizer = read_tokenizer(order.source, Chat(*order.chat))
    if tokenizer.fingerprint != order.fingerprint:
        return
    gc.collect()
    gc.freeze()  # or counting references would copy every page
    for index, descriptor in enumerate(order.pipes):
        if os.fork() == 0:
            for other in (*order.pipes[:index], *order.pipes[index + 1 :]):
                os.close(other)
            code = 1
            try:
                _serve(Connection(descriptor), order, tokenizer)
                code = 0
            finally:
                os._exit(code)
    for descriptor in order.pipes:
        os.close(descriptor)
    sys.stdout.write("ready\n")
    sys.stdout.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _serve(pipe: Connection, order: Order, tokenizer: Tokenizer) -> None:
    """Tokenise what comes, until nothing more can come."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, shard = pipe.recv()
            pipe.send((_do(number, shard, order, tokenizer), _peak()))


def _do(
    number: int, shard: tuple[Item, ...], order: Order, tokenizer: Tokenizer
) -> Exception | str | None:
    try:
        write_part(order.folder, number, encode_shard(shard, tokenizer, order.objective))
    except Error as error:
        return InvalidRequest(error.message, hint=error.hint)
    except OSError as error:
        return error
    except Exception:
        return traceback.format_exc()
    return None


def _peak() -> int:
    """Bytes that this process held, at most."""
    unit = 1 if sys.platform == "darwin" else KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
