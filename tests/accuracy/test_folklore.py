"""Rules of thumb held against measured runs."""

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.accuracy import corpus, folklore, memory_errors
from memfit.families import read_model
from memfit.records.recipe import Lora, Parallel
from memfit.records.results import Measurement

ROW = next(r for r in corpus.read_corpus() if r.source.name == corpus.OWN)
COUNT = read_model(ROW.recipe.model).parameters


def row(nbytes, name="a", **changes):
    recipe = replace(ROW.recipe, **changes)
    found = {"memory.peak_allocated": Measurement(value=nbytes, unit="B", counter="said so")}
    return replace(ROW, id=name, recipe=recipe, measurements=found)


def test_a_rule_is_off_by_what_it_gives_over_what_was_measured():
    rows = [row(32 * COUNT), row(8 * COUNT, "b")]
    judged = {j.rule: j for j in folklore.judge(rows, memory_errors.compare(rows))}
    states = judged["train-states"]  # 16 bytes a parameter
    assert (states.lowest, states.highest, states.median) == (-0.5, 1.0, 0.75)
    assert (states.lowest_row, states.highest_row, states.too_low) == ("a", "b", 1)
    assert "load-16bit" not in judged  # no run with adapters


@pytest.mark.parametrize(
    ("axes", "ranks"),
    [
        ({"tp": 2, "pp": 4}, 8),
        ({"dp_shard": 8}, 8),
        ({"dp_shard": 8, "zero": 1}, 1),
        ({"dp_replicate": 8}, 1),
    ],
)
def test_a_rule_is_divided_among_the_devices_that_share_the_weights(axes, ranks):
    assert folklore.sharing(row(1, parallel=Parallel(**axes))) == ranks


def test_runs_are_told_apart_by_method_and_format():
    lora = {"method": "lora", "lora": Lora(rank=8, alpha=16, targets=("q_proj",))}
    assert folklore.runs_of(ROW) == folklore.FULL
    assert folklore.runs_of(row(1, **lora, base_format="bf16")) == folklore.ADAPTED
    assert folklore.runs_of(row(1, **lora, base_format="nf4")) == folklore.QUANTISED
    assert folklore.runs_of(row(1, **lora, base_format="fp32")) == ""


def test_every_rule_that_runs_speak_of_is_shown_with_its_figures():
    shown = {rule.name: rule.measured for rule in api.rules("llama-3.1-8b")}
    judged = folklore.read_judged()
    assert judged
    assert judged.keys() <= shown.keys()
    for name, one in judged.items():
        assert f"over {one.figures} measured figures" in shown[name]
        assert one.highest_row in shown[name]
