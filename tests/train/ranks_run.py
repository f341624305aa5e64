"""Runs of many ranks, for the tests that compare, stop and kill them: each a forked process."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch.distributed as dist
from tiny_runs import CONFIG, tiny_recipe

from forked import SERVER, fork
from memfit.records.model import ModelReference
from memfit.records.recipe import Lora, Parallel, Preference, Recipe
from memfit.records.request import Request, Task
from memfit.train.distributed import ranks as ranks_module
from memfit.train.distributed import stragglers
from memfit.train.distributed.ranks import find_place, join
from memfit.train.run import loop
from memfit.train.run.loop import Cadence, train

# one block, where an order does not ask for more: what torch works out of each shard takes as long
# as the steps do
CONFIG = {**CONFIG, "num_hidden_layers": 1}
EVEN = {**CONFIG, "vocab_size": 302, "intermediate_size": 78}  # which two ranks can share
UNEVEN = {**CONFIG, "vocab_size": 301, "intermediate_size": 77}  # which no number of ranks divides
LORA = Lora(rank=3, alpha=8.0, targets=("q_proj", "v_proj"))


def recipe_of(order: dict) -> Recipe:
    """The recipe of an order: always the same global batch of 8 rows."""
    parallel = Parallel(**order.get("parallel", {}))
    micro = order.get("micro_batch", 8 // parallel.dp)
    config = (EVEN if order.get("even") else UNEVEN) | order.get("config", {})
    return tiny_recipe(
        model=ModelReference(name="tiny", source="", config=config),
        parallel=parallel, micro_batch=micro, accumulation=8 // micro // parallel.dp,
        method=order.get("method", "full"), lora=LORA if "method" in order else Lora(),
        base_format=order.get("base_format", "fp32"), steps=order.get("steps", 6),
        packing=order.get("packing", True),
        optimizer={"implementation": "foreach"}, objective=order.get("objective", "pretrain"),
        preference=Preference(**order.get("preference", {})),
    )  # fmt: skip


def run(order: dict, met: Connection) -> None:
    """One rank, which writes a byte to `met` once it hears of the others' ends."""
    data, cache = order["data"], Path(order["cache"])
    recipe, folder = recipe_of(order), Path(order["folder"])
    request = Request(
        model=recipe.model.config, task=Task(objective=recipe.objective, data=data, evaluation=data)
    )
    watch = order.get("watch_every", 50)
    cadence = Cadence(
        save_every=2, evaluate_every=3, watch_every=watch, asynchronous=order.get("asynchronous")
    )
    place = find_place()
    if place is None:
        train(recipe, request, folder, cadence=cadence, cache=cache)
        return
    if "late" in order:
        be_late(place.rank == order["late"])
    else:
        stragglers.Waiting.due = lambda *_: False  # half a second of each rank
    if "hang" in order:
        ranks_module.TIMEOUT = timedelta(seconds=order["timeout"])
        be_late(place.rank == order["hang"], seconds=3600.0)
    write_when_met(met)
    if "absent" in order and place.rank:
        time.sleep(3600)
    if "vanish" in order and place.rank:
        vanish(order["vanish"])
    with join(place, "cpu") as ranks:
        if order.get("vanish") == "new_group":
            dist.new_group([0, 1])  # as torch's meshes make them
        train(recipe, request, folder, cadence=cadence, cache=cache, ranks=ranks)


def be_late(is_late: bool, seconds: float = 0.2) -> None:
    """One rank comes late to every step, and steps are looked at whatever that costs."""
    stragglers.AFFORDED = float("inf")
    plain = loop.run_step

    def run_step(*args: Any, **named: Any) -> Any:
        time.sleep(seconds * is_late)
        return plain(*args, **named)

    loop.run_step = run_step


def write_when_met(met: Connection) -> None:
    """Write a byte once this rank is within `watched`."""
    plain = ranks_module.watched

    @contextmanager
    def watched(*args: Any) -> Iterator[None]:
        with plain(*args):
            os.write(met.fileno(), b".")
            yield

    ranks_module.watched = watched


def vanish(call: str) -> None:
    """This rank ends, as by `kill -9`, where it would call that function of torch's."""
    setattr(dist, call, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def free_port() -> int:
    """Not of those that the system hands out (from 32768 on): between here and where the first rank
    listens, other ranks' connections would take such a one, and the others wait for nobody."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", SystemRandom().randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])


def fork_ranks(world: int, work: Callable[..., None], *arguments: Any) -> list[ForkServerProcess]:
    """Processes of so many ranks, each of which does the work and ends."""
    port = free_port()
    return [fork(be_rank, rank, world, port, work, *arguments) for rank in range(world)]


def be_rank(rank: int, world: int, port: int, work: Callable[..., None], *arguments: Any) -> None:
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    work(*arguments)


class Started:
    """The ranks of an order. Where one ends before it has met the others, these are ended too, as
    every launcher does: they cannot know of it. Later nobody looks after them."""

    def __init__(self, order: dict) -> None:
        world = Parallel(**order.get("parallel", {})).world
        self._reading, met = SERVER.Pipe(duplex=False)
        os.set_blocking(self._reading.fileno(), False)
        self._met = 0
        self.ranks = fork_ranks(world, run, order, met)
        met.close()

    def alive(self) -> list[ForkServerProcess]:
        return [rank for rank in self.ranks if rank.exitcode is None]

    def hear(self, seconds: float) -> bool:
        """Whether a rank has ended within so many seconds."""
        ended = wait([rank.sentinel for rank in self.alive()], seconds)
        with suppress(BlockingIOError):
            self._met += len(os.read(self._reading.fileno(), len(self.ranks)))
        if self._met < len(self.ranks) and any(rank.exitcode for rank in self.ranks):
            for rank in self.alive():
                rank.terminate()
        return bool(ended)
