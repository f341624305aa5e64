"""Several data sets with weights: exact shares, each in its own order, beside datasets' own."""

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset, interleave_datasets
from msgspec.structs import replace
from tiny_runs import tiny_recipe, write_text

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records.habits.mixture import list_paths, read_mixture
from memfit.records.request import Request, Task
from memfit.train.data.mixture import BLOCK, join
from memfit.train.data.prepare import build_samplers, find_lengths, read_data
from memfit.train.data.sampler import build_sampler
from memfit.train.data.tokens import Corpus, Share
from memfit.train.run.loop import Cadence, train
from memfit.ui.asking import read_changes

SHARES = (0.7, 0.2, 0.1)


def corpus(lengths, first, learned=None):
    """Documents whose tokens are all different, so that a token names its place."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("int64")
    tokens = np.arange(first, first + offsets[-1], dtype="uint32")
    return Corpus(tokens, offsets, learned, f"{first:032}", ())


def make_parts(shares=SHARES, documents=(50, 9, 30), length=16):
    """Data sets of whole rows: the tokens of the k-th are k million and more."""
    return [
        corpus([length] * count, 1_000_000 * k) for k, count in enumerate(documents[: len(shares)])
    ]  # fmt: skip


def sampler_of(parts, shares=SHARES, **changes):
    recipe = tiny_recipe(
        objective="sft", packing=False, sequence_length=16, micro_batch=4, accumulation=1, **changes
    )  # fmt: skip
    named = zip("abc", shares, parts, strict=False)
    return build_sampler(join([Share(*one) for one in named]), recipe, "mixture")


def read_rows(sampler, first, steps):
    """(data set, first token) of each row of the steps."""
    for step in range(first, first + steps):
        for micro in sampler.sample(step):
            for row in micro.input_ids:
                yield divmod(int(row[0]), 1_000_000)


def test_every_block_has_each_share_to_the_row():
    sampler = sampler_of(make_parts(), steps=1000)
    rows = [source for source, _ in read_rows(sampler, 0, 4 * BLOCK // 4)]
    for end in range(BLOCK, 4 * BLOCK + 1, BLOCK):
        counts = Counter(rows[:end])
        assert all(abs(counts[s] - share * end) <= 1 for s, share in enumerate(SHARES))
    # as near as datasets comes by chance, whose own error is what drawing with these odds has
    theirs = interleave_datasets(
        [Dataset.from_dict({"source": [k] * 20_000}) for k in range(3)], list(SHARES), seed=0
    )  # fmt: skip
    drawn = Counter(theirs["source"][: 4 * BLOCK])
    for source, share in enumerate(SHARES):
        spread = (4 * BLOCK * share * (1 - share)) ** 0.5
        assert abs(drawn[source] - Counter(rows)[source]) < 4 * spread
    # and no pattern: neighbours are as often of one data set as chance has it
    alike = np.mean(np.array(rows[1:]) == np.array(rows[:-1]))
    assert alike == pytest.approx(sum(s * s for s in SHARES), abs=0.03)


def test_each_data_set_is_shown_whole_before_any_of_it_comes_a_second_time():
    """As `datasets` shows it: nothing is left out, and epochs of one do not wait for another's."""
    parts = make_parts()
    rows = list(read_rows(sampler_of(parts, steps=1000), 0, 200))
    for source, part in enumerate(parts):
        mine = [token // 16 for found, token in rows if found == source]
        for begin in range(0, len(mine) - part.documents, part.documents):
            epoch = mine[begin : begin + part.documents]
            assert sorted(epoch) == list(range(part.documents))


def test_an_epoch_is_datasets_own_where_all_are_exhausted():
    """With shares in proportion to what there is, both show each row once."""
    parts = make_parts((0.5, 0.25, 0.25), (40, 20, 20))
    sampler = sampler_of(parts, (0.5, 0.25, 0.25), steps=20)
    assert sampler.steps_per_epoch == pytest.approx(80 / 4)
    lopsided = sampler_of(make_parts(), steps=20)
    # 50 rows at 7 of 10, 9 at 2 of 10 and 30 at 1 of 10: the last takes 300 rows
    assert lopsided.steps_per_epoch == pytest.approx(300 / 4)


def test_a_step_is_the_same_wherever_one_begins_and_bounds_are_those_of_the_rows():
    chance = np.random.default_rng(0)
    parts = [corpus(chance.integers(2, 16, n), 1_000_000 * k) for k, n in enumerate((50, 9, 30))]
    one, other = (sampler_of(parts, steps=400) for _ in range(2))
    whole = [micro for step in range(400) for micro in one.sample(step)]
    for step in (399, 3, 256, 255):
        (micro,) = other.sample(step)
        assert np.array_equal(micro.input_ids, whole[step].input_ids)
        assert np.array_equal(micro.labels, whole[step].labels)
    assert one.bounds().tokens == max(micro.input_ids.shape[1] for micro in whole)
    # once: every document of every data set, one after the other
    shown = [row[row > 0] for micro in one.all_once() for row in micro.input_ids]
    tokens = np.concatenate([row for row in shown if len(row)])
    assert (
        len(tokens) == sum(int(part.offsets[-1]) for part in parts) - 1
    )  # but token 0, which also fills rows up


def test_what_one_of_them_learns_by_answers_and_another_whole_stays_so():
    learned = np.tile(np.array([0] * 10 + [1] * 6, dtype="uint8"), 9)
    parts = [corpus([16] * 50, 0), corpus([16] * 9, 1_000_000, learned)]
    sampler = sampler_of(parts, (0.5, 0.5), steps=40)
    found = {
        (int(row[0]) // 1_000_000, int((labels >= 0).sum()))
        for step in range(40)
        for micro in sampler.sample(step)
        for row, labels in zip(micro.input_ids, micro.labels, strict=True)
    }
    assert found == {(0, 15), (1, 6)}


@pytest.fixture
def mixed(tmp_path):
    one, two = write_text(tmp_path / "one"), write_text(tmp_path / "two", 5)
    return f"{one}=3, {two}=1"


def test_a_run_on_several_data_sets_ends_with_the_same_losses_when_it_is_stopped(
    mixed, request_, cache, tmp_path, monkeypatch
):
    asked = replace(request_, task=replace(request_.task, data=mixed))
    recipe = tiny_recipe(steps=6)

    def go(folder):
        cadence = Cadence(save_every=2)
        return train(recipe, asked, tmp_path / folder, cache=cache, cadence=cadence)

    whole = go("whole")
    with monkeypatch.context() as patched:
        patched.setattr("memfit.train.run.loop._export", lambda *_: (_ for _ in ()).throw(
            RunFailed("a full disk")))  # fmt: skip
        with pytest.raises(RunFailed):
            go("again")
    assert go("again").losses == whole.losses
    other = replace(asked, task=replace(asked.task, data=mixed.replace("=3", "=2")))
    with pytest.raises(InvalidRequest, match="is of data"):
        train(recipe, other, tmp_path / "whole", cache=cache)


def test_epochs_notes_and_held_out_shares_are_those_of_all(mixed, request_, cache):
    task = Task(data=mixed, epochs=2.0, evaluation_share=0.2, global_batch=4)
    asked = Request(model=request_.model, task=task)
    recipe = tiny_recipe()
    counted = find_lengths(asked, recipe.model, 32, cache)
    data = read_data(asked, recipe.model, cache)
    training, held_out = build_samplers(asked, recipe, data)
    assert counted.task.steps == -(-training.steps_per_epoch * 2 // 1)
    assert any("75.0% of the rows are of" in note for note in training.notes)
    assert held_out.corpus.documents == 12 + 5
    assert sum(int((part.corpus.lengths > 0).sum()) for part in held_out.corpus.parts) == 3 + 1


def test_the_page_reads_none_of_several_outside_of_its_folder():
    assert read_changes([("task.data", "one=1, two=1")]) == {"task.data": "one=1, two=1"}
    with pytest.raises(InvalidRequest, match=r"\.\./two"):
        read_changes([("task.data", "one=1, ../two=1")])


def test_texts_that_name_several_data_sets():
    assert read_mixture("data/a=3, b.jsonl = 1") == (("data/a", 0.75), ("b.jsonl", 0.25))
    for plain in ("data", "data/year=2024", "a,b", "a=x, b=1"):
        assert read_mixture(plain) == ()
        assert list_paths(plain) == (plain,)
    assert list_paths("a=1, ../b=.5") == ("a", "../b")
    with pytest.raises(InvalidRequest, match="weight 0"):
        read_mixture("a=0, b=1")
    with pytest.raises(InvalidRequest, match=r"names `a` with weights 1 and 2"):
        read_mixture("a=1, a=2")
