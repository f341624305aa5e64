"""Examples packed by best fit, beside TRL's `pack_dataset` and its collator (`make neighbours`)."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from tiny_runs import tiny_recipe

from memfit.train.data.packing import TableRows, pack_best_fit
from memfit.train.data.sampler import Sampler
from memfit.train.data.tokens import Corpus
from neighbour_programs import run_program

STRATEGIES = {"bfd": True, "bfd_split": False}  # whether what is longer than a row is cut


def make_cases():
    """Lengths as conversations have them; those with many alike leave the choice of a row open."""
    chance = random.Random(0)
    for strategy in STRATEGIES:
        for width, count in ((64, 40), (256, 300), (1024, 900)):
            lengths = [1 + int(chance.lognormvariate(0, 1) * width / 5) for _ in range(count)]
            yield strategy, width, lengths
        # of these, no two rows ever have the same room: there is one way to pack them
        yield strategy, 1000, [700, 611, 520, 431, 395, 290, 222, 130, 97, 61, 1501]


CASES = list(make_cases())


@pytest.fixture(scope="module")
def theirs():
    return json.loads(run_program("trl_packing.py", text=json.dumps(CASES)))


def pack(strategy, width, lengths):
    """The rows of the first epoch as a step reads them, without their padding: ids, positions."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("int64")
    corpus = Corpus(np.arange(offsets[-1], dtype="uint32"), offsets, None, "0" * 32, ())
    table = pack_best_fit(np.array(lengths), width, 0, cut=STRATEGIES[strategy])
    recipe = tiny_recipe(sequence_length=width, micro_batch=1, accumulation=1, steps=len(table))
    sampler = Sampler(corpus, TableRows(table, width, 0, packed=True), recipe, ())
    for step in range(len(table)):
        (micro,) = sampler.sample(step)
        yield micro.input_ids[0, : micro.tokens].tolist(), micro.position_ids[0].tolist()


def documents_of(row):
    """The pieces of a row, each where its positions begin anew."""
    ids, positions = row
    starts = [at for at, position in enumerate(positions[: len(ids)]) if position == 0]
    return frozenset(tuple(ids[a:b]) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_rows_and_positions_are_trls_own(number, theirs):
    strategy, width, lengths = CASES[number]
    want, rows = theirs[number], list(pack(strategy, width, lengths))
    # as many rows, each as full; of rows with equal room either may take a piece
    assert Counter(len(ids) for ids, _ in rows) == Counter(len(ids) for ids, _ in want)
    ours, own = ([documents_of(row) for row in found] for found in (rows, want))
    # the same pieces, whole, with positions from 0: no token is lost or shown twice
    assert Counter(p for row in ours for p in row) == Counter(p for row in own for p in row)
    if width == 1000:
        assert set(ours) == set(own)
