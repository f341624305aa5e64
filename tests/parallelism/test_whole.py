"""What a rank's shards are filled with: the rows of what one process has, whoever fills them."""

from contextlib import contextmanager

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from memfit.certify.tracing.world import fake_world
from memfit.families import read_model
from memfit.parallelism.shards import held_shape
from memfit.parallelism.whole import local_part, own_part
from memfit.records.model import ModelReference
from memfit.records.recipe import Parallel, Recipe
from memfit.train.checkpoint.export import file_tensors
from memfit.train.step.build import build_model, fill_weights
from tiny_models import CONFIGS, make_recipe

SHARDS = Parallel(dp_shard=3)  # divides nothing
BOTH = Parallel(dp_replicate=2, dp_shard=2)
PRODUCTS = Parallel(dp_shard=3, tp=2, sequence_parallel=True)


def even(family: str):
    """A config whose vocabulary and feed-forward two ranks can share."""
    return {**CONFIGS[family], "vocab_size": 250, "intermediate_size": 178}


@contextmanager
def rank_of(parallel: Parallel, rank: int):
    with fake_world(parallel, rank, "cpu", lambda stream: None, lambda tensor, stream: None):
        yield


def filled(recipe: Recipe):
    model = build_model(recipe, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            local_part(parameter).fill_(float("nan"))  # what is not filled is seen
    fill_weights(model, recipe)
    return model


def check(recipe: Recipe, parallel: Parallel, ranks: tuple[int, ...]) -> None:
    """Every rank's rows are those of one process."""
    want = dict(filled(recipe).named_parameters())
    shapes = {w.name: w for w in read_model(recipe.model).weights}
    for rank in ranks:
        with rank_of(parallel, rank):
            found = dict(filled(replace(recipe, parallel=parallel)).named_parameters())
            assert found.keys() == want.keys()
            for name, parameter in found.items():
                mine = want[name][own_part(parameter)]
                if name in shapes:
                    held = held_shape(shapes[name], parallel, rank)
                    assert tuple(mine.shape) == held, name
                assert torch.equal(local_part(parameter), mine), f"{name} of rank {rank}"
                assert not mine.isnan().any(), name


@pytest.mark.parametrize("family", CONFIGS)
def test_random_weights_are_the_same_on_any_number_of_ranks(family: str) -> None:
    check(make_recipe(family), SHARDS, (0, 2))


def test_parts_of_products_are_cut_again_by_rows() -> None:
    check(make_recipe("qwen2", config=even("qwen2")), PRODUCTS, (0, 3, 5))


def test_copies_and_adapters_too() -> None:
    check(make_recipe("qwen2", method="lora"), BOTH, (3,))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_rank_reads_its_rows_of_published_weights(family, tmp_path) -> None:
    recipe = make_recipe(family)
    model = filled(recipe)
    save_file(file_tensors(model, family), tmp_path / "model.safetensors")
    source = ModelReference(name=family, source=str(tmp_path), config=recipe.model.config)
    check(replace(recipe, weights="pretrained", model=source), SHARDS, (0, 1, 2))


def test_a_rank_reads_its_part_of_published_products(tmp_path) -> None:
    recipe = make_recipe(config=even("llama"))
    save_file(file_tensors(filled(recipe), "llama"), tmp_path / "model.safetensors")
    source = ModelReference(name="llama", source=str(tmp_path), config=recipe.model.config)
    check(replace(recipe, weights="pretrained", model=source), PRODUCTS, (1, 4))
