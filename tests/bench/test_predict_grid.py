"""bench/predict_grid.py: its configurations, which rows it keeps, and what its results say."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from memfit import catalog
from memfit.certify import trace
from memfit.families import read_model
from memfit.records.ledger import Kind, Phase
from test_layers import LAYERS
from tiny_models import CONFIGS, make_recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import grid_recipes
import predict_grid

ROOT = Path(__file__).resolve().parents[2]
CPU, H100 = grid_recipes.DEVICES
RESULTS = ROOT / "bench" / "results" / "predict_grid.jsonl"
GPU_ONLY = {
    "precision: fp8-mixed", "offload: optimizer", "optimizer: adamw8bit-bnb",
    "optimizer: adamw8bit-paged", "attention: efficient", "attention: cudnn",
    "attention: varlen",
}  # fmt: skip
SETTLED = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE, Phase.EVALUATE)
# of compiled blocks a certificate is a bound, not a count
EXACT = [s for s in grid_recipes.TECHNIQUES if "compile" not in s[0]]
ROUNDED = 4096  # bytes of a tiny model's tensors that blocks of 512 B move to another instant


@pytest.fixture(scope="module")
def committed():
    return list(predict_grid.read_rows(RESULTS).values())


def test_the_committed_grid_keeps_the_limits_at_one_commit(committed):
    assert len({row["commit"] for row in committed}) == len({row["step"] for row in committed}) == 1
    assert "dirty" not in committed[0]["commit"]
    assert predict_grid.keeps_limits(committed)
    errors = [predict_grid.judge(row, _Told(row["foretold"])) for row in committed]
    assert [row["error"] for row in errors] == [row["error"] for row in committed]
    assert predict_grid.table(committed) == RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    assert predict_grid.claim(committed) in (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")


def test_compiled_blocks_stand_apart_and_nothing_else_does(committed):
    far = {"error": 0.1, "worst_component_error": 0.5}
    for row in (committed[0], committed[-1]):
        assert not predict_grid.keeps_limits([*committed, row | far])
        apart = row | far | {"techniques": [predict_grid.BOUNDED, "method: full"]}
        assert predict_grid.keeps_limits([*committed, apart])
        assert "+10.0%" in predict_grid.claim([*committed, apart])
        assert "10.0" not in predict_grid.claim(committed)
    assert not any("compile" in s for s, _ in EXACT)
    assert "compiled blocks, apart" in predict_grid.summary([*committed, apart])


class _Told:
    """A prediction that says what a row says."""

    def __init__(self, foretold):
        self.sizes = foretold
        totals = {phase: sizes["total"] for phase, sizes in foretold.items()}
        self.peak, self.peak_phase = max(totals.values()), max(totals, key=totals.__getitem__)

    def total(self, phase):
        return self.sizes[phase]["total"]

    def by_kind(self, phase):
        return {Kind(k): n for k, n in self.sizes[phase].items() if k != "total"}


def test_every_technique_has_rows_on_each_device_that_can(committed):
    rows = grid_recipes.grid(everywhere=False)
    assert 400 <= len(rows) <= 600
    assert 400 <= len(committed) <= 600  # of their commit: what a model can have has grown since
    found = {device: Counter() for device in grid_recipes.DEVICES}
    for _, recipe, device in rows:
        found[device.id].update(grid_recipes.techniques(recipe))
    assert found[H100].keys() - found[CPU].keys() == GPU_ONLY
    assert found[CPU].keys() <= found[H100].keys()
    assert min(found[H100].values()) >= 2
    assert min(found[CPU].values()) >= 1


def test_what_a_setting_asks_is_what_its_rows_do():
    """A recipe that settles loses nothing that it was asked for by name."""
    for settings, names in grid_recipes.TECHNIQUES:
        for name in names:
            recipe = grid_recipes.change(grid_recipes.make_recipe(name, 7, 6), settings)
            for key, value in settings.items():
                if isinstance(value, dict):
                    has = getattr(recipe, key)
                    kept = {k: getattr(has, k) for k in value if k != "targets"}
                    assert kept == {k: v for k, v in value.items() if k != "targets"}, settings
                elif key == "recompute":
                    assert bool(recipe.selective_blocks) == bool(grid_recipes.RECOMPUTE[value][1])
                else:
                    assert getattr(recipe, key) == value, (name, key)


def test_what_a_trace_depends_on_leaves_out_only_what_it_cannot_import():
    assert set(predict_grid.UNTRACED) == {"plan"}.union(*LAYERS[4:])


@pytest.mark.parametrize("changed", ["nothing", "digest", "step"])
def test_a_trace_is_kept_only_where_recipe_and_step_are_unchanged(changed, monkeypatch):
    device = catalog.find_device(CPU)
    name, recipe = "tiny", make_recipe()
    before = json.loads(json.dumps(predict_grid.compare(name, recipe, device, None)))
    if changed != "nothing":
        before[changed] = "another"
    called = []
    real = predict_grid.certify
    monkeypatch.setattr(predict_grid, "certify", lambda *a: called.append(a) or real(*a))
    again = predict_grid.compare(name, recipe, device, before)
    assert bool(called) == (changed != "nothing")
    assert again["traced"] == before["traced"]
    assert again["commit"] == predict_grid.commit()


def tiny(settings, name, device):
    """The settings on a tiny model of the named one's family."""
    family = read_model(grid_recipes.find(name)).architecture.family
    config = CONFIGS[family]
    if settings.get("qat") == "int4":
        config = config | {"intermediate_size": 96}  # rows of whole groups
    recipe = make_recipe(family, config=config, micro_batch=2, accumulation=2)
    return grid_recipes.on(grid_recipes.change(recipe, settings), device)


@pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning")
@pytest.mark.parametrize("number", range(0, len(EXACT), 9))
def test_combinations_are_predicted_as_traced(number):
    """Every fifth, on a GPU and a CPU in turn; the benchmark has them all, at size."""
    settings, (name, *_) = EXACT[number]
    device = catalog.find_device((H100, CPU)[number % 2])
    recipe = tiny(settings, name, device)
    if not grid_recipes.possible(recipe, device):
        device = catalog.find_device(H100)
        recipe = tiny(settings, name, device)
    predicted, _ = predict_grid.predict(recipe, device)
    traced = trace(recipe, device)
    for phase in (p for p in SETTLED if p in traced.phases):
        want, have = (ledger.by_kind(phase) for ledger in (traced.ledger, predicted))
        for kind in (want.keys() | have.keys()) - {Kind.FRAGMENTATION}:
            near = pytest.approx(want.get(kind, 0), rel=0.02, abs=ROUNDED)
            assert have.get(kind, 0) == near, (phase, kind)
