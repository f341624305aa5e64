"""Runs of alike blocks, and of alike cycles: what is simulated stands for the whole depth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.plan.simulate.blocks import ENDS, find_runs, repeats, shorten
from memfit.plan.simulate.setting import Block


def blocks(kinds, recomputed=0):
    return [
        Block(rows=(), recomputed=index < recomputed, kind=kind) for index, kind in enumerate(kinds)
    ]


def shape(runs):
    return [("".join(block.kind for block in run.cycle), run.count) for run in runs]


@pytest.mark.parametrize(
    ("kinds", "recomputed", "runs"),
    [
        ("a" * 8, 0, [("a", 8)]),
        ("a", 0, [("a", 1)]),
        ("a" * 8, 3, [("a", 3), ("a", 5)]),
        ("d" + "e" * 60, 0, [("d", 1), ("e", 60)]),
        ("sf" * 13, 0, [("sf", 13)]),
        ("sf" * 13, 5, [("s", 1), ("f", 1), ("s", 1), ("f", 1), ("s", 1), ("fs", 10), ("f", 1)]),
        ("sssssf" * 10 + "ss", 0, [("sssssf", 10), ("s", 2)]),
        ("nnnr" * 9, 0, [("nnnr", 9)]),
        ("sfs", 0, [("s", 1), ("f", 1), ("s", 1)]),
    ],
)
def test_cycles_of_blocks_are_found(kinds, recomputed, runs):
    assert shape(find_runs(blocks(kinds, recomputed))) == runs


@given(kinds=st.text("abc", max_size=60), recomputed=st.integers(0, 60))
def test_runs_laid_end_to_end_are_the_model(kinds, recomputed):
    given_blocks = blocks(kinds, recomputed)
    runs = find_runs(given_blocks)
    assert [b for run in runs for b in run.cycle * run.count] == given_blocks
    simulated = [b for run in shorten(runs) for b in run.cycle * run.count]
    counts = repeats(runs)
    assert len(counts) == len(simulated) <= len(given_blocks)
    assert sum(c.times for c in counts) == len(given_blocks)
    for kind in "abc":
        times = sum(c.times for c, b in zip(counts, simulated, strict=True) if b.kind == kind)
        assert times == kinds.count(kind)
    assert all(run.count <= ENDS for run in shorten(runs))
