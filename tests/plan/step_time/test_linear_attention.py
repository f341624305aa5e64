"""Linear attention's launches and bytes against torch's dispatcher, at lengths and sizes of which
no coefficient was read."""

import pytest
from counted import WAYS, make_counted
from counted_linear import all_linear, bytes_of_row, count_passes
from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.families import read_model
from memfit.plan.request.problem import find_device
from memfit.plan.step_time.block import scan, spend, time_block
from memfit.plan.step_time.counts.linear_attention import grow, read_linear
from memfit.plan.step_time.predicted_time import find_setting, sum_up
from memfit.records.model import CHUNK
from memfit.records.recipe import Lora
from tiny_models import RECURRENT

OTHER = (2, 8, 16, 24, 48)  # heads of keys and of values, elements of a key and of a value, hidden
USUAL = "qwen3_5_text"
EVERY = [pytest.param(name, marks=() if name == USUAL else pytest.mark.wide) for name in RECURRENT]


def find(recipe, device="h100-sxm"):
    totals = sum_up(find_adapter(recipe).adapt(read_model(recipe.model), recipe))
    return find_setting(totals, recipe, find_device(device))


def predict_launches(recipe):
    """(forward, backward) operations of the mean block."""
    setting = find(recipe)
    block = time_block(setting, spend(setting))
    return tuple(n / setting.machine.own.launch for n in (block.launched, block.launched_back))


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("chunks", [5, 8])
def test_launches_grow_with_the_chunks_of_a_row(family, chunks):
    """Other builds of torch differ by a few."""
    recipe = all_linear(make_counted(family, "cast"))
    long = replace(recipe, sequence_length=chunks * CHUNK - 20)
    seen, launches = count_passes(long), read_linear()[family]["cast"].launches
    there = launches.forward + chunks * launches.turn
    back = launches.backward + chunks * launches.turn_back
    assert (there, back) == (
        pytest.approx(seen["forward"], rel=0.05),
        pytest.approx(seen["backward"], rel=0.05),
    )
    assert sum(predict_launches(long)) == pytest.approx(there + back, rel=1e-9)
    assert predict_launches(long)[0] == pytest.approx(there, rel=0.1)


@pytest.mark.parametrize("changes", [
    {"recompute": "full", "recompute_blocks": 1},
    {"method": "lora", "lora": Lora(rank=4, alpha=8.0, targets=("in_proj_qkv",))},
], ids=["recomputed", "lora"])  # fmt: skip
def test_launches_of_recomputed_and_frozen_blocks(changes):
    recipe = replace(all_linear(make_counted(USUAL, "cast")), sequence_length=6 * CHUNK, **changes)
    seen = count_passes(recipe)
    for said, counted in zip(predict_launches(recipe), seen.values(), strict=True):
        assert said == pytest.approx(counted, rel=0.2)
    assert sum(predict_launches(recipe)) == pytest.approx(sum(seen.values()), rel=0.1)


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize(
    ("way", "tokens"), [*((way, n) for way in WAYS for n in (256, 1024)), ("cast", 440)]
)
def test_bytes_of_a_row_are_those_of_torchs_operations(family, way, tokens):
    recipe = all_linear(make_counted(family, way), OTHER)
    counts, a = read_linear()[family][way], read_model(recipe.model).architecture
    chunks = -(-tokens // CHUNK)
    for seen, moved in zip(
        bytes_of_row(recipe, tokens), (counts.forward, counts.backward), strict=True
    ):
        grown = grow(moved, a.linear, a.hidden)
        said = chunks * (CHUNK * (grown.token + chunks * grown.chunk) + grown.state)
        assert said == pytest.approx(seen, rel=0.02)


def test_seconds_of_the_scan_are_its_bytes_and_products():
    """A whole row's bytes beside those of the chunks before it: four times the length, more than
    four times the backward, and as many rows as many times both."""
    recipe = all_linear(make_counted(USUAL, "half"), OTHER)
    device = "rtx-4090"  # without curves of products, whose rate then grows with the call
    short, long, rows = (
        scan(find(replace(recipe, sequence_length=n, micro_batch=m), device))
        for n, m in ((512, 1), (2048, 1), (512, 3))
    )
    a, setting = read_model(recipe.model).architecture, find(recipe, device)
    grown = grow(read_linear()[USUAL]["half"].backward, a.linear, a.hidden)
    quadratic = 512 * 8 * grown.chunk / setting.machine.memory
    assert long[0] == pytest.approx(4 * short[0], rel=0.01)
    assert long[1] - 4 * short[1] == pytest.approx(12 * quadratic, rel=0.01)
    assert rows == pytest.approx([3 * n for n in short], rel=0.01)
    assert scan(find(make_counted("llama", "half"))) == (0.0, 0.0)


def test_another_cards_host_launches_no_faster_than_the_one_that_was_measured():
    recipe = replace(all_linear(make_counted(USUAL, "cast")), sequence_length=512)
    slow = [time_block(s := find(recipe, device), spend(s)) for device in ("h100-sxm", "rtx-4090")]
    assert slow[0].launched == pytest.approx(slow[1].launched)
    assert slow[0].launched_back == pytest.approx(slow[1].launched_back)
