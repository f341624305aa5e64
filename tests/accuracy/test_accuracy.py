"""The comparison itself: errors, groups, verdicts on cards, rows that are not predicted."""

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.accuracy import corpus, memory_errors
from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB
from memfit.records.results import Measurement

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import accuracy_page  # noqa: E402

ROW = next(r for r in corpus.read_corpus() if r.source.name == corpus.OWN)


def row(nbytes=None, kind="peak_allocated", name="a", **changes):
    found = {}
    if nbytes is not None:
        found[f"memory.{kind}"] = Measurement(value=nbytes, unit="B", counter="said so")
    source = replace(ROW.source, name=changes.pop("source", "some/repo README"))
    source = replace(source, confidence=changes.pop("confidence", "high"))
    return replace(ROW, id=name, source=source, measurements=found, **changes)


def predicted():
    return memory_errors.predict(ROW)[0].peak_allocated


def test_an_error_is_signed_and_relative_to_what_was_measured():
    found = memory_errors.compare([row(predicted() * 2), row(predicted() / 2, name="b")])
    assert [c.error for c in found.compared] == [-0.5, 1.0]
    head = found.headline
    assert (head.figures, head.median, head.worst, head.bias) == (2, 0.75, 1.0, 0.25)


def test_low_confidence_and_unknown_kinds_stay_out_of_the_headline():
    peak = predicted()
    found = memory_errors.compare(
        [row(peak), row(peak * 3, name="b", confidence="low"), row(peak, "unspecified", "c")]
    )
    assert found.headline.figures == 1
    assert found.headline.worst == 0
    assert [g.name for g in found.by("source")] == ["some/repo"]
    assert found.compared[1].headline is False


def test_ninety_of_a_hundred_errors_are_within_the_ninetieth_percentile():
    ordered = [n / 100 for n in range(1, 101)]
    assert memory_errors.quantile(ordered, 0.9) == 0.9
    assert memory_errors.quantile([0.5], 0.9) == 0.5
    assert memory_errors.quantile(ordered[:11], 0.9) == 0.10


def test_what_memfit_does_not_describe_is_counted_with_its_reason_and_never_guessed():
    odd = replace(ROW.recipe, framework="nobody")
    other = replace(
        ROW.recipe, model=replace(ROW.recipe.model, config={"model_type": "unheard-of"})
    )
    found = memory_errors.compare([row(1, recipe=odd), row(1, recipe=other, name="b")])
    assert found.compared == ()
    assert found.headline is None
    assert sorted(r.reason.split("`")[1] for r in found.refused) == ["nobody", "unheard-of"]


def figure(measured, low, high, predicted=None):
    return memory_errors.Compared(
        id="x", source="s", framework="f", device="d", model="m", kind="peak_reserved",
        confidence="high", split="test", headline=True, measured=measured * GIB, spread=0.0,
        predicted=int((predicted or high) * GIB), low=int(low * GIB), high=int(high * GIB),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "low", "high", "wanted"),
    [
        (25, 20, 23, (1, 0, 0)),  # said to fit 24 GiB and did not
        (22, 20, 23, (0, 0, 0)),
        (22, 20, 25, (0, 1, 0)),  # the band straddles the card
        (22, 25, 26, (0, 0, 1)),  # said not to fit, and did
    ],
)
def test_a_figure_answers_whether_the_verdict_was_right_on_a_card(measured, low, high, wanted):
    found = {c.gib: c for c in memory_errors._capacities([figure(measured, low, high)])}
    card = found[24]
    assert (card.false_fits, card.at_risk, card.missed) == wanted


def test_the_verb_reads_the_files_named_and_refuses_other_fields(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    corpus.write_rows(file, [row(predicted())])
    refused = [{"source": "some/repo", "reason": "no such model", "rows": 7}]
    (tmp_path / "rows.refused.json").write_text(json.dumps(refused))
    found = api.accuracy([file], ["model"])
    assert found.headline.worst == 0
    assert [(r.reason, r.rows) for r in found.refused] == [("no such model", 7)]
    with pytest.raises(InvalidRequest, match="grouped by `colour`"):
        api.accuracy([file], ["colour"])


def test_every_way_of_grouping_is_a_field():
    for way in memory_errors.WAYS:
        assert api.accuracy([Path(corpus.home())], [way]).by(way)


def test_no_figure_of_accuracy_got_worse_without_a_line_in_the_changelog():
    said = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unsaid = [line for line in accuracy_page.worse(accuracy_page.judge()) if line not in said]
    assert not unsaid, "worse than ever recorded; mend it, or say it in CHANGELOG.md word for word"


def test_the_record_keeps_the_best_figure_and_names_what_is_worse(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy_page, "FIGURES", tmp_path / "accuracy.json")
    good = memory_errors.compare([row(predicted() * 1.01)])
    bad = memory_errors.compare([row(predicted() * 1.1)])
    accuracy_page.FIGURES.write_text(accuracy_page.record(good))
    assert accuracy_page.worse(good) == []
    accuracy_page.FIGURES.write_text(accuracy_page.record(bad))
    (named,) = [line for line in accuracy_page.worse(bad) if line.startswith("all: median")]
    assert named == "all: median: 0.009901 -> 0.090909"


def test_a_row_that_names_no_knob_of_masks_takes_its_default():
    rows = [r for r in corpus.read_corpus() if r.recipe.framework == "hf-trainer"]
    older = [r for r in rows if "attn_implementation" not in r.recipe.options]
    assert older
    assert memory_errors.compare(older[:3]).compared
