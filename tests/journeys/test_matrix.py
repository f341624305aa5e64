"""`memfit plan` over every catalogue model, place, method and framework: bench/journeys.py."""

import json
import sys
from pathlib import Path

import pytest

from memfit import catalog
from memfit.core.errors import InvalidRequest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import journeys  # noqa: E402

SHARE = 1009  # one cell in so many is part of `make test`
CELLS = [cell for cell in journeys.cells() if cell.share % SHARE == 0]


@pytest.mark.parametrize("cell", CELLS, ids=" | ".join)
def test_an_answer_of_the_share_has_no_fault(cell):
    assert not journeys.ask(cell).faults


@pytest.mark.wide
@pytest.mark.parametrize("framework", journeys.FRAMEWORKS)
@pytest.mark.parametrize("model", [model.id for model in catalog.models()])
def test_no_answer_of_the_matrix_has_a_fault(model, framework):
    own = [c for c in journeys.cells() if (c.model, c.framework) == (model, framework)]
    assert len(own) == len(journeys.PLACES) * len(journeys.METHODS)
    faults = {" | ".join(cell): journeys.ask(cell).faults for cell in own}
    assert not {cell: found for cell, found in faults.items() if found}


def test_the_share_has_every_place_method_and_framework():
    assert {c.place for c in CELLS} == set(journeys.PLACES)
    assert {c.method for c in CELLS} == set(journeys.METHODS)
    assert {c.framework for c in CELLS} == set(journeys.FRAMEWORKS)


def test_the_committed_figures_have_no_fault():
    """They are of the catalogue's models when the matrix was run; the share above has the rest."""
    found = json.loads(journeys.RESULTS.read_text())
    each = len(journeys.PLACES) * len(journeys.METHODS) * len(journeys.FRAMEWORKS)
    assert found["of"] == found["models"] * each
    assert 113 <= found["models"] <= len(catalog.models())
    assert sum(found["outcomes"].values()) == found["cells"] >= found["of"] / journeys.ROUNDS
    assert found["crashes"] == 0
    assert not found["faults"]
    axes = {
        "place": journeys.PLACES, "method": journeys.METHODS, "framework": journeys.FRAMEWORKS,
    }  # fmt: skip
    for axis, names in axes.items():
        assert set(found["by"][axis]) == set(names)


def test_the_table_is_read_back_as_it_was_written():
    names = ["fits", "refused", "crashed", "at_risk", "does_not_fit", "unproven"]
    asked = journeys.cells()[::97]
    lines = {
        cell: journeys.Answer(
            names[at % 6], f"`method: …` number {at % 4}" if names[at % 6] == "refused" else "",
            (f"fault {at}",) if at % 10 == 0 else (), 0.0,
        )
        for at, cell in enumerate(asked)
    }  # fmt: skip
    summary = journeys.sum_up(lines, {})
    assert journeys.read_table(journeys.write_table(lines, summary), summary) == lines


def test_a_crash_and_a_refusal_in_words_of_others_are_faults(monkeypatch):
    """What the judge is for: each of these was seen."""
    cell = journeys.Cell("gemma-3-1b", "1 x h100", "full", "memfit")

    def refuse(*_, **__):
        raise InvalidRequest("`packing: true`, but the class counts distances over the whole row")

    def crash(*_, **__):
        raise IndexError("list index out of range")

    monkeypatch.setattr(journeys, "search_briefly", refuse)
    answer = journeys.ask(cell)
    assert answer.outcome == "refused"
    assert answer.faults == (
        "it has no hint", "it names `packing`, which the request did not set",
    )  # fmt: skip
    monkeypatch.setattr(journeys, "search_briefly", crash)
    assert journeys.ask(cell).outcome == "crashed"
    assert journeys.ask(cell).faults


def test_a_refusal_may_name_what_the_request_sets():
    error = InvalidRequest("`method: dora` on 8 ranks", hint="use `method: lora`")
    assert not journeys.judge_refusal(error, {"method": "dora"})
    assert journeys.judge_refusal(error, {"model": "gemma-3-1b"})
