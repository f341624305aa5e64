"""Checkpoints: bit-exact, whole or not there, and never another run's."""

import json
import resource
import shutil

import pytest
import torch
from msgspec.structs import replace
from tiny_runs import tiny_recipe

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records.recipe import Lora
from memfit.train.checkpoint.files import find_damage, newest_checkpoint, remove_unfinished
from memfit.train.checkpoint.whole import load_checkpoint, save_checkpoint
from memfit.train.measure.counters import run_step, synthetic_micro
from memfit.train.measure.storages import inner_tensors
from memfit.train.model.weights import fill_weights
from memfit.train.step.build import Built, build_model, build_optimizer

DATA = "d" * 32


def build(recipe):
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    return Built(recipe, model, build_optimizer(recipe, model))


def advance(built, steps):
    for seed in range(steps):
        micro = synthetic_micro(replace(built.recipe, seed=seed), 300)
        run_step(built, [micro] * built.recipe.accumulation)


def held(built):
    tensors = {n: p for n, p in built.model.named_parameters() if p.requires_grad}
    if built.scaler is not None:
        tensors |= built.scaler.state_dict()
    names = {id(p): n for n, p in tensors.items()}
    for parameter, state in built.optimizer.state.items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                tensors[f"{names[id(parameter)]}::{key}"] = value
                continue
            for part, inner in inner_tensors(value).items():
                tensors[f"{names[id(parameter)]}::{key}::{part}"] = inner
    return tensors


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[key].dtype, key
            assert torch.equal(value.float(), b[key].float()), key  # no equal() of fp8
        else:
            assert value == b[key], key


RECIPES = {
    "adamw": tiny_recipe(),
    "adamw in a loop": tiny_recipe(optimizer={"implementation": "loop"}),
    "bf16": tiny_recipe(precision="bf16", base_format="bf16"),
    "sgd": tiny_recipe(optimizer={"name": "sgd", "implementation": "foreach"}),
    "8-bit": tiny_recipe(optimizer={"name": "adamw8bit", "implementation": "loop"}),
    "4-bit": tiny_recipe(optimizer={"name": "adamw4bit", "implementation": "loop"}),
    "fp8": tiny_recipe(optimizer={"name": "adamwfp8", "implementation": "loop"}),
    "fp16": tiny_recipe(precision="fp16-mixed"),
    "lora": tiny_recipe(method="lora", lora=Lora(rank=4, alpha=8.0, targets=("q_proj",))),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_loaded_is_what_was_saved_and_goes_on_alike(name, tmp_path):
    recipe = RECIPES[name]
    one, two = build(recipe), build(recipe)
    advance(one, 2)
    save_checkpoint(tmp_path, 2, one, DATA)
    advance(two, 1)  # another state, which loading must replace
    found = newest_checkpoint(tmp_path, pytest.fail)
    assert load_checkpoint(found, two, DATA) == 2
    same(held(one), held(two))
    advance(one, 2)
    advance(two, 2)
    same(held(one), held(two))


def test_the_last_two_are_kept_and_nothing_else(tmp_path):
    built = build(tiny_recipe())
    advance(built, 1)
    for step in (1, 2, 999_999, 1_000_000):
        save_checkpoint(tmp_path, step, built, DATA)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-1000000", "step-999999"]
    assert newest_checkpoint(tmp_path, pytest.fail).name == "step-1000000"


DAMAGE = {
    "a missing file": (lambda f: (f / "weights.safetensors").unlink(), "is missing"),
    "a short file": (lambda f: (f / "optimizer.safetensors").write_bytes(b"ab"), "has 2 bytes"),
    "a flipped bit": (lambda f: flip(f / "weights.safetensors"), "content of weights"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "no readable manifest"),
    "half a manifest": (lambda f: (f / "manifest.json").write_text("{"), "no readable manifest"),
}


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_passed_over(name, tmp_path):
    built = build(tiny_recipe())
    advance(built, 1)
    save_checkpoint(tmp_path, 1, built, DATA)
    newest = save_checkpoint(tmp_path, 2, built, DATA)
    harm, says = DAMAGE[name]
    harm(newest)
    said = []
    assert newest_checkpoint(tmp_path, said.append).name == "step-000001"
    assert len(said) == 1
    assert says in said[0]
    save_checkpoint(tmp_path, 2, built, DATA)
    assert newest_checkpoint(tmp_path, pytest.fail).name == "step-000002"


def test_what_was_being_written_is_never_read_and_is_cleared(tmp_path):
    built = build(tiny_recipe())
    advance(built, 1)
    good = save_checkpoint(tmp_path, 1, built, DATA)
    shutil.copytree(good, good.with_name(".unfinished-step-000002"))
    assert newest_checkpoint(tmp_path, pytest.fail) == good
    remove_unfinished(tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]


def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_half_written(tmp_path):
    built = build(tiny_recipe())
    advance(built, 1)
    good = save_checkpoint(tmp_path, 1, built, DATA)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (good / "weights.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))  # no file may be larger
    try:
        with pytest.raises(RunFailed, match="could not save the checkpoint of step 2") as failure:
            save_checkpoint(tmp_path, 2, built, DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert failure.value.exit_code == 5
    assert "free space" in failure.value.hint
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    assert not find_damage(good)


def test_a_checkpoint_of_another_recipe_or_of_other_data_is_refused(tmp_path):
    built = build(tiny_recipe())
    advance(built, 1)
    folder = save_checkpoint(tmp_path, 1, built, DATA)
    other = build(tiny_recipe(seed=1))
    with pytest.raises(InvalidRequest) as refused:
        load_checkpoint(folder, other, DATA)
    assert built.recipe.digest in refused.value.message
    assert other.recipe.digest in refused.value.message
    assert refused.value.hint
    with pytest.raises(InvalidRequest, match=rf"data {DATA}, but this run is of data eeee"):
        load_checkpoint(folder, built, "eeee")


def test_weights_are_safetensors_and_nothing_is_pickled(tmp_path):
    built = build(tiny_recipe())
    advance(built, 1)
    folder = save_checkpoint(tmp_path, 1, built, DATA)
    assert {p.suffix for p in folder.iterdir()} == {".safetensors", ".json"}
    assert json.loads((folder / "state.json").read_text())["step"] == 1
