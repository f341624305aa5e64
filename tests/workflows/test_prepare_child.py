"""The process that plans and certifies a run imports less than the run, and certifies the same."""

import sys
from types import SimpleNamespace

import pytest

from memfit.records import from_data
from memfit.records.request import Request
from memfit.workflows import prepare_child


@pytest.fixture
def request_of():
    def make(method):
        data = {"model": "llama-3.2-1b", "method": method, "hardware": {"device": "cpu"}}
        return from_data(data, Request, source="the test's request")

    return make


@pytest.fixture
def lean(monkeypatch):
    """How often everything was imported but for packages that no step calls."""
    seen = []
    monkeypatch.setattr(prepare_child, "import_lean", lambda *, adapters: seen.append(adapters))
    return seen


@pytest.fixture
def modules(monkeypatch):
    """Those of a process that has not imported torch."""
    found = {name: module for name, module in sys.modules.items() if name != "torch"}
    monkeypatch.setattr(prepare_child, "sys", SimpleNamespace(modules=found))
    return found


@pytest.mark.parametrize(
    ("method", "times"), [("full", 1), ("lora", 0), ("dora", 0), ("freeze", 0), ("auto", 0)]
)
def test_nothing_is_hidden_where_the_base_may_be_quantised(
    request_of, lean, modules, monkeypatch, method, times
):
    monkeypatch.setattr(prepare_child, "_measure_imports", lambda request: 1000)
    assert prepare_child._import_libraries(request_of(method)) == 1000
    assert lean == [False] * times


def test_what_measuring_has_imported_is_not_imported_again(request_of, lean, modules, monkeypatch):
    """A known figure leaves the process without torch; one that is measured does not."""

    def measure(_):
        modules["torch"] = None
        return 1000

    monkeypatch.setattr(prepare_child, "_measure_imports", measure)
    assert prepare_child._import_libraries(request_of("full")) == 1000
    assert lean == []
