"""Comparing step times: one weight a source, order inside sweeps, rows that are not predicted."""

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.accuracy import corpus, time_errors
from memfit.accuracy.time_errors import (
    TimeCompared,
    find_choices,
    find_sweeps,
    kendall,
    summarise,
    weighted_quantile,
)
from memfit.core.errors import InvalidRequest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import accuracy_time_page  # noqa: E402

ROW = next(r for r in corpus.read_corpus() if r.source.name.startswith("huggingface/nanotron"))


def figure(measured, predicted, *, source="a/b", recipe="r", name="x", job="j", layout="l"):
    return TimeCompared(
        id=name, source=source, framework="f", device="d", model="m", devices=8,
        confidence="high", split="test", recipe=recipe, tokens=1.0, measured=measured,
        predicted=predicted, job=job, layout=layout,
    )  # fmt: skip


def test_a_table_of_a_hundred_rows_weighs_as_much_as_one_run():
    many = [figure(1.0, 1.01) for _ in range(100)]
    group = summarise("all", [*many, figure(1.0, 1.5, source="c/d")])
    assert (group.rows, group.sources) == (101, 2)
    assert group.median == pytest.approx(0.01)
    assert group.p90 == pytest.approx(0.5)
    assert group.bias == pytest.approx((0.01 + 0.5) / 2)
    assert summarise("none", []) is None


def test_a_weighted_quantile_is_the_smallest_value_with_enough_weight_below():
    pairs = [(0.1, 1.0), (0.2, 1.0), (0.3, 2.0)]
    assert weighted_quantile(pairs, 0.5) == 0.2
    assert weighted_quantile(pairs, 0.51) == 0.3
    assert weighted_quantile(pairs, 1.0) == 0.3


def test_kendalls_tau_counts_pairs_of_unlike_recipes():
    ordered = [figure(t, 2 * t, recipe=str(t)) for t in (1.0, 2.0, 3.0, 4.0)]
    assert kendall(ordered) == 1
    assert kendall([replace(f, predicted=-f.predicted) for f in ordered]) == -1
    one_wrong = [*ordered[:3], replace(ordered[3], predicted=5.0)]
    assert kendall(one_wrong) == pytest.approx((5 - 1) / 6)
    assert kendall([figure(1.0, 1.0), figure(2.0, 2.0)]) is None  # one recipe, run twice
    assert [s.tau for s in find_sweeps(ordered)] == [1]
    assert list(find_sweeps(ordered[:2])) == []


def test_the_layout_that_a_plan_would_choose_is_held_against_the_fastest():
    right = [figure(1.0, 3.0, layout="a"), figure(2.0, 4.0, layout="b")]
    close = [figure(1.02, 3.0, layout="a", job="k"), figure(1.0, 4.0, layout="b", job="k")]
    wrong = [figure(1.5, 3.0, layout="a", job="w"), figure(1.0, 4.0, layout="b", job="w")]
    alone = [figure(1.0, 3.0, layout="a", job="z"), figure(9.0, 2.0, layout="a", job="z")]
    found = list(find_choices([*right, *close, *wrong, *alone]))
    assert [round(c.loss, 9) for c in found] == [0, 0.02, 0.5]
    assert [c.near for c in found] == [True, True, False]
    assert (found[2].chosen, found[2].fastest, found[2].layouts) == ("a", "b", 2)


def test_times_of_functional_tests_and_throttled_devices_are_no_measurement():
    tested = replace(ROW, source=replace(ROW.source, name="NVIDIA/Megatron-LM tests"))
    throttled = replace(ROW, source=replace(ROW.source, notes="a power-limited run"))
    doubtful = replace(ROW, source=replace(ROW.source, confidence="low"))
    found = time_errors.compare_times([ROW, tested, throttled, doubtful])
    assert [c.id for c in found.compared] == [ROW.id]
    assert sorted(r.rows for r in found.refused) == [1, 1]
    assert all(r.use == "time" for r in found.refused)


def test_the_corpus_is_predicted_and_grouped(tmp_path):
    path = tmp_path / "rows.jsonl"
    corpus.write_rows(path, [ROW])
    found = api.accuracy_of_times([path], ["source"])
    assert [g.name for g in found.by("source")] == ["huggingface/nanotron"]
    assert found.headline.rows == 1
    with pytest.raises(InvalidRequest, match="cannot be grouped"):
        api.accuracy_of_times([path], ["kind"])


def test_no_figure_of_times_got_worse_without_a_line_in_the_changelog():
    said = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = accuracy_time_page.judge()
    unsaid = [line for line in accuracy_time_page.worse(found) if line not in said]
    assert not unsaid, "worse than ever recorded; mend it, or say it in CHANGELOG.md word for word"
    # what was asked of them: half of all within 6 %, nine tenths within 15 %, order by 0.85
    assert found.headline.median <= 0.06
    assert found.headline.p90 <= 0.15
    assert found.tau >= 0.85
    assert found.near >= 0.9  # jobs whose chosen layout is within 3 % of the fastest published


def test_the_record_keeps_the_best_time_and_names_what_is_worse(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy_time_page, "FIGURES", tmp_path / "accuracy_time.json")
    good, bad = (
        time_errors.TimeAccuracy(
            compared=(), refused=(), headline=summarise("all", [figure(1.0, 1.0 + error)]),
            test=None, sweeps=(), choices=(),
        )
        for error in (0.01, 0.1)
    )  # fmt: skip
    accuracy_time_page.FIGURES.write_text(accuracy_time_page.record(good))
    assert accuracy_time_page.worse(good) == []
    accuracy_time_page.FIGURES.write_text(accuracy_time_page.record(bad))
    assert accuracy_time_page.worse(bad)[0] == "time: median: 0.01 -> 0.1"
