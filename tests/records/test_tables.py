"""Rows as DataFrames, and what is said where pandas is missing."""

import sys

import pytest

import memfit
from memfit.records import to_data

WORDS = {"device": "l4", "method": "lora", "seq_len": 128}


@pytest.mark.levers
def test_rows_are_a_frame():
    pytest.importorskip("pandas")
    plan = memfit.plan("gpt2", **WORDS)
    frame = plan.to_pandas()
    assert list(frame["nbytes"]) == [entry.nbytes for entry in plan.memory.entries]
    levers = plan.to_pandas("levers")
    assert levers.to_dict("records")[0]["because"] == plan.levers[0].because
    assert frame["nbytes"].sum() == sum(entry["nbytes"] for entry in to_data(plan.memory.entries))
    solved = memfit.solve("micro_batch", "gpt2", **WORDS)
    assert set(solved.to_pandas()["value"]) == {one.value for one in solved.tried}
    assert "fits" in solved._repr_html_()


def test_a_table_that_is_not_there_is_named():
    with pytest.raises(memfit.UnknownName, match="unknown table: `lever`") as caught:
        memfit.plan("gpt2", **WORDS).to_pandas("lever")
    assert "levers" in caught.value.hint


def test_without_pandas_the_hint_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(memfit.InvalidRequest, match="needs `pandas`") as caught:
        memfit.plan("gpt2", **WORDS).to_pandas()
    assert "pip install pandas" in caught.value.hint
