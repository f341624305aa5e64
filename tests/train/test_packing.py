"""Sampling and packing, against what the documents themselves say."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import tiny_recipe

from memfit.core.errors import InvalidRequest
from memfit.records.recipe import Parallel
from memfit.records.shapes import RowBounds
from memfit.train.data import packed_rows
from memfit.train.data import sampler as sampler_module
from memfit.train.data.packing import (
    Piece,
    StreamRows,
    TableRows,
    one_a_row,
    pack_best_fit,
    seeded_order,
)
from memfit.train.data.sampler import IGNORED, build_sampler
from memfit.train.data.tokens import Corpus

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def corpus(lengths, learned=None):
    """Documents whose tokens are all different, so that a token names its place."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("int64")
    tokens = np.arange(offsets[-1], dtype="uint32")
    return Corpus(tokens, offsets, learned, "0" * 32, ())


def pieces(batches):
    """(ids, labels, positions) of every document of every row, as the attention sees them."""
    for batch in batches:
        for i, lengths in enumerate(batch.documents):
            at = 0
            for n in lengths:
                cut = slice(at, at + n)
                yield batch.input_ids[i, cut], batch.labels[i, cut], batch.position_ids[i, cut]
                at += n
            assert at == batch.input_ids.shape[1]


@given(lengths=LENGTHS, width=st.integers(1, 17), seed=st.integers(0, 5))
@settings(max_examples=60)
def test_the_stream_shows_every_token_once_an_epoch(lengths, width, seed):
    rows = StreamRows(np.array(lengths), width, seed)
    total = sum(lengths)
    seen = Counter()
    for index in range(2 * -(-total // width)):
        row = rows.row(index)
        assert sum(p.length for p in row) == width
        seen.update((p.document, t) for p in row for t in range(p.start, p.stop))
    order = [(d, t) for d, n in enumerate(lengths) for t in range(n)]
    flat = [
        (p.document, t)
        for index in range(2 * -(-total // width))
        for p in rows.row(index)
        for t in range(p.start, p.stop)
    ]
    assert sorted(flat[:total]) == order, "the first epoch"
    assert sorted(flat[total : 2 * total]) == order, "the second epoch, without a gap"


def test_neighbouring_rows_of_one_document_are_shown_apart():
    rows = StreamRows(np.array([4000, 4000]), 10, seed=0)
    starts = [rows.row(index)[0] for index in range(800)]
    neighbours = [b.document == a.document and b.start == a.stop for a, b in pairwise(starts)]
    assert sum(neighbours) < 10
    assert starts != [rows.row(index)[0] for index in range(800, 1600)], "another order each epoch"


def test_an_epoch_that_ends_inside_a_step_is_followed_by_the_next_one():
    # 70 tokens, 4 rows of 8 a step: the third step holds the last 6 tokens and 26 of epoch two
    recipe = tiny_recipe(sequence_length=8, micro_batch=2, accumulation=2, steps=10)
    data = corpus([30, 40])
    sampler = build_sampler(data, recipe, "data")
    assert sampler.steps_per_epoch == pytest.approx(70 / 32)
    stream = np.concatenate([b.input_ids.ravel() for s in range(5) for b in sampler.sample(s)])
    assert sorted(stream[:70]) == list(range(70))
    assert sorted(stream[70:140]) == list(range(70))
    assert len(sampler.sample(2)) == 2


@given(lengths=LENGTHS, width=st.integers(2, 17))
@settings(max_examples=40)
def test_every_target_of_the_stream_is_the_next_token_of_the_same_document(lengths, width):
    recipe = tiny_recipe(sequence_length=width, micro_batch=2, accumulation=1, steps=1)
    data = corpus([*lengths, 3])
    sampler = build_sampler(data, recipe, "data")
    last = {int(i) - 1 for i in data.offsets[1:]}
    for step in range(3):
        for ids, labels, positions in pieces(sampler.sample(step)):
            assert (np.diff(ids) == 1).all(), "a piece is one run of one document"
            assert (positions == np.arange(len(ids))).all()
            for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
                assert label == (IGNORED if token in last else token + 1)


def test_a_sample_depends_on_seed_and_step_alone():
    recipe = tiny_recipe(sequence_length=8, micro_batch=2, accumulation=2, steps=50, seed=3)
    data = corpus(list(range(2, 40)))
    forward, backward = build_sampler(data, recipe, "d"), build_sampler(data, recipe, "d")
    ahead = [forward.sample(s)[1].input_ids for s in range(50)]
    back = [backward.sample(s)[1].input_ids for s in reversed(range(50))][::-1]
    assert all((a == b).all() for a, b in zip(ahead, back, strict=True))
    other = build_sampler(data, tiny_recipe(sequence_length=8, seed=4), "d")
    assert not (other.sample(0)[0].input_ids == ahead[0][:1]).all()


def test_orders_are_permutations_and_differ_by_epoch_and_seed():
    orders = {(s, e): tuple(seeded_order(50, s, e).tolist()) for s in (0, 1) for e in (0, 1)}
    assert len(set(orders.values())) == 4
    assert all(sorted(o) == list(range(50)) for o in orders.values())
    assert orders[0, 0] == tuple(seeded_order(50, 0, 0).tolist())


@given(lengths=LENGTHS, seed=st.integers(0, 3))
@settings(max_examples=60)
def test_best_fit_keeps_examples_whole_and_close_to_the_fewest_rows(lengths, seed):
    rows = pack_best_fit(np.array(lengths), 40, seed)
    assert sorted(p.document for row in rows for p in row) == list(range(len(lengths)))
    assert all(p.start == 0 and p.stop == lengths[p.document] for row in rows for p in row)
    assert all(sum(p.length for p in row) <= 40 for row in rows)
    fewest = -(-sum(lengths) // 40)
    assert len(rows) <= 11 * fewest / 9 + 6 / 9 + 1  # Dosa 2007, with the fractional lower bound


def pack_one_by_one(lengths, width, seed, cut):
    """The same rule as a plain loop, each piece into the row that it finds."""
    order = np.argsort(seeded_order(len(lengths), seed, 0))
    pieces = [
        Piece(document, start, min(start + width, length))
        for document, length in enumerate(lengths)
        for start in range(0, min(length, width) if cut else length, width)
    ]
    pieces.sort(key=lambda piece: (-piece.length, order[piece.document]))
    rows, rooms = [], []
    for piece in pieces:
        fitting = [room for room in rooms if room[0] >= piece.length]
        if not fitting:
            rows.append([])
            space, row = width, len(rows) - 1
        else:
            least = min(space for space, _ in fitting)
            newest = max(i for i, (space, _) in enumerate(rooms) if space == least)
            space, row = rooms.pop(newest)
        rows[row].append(piece)
        if space > piece.length:
            rooms.append((space - piece.length, row))
    return [tuple(row) for row in rows]


@given(
    lengths=st.lists(st.integers(0, 60), max_size=80).filter(any),
    width=st.integers(1, 45), seed=st.integers(0, 3), cut=st.booleans(),
)  # fmt: skip
@settings(max_examples=200)
def test_best_fit_of_whole_lengths_is_that_of_pieces_one_by_one(lengths, width, seed, cut):
    """Runs of earlier versions go on with the rows that they began with."""
    found = pack_best_fit(np.array(lengths), width, seed, cut=cut)
    assert list(found) == pack_one_by_one(lengths, width, seed, cut)


@given(lengths=LENGTHS, width=st.integers(1, 45), packed=st.booleans(), first=st.integers(0, 60))
@settings(max_examples=100)
def test_costs_are_those_of_the_rows_one_by_one(lengths, width, packed, first):
    table = (pack_best_fit if packed else one_a_row)(
        np.array(lengths), width, **({"seed": 1} if packed else {}), cut=False
    )
    rows = TableRows(table, width, 3, packed=packed)
    want = []
    for index in range(first, first + 50):
        sizes = [piece.length for piece in rows.row(index)]
        if packed and sum(sizes) < width:
            sizes.append(width - sum(sizes))
        want.append([sum(sizes), len(sizes), max(sizes)])
    assert rows.costs(first, 50).tolist() == want


def test_packed_rows_are_read_at_the_next_start(tmp_path, monkeypatch):
    monkeypatch.setattr(packed_rows, "WORTH", 3)
    lengths = np.array([9, 3, 4, 7, 2])
    own = corpus(lengths)._replace(folder=tmp_path)
    pack, packed = packed_rows.pack_best_fit, []
    monkeypatch.setattr(
        packed_rows, "pack_best_fit", lambda *a, **k: packed.append(a) or pack(*a, **k)
    )

    def read(width, seed, cut):
        found = list(packed_rows.read_packed_rows(own, lengths, width, seed, cut=cut))
        assert found == list(pack(lengths, width, seed, cut=cut))
        return len(packed)

    assert [read(8, 0, True), read(8, 0, True)] == [1, 1]
    assert [read(8, 0, False), read(6, 0, True), read(8, 1, True)] == [2, 3, 4]
    (damaged, *_) = tmp_path.glob("rows-*")
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert [read(8, 0, True), read(8, 0, False), read(6, 0, True), read(8, 1, True)][-1] == 5
    read(5, 0, True), read(4, 0, True)
    assert len(list(tmp_path.iterdir())) == packed_rows.MOST
    monkeypatch.setattr(packed_rows, "WORTH", 6)
    assert read(8, 0, True) == len(packed) == 8


def test_best_fit_takes_the_row_with_the_least_room():
    # 8 and 7 open rows of 10 with rooms 2 and 3; 2 fits both and fills the first
    rows = pack_best_fit(np.array([8, 7, 2]), 10, 0)
    assert sorted(sorted(p.length for p in row) for row in rows) == [[2, 8], [7]]


@pytest.mark.parametrize("packing", [False, True])
def test_plain_texts_of_fine_tuning_go_on_in_rows_of_their_own(packing):
    """Every token but the first of each row is learned, as in `objective: pretrain`."""
    recipe = tiny_recipe(objective="sft", packing=packing, sequence_length=8)
    sampler = build_sampler(corpus([20, 3]), recipe, "texts")
    labels = [b.labels[b.labels != IGNORED] for b in sampler.all_once()]
    assert sorted(np.concatenate(labels).tolist()) == [*range(1, 20), 21, 22]
    assert sampler.notes == ()


def test_a_packed_example_row_is_filled_up_by_a_padding_document():
    recipe = tiny_recipe(objective="sft", sequence_length=10, micro_batch=1, accumulation=1)
    data = corpus([7], learned=np.array([0, 0, 0, 1, 1, 1, 1], dtype="uint8"))
    (batch,) = build_sampler(data, recipe, "d").sample(0)
    assert batch.documents == ((7, 3),)
    assert batch.labels.tolist() == [[-100, -100, 3, 4, 5, 6, -100, -100, -100, -100]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2]]
    assert batch.targets == 4


def test_unpacked_rows_are_padded_to_the_longest_of_their_micro_batch():
    recipe = tiny_recipe(packing=False, sequence_length=16, micro_batch=2, accumulation=1)
    (batch,) = build_sampler(corpus([3, 5]), recipe, "d").sample(0)
    assert batch.input_ids.shape == (2, 5)
    assert batch.documents is None
    assert batch.position_ids is None
    assert batch.targets == 2 + 4


def test_an_unpacked_long_document_goes_on_in_rows_of_its_own():
    rows = one_a_row(np.array([5, 2]), 2, cut=False)
    assert [(p.document, p.start, p.stop) for (p,) in rows] == [
        (0, 0, 2), (0, 2, 4), (0, 4, 5), (1, 0, 2),
    ]  # fmt: skip


def test_examples_too_long_are_cut_or_left_out_and_counted():
    learned = np.zeros(30, dtype="uint8")
    learned[8:10] = 1  # first example: answer at its end, within 10
    learned[14:20] = 1  # second: answer from 4 on
    learned[29] = 1  # third: answer is its very last token
    recipe = tiny_recipe(objective="sft", sequence_length=8, micro_batch=1, accumulation=1)
    sampler = build_sampler(corpus([10, 10, 10], learned), recipe, "chat")
    assert "2 examples of `chat` are cut to sequence_length 8" in sampler.notes
    assert any(n.startswith("1 examples of `chat` are left out") for n in sampler.notes)
    assert sampler.steps_per_epoch == 2
    with pytest.raises(InvalidRequest, match="no example of `chat` has an answer"):
        build_sampler(corpus([10], np.eye(1, 10, 9, dtype="uint8")[0]), recipe, "chat")


@given(lengths=LENGTHS, width=st.integers(2, 12), packing=st.booleans(),
       objective=st.sampled_from(["pretrain", "sft"]), block=st.integers(1, 20))  # fmt: skip
@settings(max_examples=60)
def test_the_bounds_are_the_largest_figures_of_all_that_is_sampled(
    lengths, width, packing, objective, block
):
    recipe = tiny_recipe(sequence_length=width, micro_batch=2, accumulation=2, steps=7,
                         packing=packing, objective=objective)  # fmt: skip
    sampler = build_sampler(corpus([*lengths, 2]), recipe, "d")

    def figures(batch):
        rows = batch.documents or ()
        longest = max((n for row in rows for n in row), default=batch.input_ids.shape[1])
        return batch.input_ids.shape[1], sum(map(len, rows)), longest

    shown = [figures(batch) for step in range(7) for batch in sampler.sample(step)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "BLOCK", block)
        found = sampler.bounds()
    assert (found.tokens, found.documents, found.longest) == tuple(
        map(max, zip(*shown, strict=True))
    )
    once = sampler.bounds_once()
    for batch in sampler.all_once():
        tokens, documents, longest = figures(batch)
        assert once.covers(RowBounds(tokens=tokens, documents=documents, longest=longest))


def test_an_evaluation_reads_every_example_once():
    recipe = tiny_recipe(packing=False, sequence_length=8, micro_batch=2, accumulation=1)
    data = corpus([3, 4, 5])
    batches = list(build_sampler(data, recipe, "d").all_once())
    assert sum(b.targets for b in batches) == 2 + 3 + 4
    assert [b.input_ids.shape[0] for b in batches] == [2, 2]


@pytest.mark.parametrize("tokens", [1, 6, 11, 99])
@pytest.mark.parametrize("own", [
    {}, {"micro_batch": 2}, {"micro_batch": 4}, {"parallel": Parallel(dp_shard=2)},
    {"parallel": Parallel(pp=2), "micro_batch": 2},
], ids=["one", "two", "four", "ranks", "stages"])  # fmt: skip
def test_an_evaluation_of_some_tokens_reads_the_same_rows_in_any_layout(own, tokens):
    recipe = tiny_recipe(packing=False, sequence_length=8, accumulation=2, **own)
    data, ranks = corpus([3, 4, 5, 6, 7]), recipe.parallel.dp
    micros = [m for rank in range(ranks)
              for m in build_sampler(data, recipe, "d", rank).all_once(tokens)]  # fmt: skip
    alone = build_sampler(data, tiny_recipe(packing=False, sequence_length=8), "d")
    each = [int((row != IGNORED).sum()) for micro in alone.all_once() for row in micro.labels]
    wanted, read = 0, 0
    for targets in filter(None, each):
        if read < tokens:
            wanted, read = wanted + targets, read + targets + 1
    assert sum(m.targets for m in micros) == wanted


def test_an_evaluation_of_packed_text_reads_every_token_once():
    recipe = tiny_recipe(sequence_length=8, micro_batch=2, accumulation=1)
    batches = list(build_sampler(corpus([9, 10]), recipe, "d").all_once())
    labels = np.concatenate([b.labels[b.labels != IGNORED] for b in batches])
    assert sorted(labels) == [*range(1, 9), *range(10, 19)]


def test_documents_of_one_token_leave_nothing_to_learn():
    with pytest.raises(InvalidRequest, match="no token that another one predicts"):
        build_sampler(corpus([1, 1]), tiny_recipe(), "d")


def test_table_rows_show_each_row_once_an_epoch():
    rows = TableRows(one_a_row(np.array([2] * 9), 2, cut=False), 2, 0, packed=False)
    first = [rows.row(i)[0].document for i in range(9)]
    second = [rows.row(i)[0].document for i in range(9, 18)]
    assert sorted(first) == sorted(second) == list(range(9))
    assert first != second
