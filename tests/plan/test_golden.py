"""Every recipe of `recipes/` has a golden plan: a diff shows exactly what a change decides anew.

UPDATE_GOLDEN=1 pytest tests/plan/test_golden.py rewrites them.
"""

import json
import os
from pathlib import Path

import pytest

from memfit import api
from memfit.records import to_data

HERE = Path(__file__).parent.parent
RECIPES = sorted((HERE.parent / "recipes").glob("*.yaml"))
NEEDS_A_RUN = {"demo-llama_lora_cpu"}  # its model is what the demo trains


def expand(path):
    plan = api.plan(api.read(path), levers=False)
    return {
        "recipe": to_data(plan.recipe),
        "verdict": plan.memory.verdict,
        "peak_phase": plan.memory.peak_phase,
        "phases": {p: plan.ledger.total(p) for p in plan.ledger.phases},
        "at_the_peak": {k: n for k, n in plan.ledger.by_kind(plan.ledger.peak_phase).items()},
        "considered": [f"{c.label}: {c.because}" for c in plan.considered],
    }


def twin(path):
    """The same recipe on another card of 24 GB, where there is one."""
    other = path.with_name(path.name.replace("rtx-3090", "rtx-4090"))
    return other if other in RECIPES and other != path else None


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=[pytest.mark.wide] if twin(p) else []) for p in RECIPES],
)
def test_each_recipe_plans_as_its_golden_file_says(path):
    if path.stem in NEEDS_A_RUN:
        assert "runs/demo" in path.read_text()
        return
    golden = HERE / "golden" / f"{path.stem}.plan.json"
    text = json.dumps(expand(path), indent=1) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert golden.read_text() == text


def test_every_golden_plan_has_its_recipe():
    stems = {p.stem for p in RECIPES} - NEEDS_A_RUN
    assert {p.name.removesuffix(".plan.json") for p in (HERE / "golden").glob("*")} == stems
