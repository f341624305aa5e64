"""A deep model's events made of a shallow one's are those of the deep model, one by one."""

from typing import Any

import pytest
from msgspec.structs import replace
from test_tape import ALWAYS, H100, KNOBS, MODELS, ask

from memfit.adapters import find_adapter
from memfit.families import read_model
from memfit.plan.memory import lengthen, tape
from memfit.plan.simulate.blocks import record
from memfit.records.recipe import Parallel, Recipe

DEEP = 9  # cycles of one block
MESHES = {
    "shards": Parallel(dp_shard=8),
    "kept gathered": Parallel(dp_shard=8, reshard_after_forward=False),
    "copies": Parallel(dp_replicate=8),
    "shared products": Parallel(dp_shard=2, tp=4, sequence_parallel=True),
}
CYCLES = {"gemma-2-2b": 14, "smollm3-3b": 28}  # of several blocks


def write(recipe: Recipe) -> tape.Tape:
    tape._record.cache_clear()
    lengthen._record_short.cache_clear()
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    return tape.write_tape(model, recipe, H100)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes the cycles of the longest run of each recording that is made from now on."""
    deepest: list[int] = []

    def watched(setting: Any, batch: Any, **more: Any) -> Any:
        deepest.append(max(run.count for run in setting.runs))
        return record(setting, batch, **more)

    monkeypatch.setattr(lengthen, "record", watched)
    return deepest


def count_births(made: tape.Tape) -> list[tuple[int, int, int]]:
    """The events; storages, whose numbers are names, are numbered as they are born."""
    numbers: dict[int, int] = {}
    return [
        (numbers.setdefault(number, len(numbers)), nbytes, stream)
        for number, nbytes, stream in made.events
    ]


def assert_equal(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of writing the tape agree; the short one simulates few blocks."""
    deepest = watch(monkeypatch)
    made = write(recipe)
    if recipe.offload == "none":
        assert max(deepest) == lengthen.CYCLES
    monkeypatch.setattr(
        tape, "record_deep", lambda setting, batch: record(setting, batch, unrolled=True)
    )
    whole = write(recipe)
    assert count_births(made) == count_births(whole)
    assert (made.marks, made.phases) == (whole.marks, whole.phases)


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=() if m in ALWAYS else pytest.mark.wide) for m in MODELS]
)
def test_of_every_family(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = CYCLES.get(model, DEEP)
    if model.startswith("gemma-3"):
        pytest.skip("its cycles of six blocks are 26 blocks deep: fewer than five cycles")
    assert_equal(ask(model, layers=layers), monkeypatch)


@pytest.mark.parametrize("name", KNOBS)
def test_under_each_technique(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_equal(ask("qwen3-0.6b", layers=DEEP, **KNOBS[name]), monkeypatch)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("changes", [{}, {"recompute": "full", "precision": "bf16-mixed"}])
def test_of_one_rank_of_many(name: str, changes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = ask("qwen3-0.6b", layers=DEEP, **changes)
    assert_equal(replace(recipe, parallel=MESHES[name]), monkeypatch)


def test_cycles_that_differ_are_simulated_at_full_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept on the host is let go by blocks further away than a neighbour."""
    recipe = ask("qwen3-0.6b", layers=DEEP, offload="activations")
    deepest = watch(monkeypatch)
    write(recipe)
    assert max(deepest) > lengthen.CYCLES
