"""The process that plans and certifies a run imports less than the run, and certifies the same."""

import pytest
from msgspec.structs import replace

from memfit.certify import import_memory
from memfit.core.errors import UnknownName
from memfit.records import from_data
from memfit.records.request import Request
from memfit.workflows import prepare_child


@pytest.fixture
def request_of():
    def make(method):
        data = {"model": "llama-3.2-1b", "method": method, "hardware": {"device": "cpu"}}
        return from_data(data, Request, source="the test's request")

    return make


@pytest.mark.parametrize(
    ("method", "times"), [("full", 1), ("lora", 0), ("dora", 0), ("freeze", 0), ("auto", 0)]
)
def test_nothing_is_hidden_where_the_base_may_be_quantised(request_of, monkeypatch, method, times):
    seen = []
    monkeypatch.setattr(prepare_child, "import_lean", lambda modules, *, adapters: seen.append(1))
    prepare_child._import_libraries(request_of(method))
    assert len(seen) == times


@pytest.mark.parametrize(
    ("method", "stored", "ways"),
    [
        ("full", "auto", [True]), ("lora", "auto", [False, True]), ("lora", "bf16", [True]),
        ("lora", "nf4", [False]), ("auto", "auto", [False, True]),
    ],
)  # fmt: skip
def test_what_the_run_may_import_is_measured_before_this_process_imports_it_too(
    request_of, monkeypatch, method, stored, ways
):
    started = []

    def start(environment, *, adapters, lean):
        started.append((environment, adapters, lean))
        return lambda: 1000 + lean

    monkeypatch.setattr(import_memory, "start_measuring", start)
    request = replace(request_of(method), base_format=stored)
    imports = prepare_child._measure_imports(request, {"OWN": "1"})
    assert started == [({"OWN": "1"}, method != "full", lean) for lean in ways]
    assert [imports(True), imports(False), imports(True)] == [1001, 1000, 1001]
    assert len(started) == 2


def test_a_gpu_has_no_imports_to_measure(request_of):
    data = {"model": "llama-3.2-1b", "method": "full", "hardware": {"device": "h100-sxm"}}
    request = from_data(data, Request, source="the test's request")
    assert prepare_child._measure_imports(request, {})(True) is None


@pytest.mark.parametrize("kind", sorted(prepare_child.KINDS))
def test_every_kind_of_error_of_the_other_process_is_raised_as_it_was_there(kind):
    made = prepare_child.restore_error(kind, "unknown model: `x`", "did you mean `y`?")
    assert type(made).__name__ == kind
    assert (made.message, made.hint) == ("unknown model: `x`", "did you mean `y`?")


def test_training_a_model_that_nobody_knows_says_so(tmp_path):
    data = {"model": "a-model-nobody-knows", "method": "full", "hardware": {"device": "cpu"}}
    request = from_data(data, Request, source="the test's request")
    with pytest.raises(UnknownName, match="a-model-nobody-knows"):
        prepare_child.prepare_apart(request, tmp_path / "run", moved=True)
