"""Whole runs over a quantised base: trained, stopped, resumed, saved, and what was counted."""

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from tiny_runs import CONFIG, tiny_recipe, write_text

from memfit import catalog
from memfit.certify.evidence.certificate import make_certificate
from memfit.records.model import ModelReference
from memfit.records.recipe import Lora, Quantisation
from memfit.records.request import Request, Task
from memfit.train.data.prepare import find_bounds
from memfit.train.model.quantised import quantised_modules
from memfit.train.run import loop
from memfit.train.run.generate import load_model
from memfit.train.run.loop import Cadence, train
from memfit.train.step.build import build_model, fill_weights

CPU = catalog.find_device("cpu-x86")
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
FOUR = {"base_format": "nf4", "quantisation": Quantisation(double=True)}
EIGHT = {
    "base_format": "int8",
    "quantisation": Quantisation(outlier_threshold=2.5, outlier_share=0.5),
}
FORMATS = {
    "nf4": FOUR,
    "int8": EIGHT,
    "int8, no outliers": EIGHT | {"quantisation": Quantisation()},
}


@pytest.fixture(scope="module")
def request_(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    data, held_out = write_text(root / "data"), write_text(root / "held_out", 3)
    return Request(model=CONFIG, task=Task(data=str(data), evaluation=str(held_out)))


@pytest.fixture(scope="module")
def base(request_, tmp_path_factory):
    """A model folder: what a short run from scratch has made."""
    folder = tmp_path_factory.mktemp("base")
    train(tiny_recipe(precision="bf16", base_format="bf16"), request_, folder / "run")
    return folder / "run" / "model"


@pytest.fixture
def go(request_, tmp_path):
    def start(recipe, folder="run", **options):
        options = {"cadence": Cadence(save_every=2, evaluate_every=3)} | options
        return train(recipe, request_, tmp_path / folder, cache=tmp_path / "cache", **options)

    return start


def recipe_of(form, base=None, **changes):
    recipe = tiny_recipe(method="lora", lora=LORA, precision="bf16-mixed", **FORMATS[form])
    if base is not None:
        model = ModelReference(name="tiny", source=str(base), config=CONFIG)
        changes |= {"model": model, "weights": "pretrained"}
    return replace(recipe, **changes)


@pytest.mark.parametrize("form", ["nf4", "int8, no outliers"])
def test_the_measured_peak_is_the_certified_one_to_the_byte(form, go, request_, tmp_path):
    recipe = recipe_of(form)
    run = go(recipe)
    data, held_out = find_bounds(request_, recipe, tmp_path / "cache")
    made = make_certificate(recipe, CPU, None, None, data=data, held_out=held_out)
    assert run.phases == {phase: n for phase, n in made.phases.items() if phase != "generate"}
    assert "bitsandbytes" in made.versions


def test_outliers_are_counted_and_stay_under_what_is_certified(go, request_, tmp_path):
    recipe = recipe_of("int8")
    run = go(recipe)
    mean = run.measurements["quantisation.outlier_share"].value
    most = run.measurements["quantisation.largest_outlier_share"]
    assert 0 < mean < most.value <= 0.5
    assert "certified for 50.00%" in most.counter
    assert run.warnings == ()
    data, held_out = find_bounds(request_, recipe, tmp_path / "cache")
    made = make_certificate(recipe, CPU, None, None, data=data, held_out=held_out)
    assert run.measurements["memory.peak_allocated"].value <= made.memory.peak_allocated


def test_more_outliers_than_certified_are_told(go):
    own = Quantisation(outlier_threshold=1.5, outlier_share=0.01)
    run = go(recipe_of("int8", quantisation=own))
    assert any("quantisation.outlier_share" in warning for warning in run.warnings)


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_stopped_run_goes_on_bit_by_bit_and_saves_the_adapter_alone(form, go, base, tmp_path):
    recipe = recipe_of(form, base)
    whole = go(recipe, "whole")
    plain = loop._advance

    def stop(session, built, log, index):
        if index == 4:
            raise KeyboardInterrupt
        plain(session, built, log, index)

    loop._advance = stop
    try:
        with pytest.raises(KeyboardInterrupt):
            go(recipe, "halves")
    finally:
        loop._advance = plain
    resumed = go(recipe, "halves")
    assert resumed.losses == whole.losses
    saved = [load_file(tmp_path / n / "model" / "adapter_model.safetensors")
             for n in ("whole", "halves")]  # fmt: skip
    assert saved[0].keys() == saved[1].keys()
    assert all("lora_" in name for name in saved[0])
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    held = load_file(next((tmp_path / "whole" / "checkpoints").glob("*")) / "weights.safetensors")
    assert all("lora_" in name for name in held)


def test_what_was_trained_is_loaded_over_the_same_quantised_base(go, base, tmp_path):
    recipe = recipe_of("nf4", base)
    go(recipe)
    model = load_model(tmp_path / "run" / "model")
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    own = {n.replace(".default.", "."): p for n, p in model.named_parameters() if "lora_" in n}
    assert all(torch.equal(own[name], saved[name]) for name in saved)
    twin = build_model(recipe, "cpu")
    fill_weights(twin, recipe)
    coded = quantised_modules(model)
    assert coded
    for name, module in quantised_modules(twin).items():
        assert torch.equal(coded[name].weight, module.weight)
