"""Runs of many ranks, for the tests that compare, stop and kill them.

Reads one JSON object a line and trains in as many forked processes as it asks for: the libraries
are imported once, and each rank is still a process that `kill -9` can end anywhere. Writes the
processes' ids when they have begun, and [id, exit status] as soon as one of them has ended. Where
one ends before it has met the others, these are ended too, as every launcher does: they cannot know
of it. Later nobody looks after them.

Threads come of OMP_NUM_THREADS=1. `torch.set_num_threads` is not called before a fork: a rank was
once lost to "Invalid thread pool!" of torch's OpenMP. Its cause is not known: 6,000 forks did not
show it again.
"""

import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from tiny_runs import CONFIG, tiny_recipe

from memfit.core.errors import Error
from memfit.records.model import ModelReference
from memfit.records.recipe import Lora, Parallel, Preference, Recipe
from memfit.records.request import Request, Task
from memfit.train.distributed import ranks as ranks_module
from memfit.train.distributed import stragglers
from memfit.train.distributed.ranks import find_place, join
from memfit.train.run import loop
from memfit.train.run.loop import Cadence, train
from memfit.train.step.build import build_model

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


def run(order: dict, met: int) -> None:
    """One rank, which writes a byte to the pipe `met` once it hears of the others' ends."""
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


def write_when_met(met: int) -> None:
    """Write a byte once this rank is within `watched`."""
    plain = ranks_module.watched

    @contextmanager
    def watched(*args: Any) -> Iterator[None]:
        with plain(*args):
            os.write(met, b".")
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


def fork_ranks(world: int, work: Callable[[int], None]) -> list[int]:
    """Processes of so many ranks, each of which does the work of its number and ends."""
    port = free_port()
    return [fork_rank(rank, world, port, work) for rank in range(world)]


def fork_rank(rank: int, world: int, port: int, work: Callable[[int], None]) -> int:
    child = os.fork()
    if child:
        return child
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    code = 0
    try:
        work(rank)
    except Error as error:
        sys.stderr.write(f"rank {rank}: {error}\n")
        code = error.exit_code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def start(order: dict) -> None:
    """Start the ranks of an order; say who they are, and how each has ended."""
    world = Parallel(**order.get("parallel", {})).world
    reading, met = os.pipe()
    os.set_blocking(reading, False)
    children = fork_ranks(world, lambda _: run(order, met))
    print(json.dumps(children), flush=True)  # noqa: T201 - the answer
    here, running = 0, set(children)
    while running:
        child, status = os.wait()
        running.remove(child)
        code = os.waitstatus_to_exitcode(status)
        with suppress(BlockingIOError):
            here += len(os.read(reading, world))
        if code and here < world:
            for other in running:
                os.kill(other, signal.SIGTERM)
        print(json.dumps([child, code]), flush=True)  # noqa: T201 - the answer
    os.close(reading)
    os.close(met)


def main() -> None:
    faulthandler.enable()  # a rank that dies of a signal says where
    assert torch.get_num_threads() == 1, "OMP_NUM_THREADS=1 is missing"
    for more in ({}, {"method": "lora"}, {"method": "lora", "base_format": "nf4"}):
        build_model(recipe_of(more), "cpu")  # imports what is only imported when it is needed
    gc.collect()
    gc.freeze()  # each rank collects before its first step: 0.3 s less without the libraries
    for line in sys.stdin:
        start(json.loads(line))


if __name__ == "__main__":
    main()
