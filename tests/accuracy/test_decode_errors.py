"""Published rates of decoding beside what is predicted of them, and the range made of them."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from memfit.plan.step_time.rollouts.decode_range import find_decode_range, read_decode_errors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from decode_errors import compare_decoding, decode_errors_of, read_decode_rows
from on_gpu.recipes import make_plan
from on_gpu.rollouts import CASES, plan_seconds
from on_gpu.rows import LANDED, read_rows


@pytest.fixture(scope="module")
def compared():
    return compare_decoding(read_decode_rows())


def test_nine_in_ten_published_rates_lie_within_the_range_of_a_plan(compared):
    errors = read_decode_errors()
    assert errors == decode_errors_of(compared)
    judged = [c.ratio for c in compared if c.row.split == "test" and c.row.launches == "host"]
    assert len(judged) == errors.rows
    inside = sum(errors.low <= ratio <= errors.high for ratio in judged) / len(judged)
    assert 0.87 <= inside <= 0.94
    low, high, because = find_decode_range(2.0)
    assert (low, high) == (2 * errors.low, 2 * errors.high)
    assert f"{errors.rows} published rates" in because


def test_rows_name_where_they_come_from_and_none_is_there_twice(compared):
    assert all(c.row.source and c.row.url.startswith("https://") for c in compared)
    assert max(Counter(c.row.id for c in compared).values()) == 1
    assert {c.row.launches for c in compared} == {"host", "graph"}


def test_rows_of_servers_are_predicted_within_a_quarter(compared):
    """bitsandbytes' own benchmark on an H100, 1 to 32 rows, bf16, nf4 and int8: two models that no
    constant was read off."""
    ratios = {
        c.row.id: c.ratio for c in compared
        if c.row.device == "h100-sxm" and c.row.split == "test"
    }  # fmt: skip
    near = [name for name, ratio in ratios.items() if 1 / 1.25 <= ratio <= 1.25]
    assert len(near) >= 0.8 * len(ratios) > 20, ratios


def test_more_rows_say_more_a_second_as_they_were_measured_to(compared):
    """Order within a device, a model and a base: the prediction has the measurement's."""
    groups: dict[tuple[str, ...], list] = {}
    for c in compared:
        r = c.row
        key = r.device, r.model, r.base_format, str(r.double_quantised), str(r.outlier_threshold)
        groups.setdefault(key, []).append(c)
    swept = [sorted(g, key=lambda c: c.row.tokens_per_second) for g in groups.values()]
    for group in swept:
        assert [c.predicted for c in group] == sorted(c.predicted for c in group)
    assert sum(len(g) >= 3 for g in swept) >= 15


def test_graphs_spare_launches_alone(compared):
    """Unsloth's own loops in CUDA graphs, dense models: within half of what bytes and kernels
    take."""
    found = {c.row.id: c.ratio for c in compared if c.row.source.endswith("#5108")}
    assert len(found) == 2
    assert all(2 / 3 <= ratio <= 3 / 2 for ratio in found.values()), found


ROLLOUTS = [row for row in read_rows(LANDED).values() if row["slice"] == "rollouts"]


@pytest.mark.parametrize("row", ROLLOUTS, ids=lambda row: row["name"])
def test_phases_of_memfits_own_iterations_on_a_gpu_are_predicted_within_three_tenths(row):
    model, _, changes = CASES[row["name"]]
    plan = make_plan(model, changes, row["device"])
    assert plan.recipe_digest == row["recipe_digest"]
    for phase, seconds in plan_seconds(plan).items():
        assert 1 / 1.3 < row["phase_seconds"][phase] / seconds < 1.3, phase
    assert plan.time.step_seconds_low < sum(row["phase_seconds"].values())
    assert sum(row["phase_seconds"].values()) < plan.time.step_seconds_high
