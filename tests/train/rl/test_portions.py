"""Prompts of several data sets with weights: exact shares, each in its own epochs."""

import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset, interleave_datasets
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent.parent))

from tiny_rollouts import ROLLOUT, recipe_of, run, write_data
from tiny_runs import CONFIG

from memfit.core.errors import InvalidRequest
from memfit.records.request import Request, Task
from memfit.train.data.mixture import BLOCK
from memfit.train.data.prepare import build_samplers, find_lengths, read_data
from memfit.train.rl.prompts import Portion, Prompts, choose_of_portions, count_steps
from memfit.train.rl.rollout import Prompt
from memfit.train.run.logs import read_log

PORTIONS = (Portion("a", 0.75, 12), Portion("b", 0.25, 5))
choose = partial(choose_of_portions, PORTIONS, 4, 0)


def test_shares_are_exact_and_each_data_set_goes_through_its_own_epochs():
    rows = [row for iteration in range(BLOCK // 4) for row in choose(iteration, 0)]
    counts = Counter(row >= 12 for row in rows)
    assert counts == {False: 0.75 * BLOCK, True: 0.25 * BLOCK}
    for first, size in ((0, 12), (12, 5)):
        mine = [row for row in rows if first <= row < first + size]
        epochs = [mine[at : at + size] for at in range(0, len(mine) - size, size)]
        assert all(sorted(epoch) == list(range(first, first + size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1  # in an order of its own
    assert choose(100, 0) == rows[400:404]  # wherever one begins
    assert choose_of_portions(PORTIONS, 4, 1, 100, 0) != rows[400:404]


def test_further_rounds_of_a_rollout_draw_from_the_same_data_sets():
    several = partial(choose_of_portions, PORTIONS, 16, 0)
    for iteration in range(4):
        first, second = several(iteration, 0), several(iteration, 1)
        assert [row >= 12 for row in first] == [row >= 12 for row in second]
        assert first != second
        assert several(iteration, 2) != second


def test_an_epoch_shows_each_whole_as_datasets_counts_it():
    """`all_exhausted`, without the chance that its own draws add."""
    prompts = Prompts((Prompt([1], {}),) * 17, "", (), PORTIONS)
    steps = count_steps(prompts, ROLLOUT, 16, 1.0)
    assert steps == pytest.approx(5 / 0.25 * ROLLOUT.num_generations / 16)
    names = [Dataset.from_dict({"x": list(range(p.size))}) for p in PORTIONS]
    drawn = [
        len(interleave_datasets(names, [0.75, 0.25], seed=s, stopping_strategy="all_exhausted"))
        for s in range(40)
    ]
    assert sum(drawn) / len(drawn) == pytest.approx(5 / 0.25, rel=0.35)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    one, two = write_data(folder / "one", 12), write_data(folder / "two", 5)
    two.write_text(two.read_text().replace("Say", "Tell"))
    return folder, f"{one}=3, {two}=1"


def test_a_run_answers_prompts_of_all(mixed, tmp_path):
    folder, data = mixed
    cache = tmp_path / "cache"
    recipe = recipe_of(folder / "one", steps=4)
    whole = run(recipe, data, tmp_path / "whole", cache)
    assert whole.finished
    task = Task(objective="grpo", data=data, epochs=1.0, evaluation_share=0.25)
    asked = Request(model=CONFIG, task=task)
    found = read_data(asked, recipe.model, cache)
    training, _ = build_samplers(asked, recipe, found)
    assert [p.size for p in training.portions] == [9, 3]
    assert len(training.held_out) == 3 + 2
    assert any(note.startswith("75.0% of the prompts are of") for note in training.notes)
    drawn = [
        training.prompts[row].columns["prompt"].split()[0]
        for at in range(8)
        for row in choose_of_portions(training.portions, 4, recipe.seed, at, 0)
    ]
    assert 0.5 < Counter(drawn)["Say"] / len(drawn) < 1
    # the run's rollouts have the same prompts: of each iteration the log shows the first ones
    taken = read_data(Request(model=CONFIG, task=replace(task, evaluation_share=0.0)),
                      recipe.model, cache)  # fmt: skip
    rows, _ = build_samplers(asked, recipe, taken)
    for at, row in enumerate(read_log(tmp_path / "whole")):
        wanted = choose_of_portions(rows.portions, 4, recipe.seed, at, 0)
        shown = [sample["prompt"] for sample in row["samples"]]
        texts = [rows.prompts[one].columns["prompt"] for one in wanted]
        assert shown == texts[: len(shown)]
        assert shown
    other = data.replace("=3", "=2")
    with pytest.raises(InvalidRequest, match="is of data"):
        run(recipe, other, tmp_path / "whole", cache)
    counted = find_lengths(asked, recipe.model, 512 + ROLLOUT.max_prompt_length, cache)
    assert counted.task.steps >= 1


def test_a_data_set_without_a_prompt_that_is_short_enough_is_named(mixed, tmp_path):
    folder, data = mixed
    long = folder / "long.jsonl"
    long.write_text('{"prompt": "%s"}\n' % ("many words " * 40))
    with pytest.raises(InvalidRequest, match=r"`.*long.jsonl` has no prompt of at most 12 tokens"):
        run(recipe_of(folder / "one"), f"{data}, {long}=1", tmp_path / "run", tmp_path / "cache")
