"""What ranks wait for in their collectives, and who is named for it."""

import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from memfit.train.distributed.ranks import Ranks
from memfit.train.distributed.stragglers import Waiting, Waits, covered, find_late, read_waits

Event = namedtuple("Event", "name device_type time_range is_user_annotation")
CPU = torch.device("cpu")


def event(name, start, end, kind="CUDA", *, annotation=False):
    time_range = SimpleNamespace(start=start * 1e6, end=end * 1e6)
    return Event(name, SimpleNamespace(name=kind), time_range, annotation)


def test_intervals_that_overlap_are_counted_once():
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.6), (6, 7)]) == 5
    assert covered([]) == 0


def test_on_a_gpu_kernels_cover_collectives_and_annotations_do_not():
    found = read_waits(
        [
            event("ncclDevKernel_AllGather_RING_LL", 0, 4), event("sm90_gemm", 1, 2),
            event("nccl:all_gather", 0, 4, annotation=True),
            event("FSDP::all_gather", 0, 4, annotation=True), event("aten::mm", 0, 4, "CPU"),
        ],
        "cuda",
    )  # fmt: skip
    assert found == pytest.approx(Waits(4, 3))


def test_on_a_cpu_operators_cover_collectives_and_calls_do_not():
    found = read_waits(
        [
            event("gloo:all_gather", 0, 4, "CPU"), event("aten::mm", 3, 6, "CPU"),
            event("c10d::allgather_", 0, 4, "CPU"), event("gloo:all_reduce", 8, 9, "CPU"),
        ],
        "cpu",
    )  # fmt: skip
    assert found == pytest.approx(Waits(5, 4))


def test_who_waits_least_is_late():
    assert find_late([0.3, 0.31, 0.02, 0.3], 1.0) == [2]
    assert find_late([0.3, 0.0], 1.0) == [1]
    assert find_late([0.3, 0.25, 0.28, 0.3], 1.0) == []
    assert find_late([0.3, 0.31, 0.02, 0.3], 10.0) == []  # of a step it is little
    # the first stage waits less than the last one, by the schedule: not because it is slow
    assert find_late([0.1, 0.1, 0.6, 0.6], 1.0, groups=2) == []
    assert find_late([0.1, 0.1, 0.6, 0.4], 1.0, groups=2) == [3]


class Others(Ranks):
    """This rank waits, the other one does not."""

    size = 2

    def gather(self, *values):
        return [values, (0.0, *values[1:])]


def test_a_rank_is_named_when_it_is_late_twice_in_a_row_and_only_once(monkeypatch):
    waiting = Waiting(Others(), first=3, every=2, groups=1)
    monkeypatch.setattr("memfit.train.distributed.stragglers.AFFORDED", float("inf"))
    said = {}
    for index in range(10):
        if waiting.due(index):
            with waiting.look(CPU):
                torch.ones(8).sum()
            waiting.waits = Waits(2.0, 1.0)
            said[index] = list(waiting.tell(index))
    assert list(said) == [3, 5, 7, 9]
    assert [bool(lines) for lines in said.values()] == [False, True, False, False]
    assert said[5][0].startswith("rank 1 is late")


LOOK = """
import torch
from memfit.train.distributed.ranks import Ranks
from memfit.train.distributed.stragglers import Waiting

with Waiting(Ranks(), first=0, every=1, groups=1).look(torch.device("cpu")):
    torch.ones(8).sum()
"""


def test_looking_says_nothing_to_the_user():
    # a process of its own, as a run is: torch's profiler asks how much to say when it is first used
    looked = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, check=True, timeout=120
    )
    assert (looked.stdout, looked.stderr) == ("", "")


def test_looking_that_costs_much_is_seldom():
    waiting = Waiting(Others(), first=0, every=1, groups=1)
    assert waiting.due(0)
    with waiting.look(CPU):
        torch.ones(8).sum()
    waiting._cost, waiting._seconds = 3.0, 1.0
    list(waiting.tell(0))
    assert not waiting.due(149)
    assert waiting.due(150)


def test_a_run_that_goes_on_warms_up_first():
    waiting = Waiting(Others(), first=3, every=1, groups=1)
    assert [waiting.due(index) for index in range(40, 45)] == [False, False, False, True, True]


def test_one_process_is_not_looked_at():
    waiting = Waiting(Ranks(), first=0, every=1, groups=1)
    assert not any(waiting.due(index) for index in range(5))
