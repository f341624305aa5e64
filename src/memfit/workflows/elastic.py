"""A run of many ranks that goes on by itself when one of them is lost: on fewer, later on all.

The smaller mesh learns the same (its recipe has the same course): copies or shards are fewer, the
global batch stays. Each rank then holds more, so that it is planned and certified before it goes
on. request.json stays the user's; plan.json and certificate.json are those of the mesh
that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from memfit.core import units
from memfit.core.errors import DoesNotFit, InvalidRequest, NotCertified
from memfit.files.run_folder import state
from memfit.records import Record, write_atomically
from memfit.records.recipe import Parallel
from memfit.records.request import Request
from memfit.records.results import Plan
from memfit.workflows.prepare_child import prepare_apart
from memfit.workflows.prepare_run import Say, read_prepared, write_prepared

MORE = "ranks/more"  # of a run folder: where it is, the ranks save and end, to go on with more
Start = Callable[[Request, Sequence[str]], None]  # trains to the end; notes for run.json


class Elastic(Record, frozen=True, kw_only=True):
    """What a run does when a rank is lost."""

    restarts: int = 3  # of one run; 0: it ends, and the same command goes on
    regain: float = 600.0  # seconds on fewer ranks until all are tried again


def keep_going(
    start: Start,
    request: Request,
    folder: Path,
    *,
    say: Say,
    policy: Elastic,
    override: bool = False,
) -> None:
    """Run what is prepared in the folder to its end, on other ranks where one is lost.

    start: runs the ranks of a request. Raises what it raises, once there are no restarts left or
    for anything but a rank that was lost; and where no other mesh fits.
    """
    from memfit.train.distributed.ranks import MoreRanks, RankLost

    whole, current, notes = read_prepared(folder), request, list[str]()
    losses = 0
    while True:
        missing = current.ranks < request.ranks
        try:
            with _asking_for_more(folder, policy.regain if missing else None):
                start(current, notes)
            return
        except MoreRanks:
            write_prepared(whole, folder)
            current = request
            notes.append(f"all {request.ranks} ranks run again")
        except RankLost as error:
            losses += 1
            if losses > policy.restarts:
                raise
            current = _find_smaller(request, current, whole.plan, folder, say, override=override)
            left = policy.restarts - losses
            notes.append(
                f"{error.message}; it goes on from the newest checkpoint on {current.ranks} of"
                f" {request.ranks} ranks"
            )
            notes[-1] += f" ({left} more losses may follow)" if left else " (the last restart)"
        say(notes[-1])


def change_ranks(plan: Plan, count: int) -> Request | None:
    """The plan's request on `count` ranks of one machine with the same global batch; None where the
    batch cannot be dealt to them.

    Axes within a row or a model stay (tp, cp, pp); of copies and shards there are fewer. What moves
    memory alone is free where the user left it free.
    """
    made, request = plan.recipe, plan.request
    old = made.parallel
    fixed = old.tp * old.cp * old.pp
    if old.ep > 1 or count % fixed:
        return None
    dp, batch = count // fixed, made.global_batch
    if batch % dp:
        return None
    micro = max(n for n in range(1, made.micro_batch + 1) if batch // dp % n == 0)
    copies = dp if old.dp_shard == 1 else 1
    if old.dp_replicate > 1 and old.dp_shard > 1 and dp % old.dp_shard == 0:
        copies = dp // old.dp_shard
    parallel = msgspec.structs.replace(old, dp_replicate=copies, dp_shard=dp // copies)
    stated = state(plan)
    return msgspec.structs.replace(
        stated,
        parallel=parallel if count > 1 else Parallel(),
        hardware=msgspec.structs.replace(stated.hardware, count=count, nodes=1),
        micro_batch=micro,
        recompute=request.recompute,
    )


def _find_smaller(
    request: Request, current: Request, plan: Plan, folder: Path, say: Say, *, override: bool
) -> Request:
    """The most ranks below `current`'s that learn the same, prepared; where none fits, as many as
    before."""
    for count in range(current.ranks - 1, 0, -1):
        smaller = change_ranks(plan, count)
        if smaller is None:
            say(f"{count} ranks cannot share a batch of {plan.recipe.global_batch} rows")
            continue
        try:
            made = prepare_apart(smaller, folder, say=say, override=override, moved=True)
        except (DoesNotFit, NotCertified, InvalidRequest) as error:
            say(f"{count} ranks cannot go on: {error.message}")
            if isinstance(error, DoesNotFit):
                break  # fewer hold more each
            continue
        if made.plan.recipe.course == plan.recipe.course:
            return smaller
        say(f"{count} ranks cannot go on: their plan would learn something else")
    same = request if current.ranks == request.ranks else change_ranks(plan, current.ranks)
    assert same is not None
    return same


@contextmanager
def _asking_for_more(folder: Path, seconds: float | None) -> Iterator[None]:
    """After `seconds` on fewer ranks, make them save and end."""
    file = folder / MORE
    file.unlink(missing_ok=True)
    if seconds is None:
        yield
        return
    done = threading.Event()

    def ask() -> None:
        if not done.wait(seconds):
            with suppress(OSError):  # without it the run goes on as it is
                write_atomically(file, b"")

    thread = threading.Thread(target=ask, name="more ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        file.unlink(missing_ok=True)


def read_elastic(restarts: int, regain: str) -> Elastic:
    """The policy as flags state it; InvalidRequest for a time that is none."""
    return Elastic(restarts=restarts, regain=units.parse_seconds(regain))
