"""memfit's own step as one framework among the others."""

import ast
from pathlib import Path

import pytest

from memfit import api
from memfit.families import read_model
from memfit.plan.frameworks import Job, find_framework, frameworks
from memfit.plan.request.model_reference import find_reference
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.recipe import OWN_STEP
from memfit.records.request import Request

SOURCE = Path(__file__).resolve().parents[3] / "src" / "memfit"


def comparisons(path):
    """Lines that compare something with the name of memfit's own step."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                constants = (
                    side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
                )
                names = [c.value for c in constants if isinstance(c, ast.Constant)]
                if OWN_STEP in names:
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)}"


def test_no_module_asks_for_the_name_of_memfits_own_step():
    found = [line for path in sorted(SOURCE.rglob("*.py")) for line in comparisons(path)]
    assert [line for line in found if "framework" in line] == []


def test_it_alone_runs_and_is_simulated():
    declared = {name: frameworks.find(name) for name in frameworks.names()}
    assert [n for n, f in declared.items() if f.runs] == [OWN_STEP]
    assert [n for n, f in declared.items() if f.simulated] == [OWN_STEP]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_its_bytes_are_those_of_the_prediction(method):
    request = from_data(
        {
            "model": "llama-3.2-1b", "method": method, "precision": "bf16-mixed",
            "recompute": "none", "loss": "plain", "micro_batch": 1,
            "hardware": {"device": "cpu"}, "task": {"sequence_length": 512},
        },
        Request, source="test",
    )  # fmt: skip
    plan = api.predict(request)
    model, device = read_model(find_reference("llama-3.2-1b")), find_device("cpu")
    job = Job(model=model, recipe=plan.recipe, device=device)
    framework = find_framework(OWN_STEP)
    framework.check(job)
    assert framework.predict(job) == plan.ledger
