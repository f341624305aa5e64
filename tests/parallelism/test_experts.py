"""Experts dealt to ranks: torch's own shards in a fake world, on every rank."""

from __future__ import annotations

from math import prod

import pytest

from memfit.certify.tracing.world import fake_world
from memfit.parallelism.experts import is_expert
from memfit.parallelism.shards import held_shape
from memfit.parallelism.whole import local_part, own_part, shard_number
from memfit.records.model import Weight
from memfit.records.recipe import Parallel
from memfit.train.step.build import build_model
from tiny_models import CONFIGS, make_recipe

CONFIG = {**CONFIGS["qwen3_moe"], "num_hidden_layers": 1}
MESHES = (
    Parallel(dp_shard=2, ep=2), Parallel(dp_shard=4, ep=2), Parallel(dp_shard=8, ep=4),
    Parallel(dp_replicate=2, dp_shard=4, ep=4),
)  # fmt: skip


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_the_ranks_of_a_copy_hold_each_expert_once_in_shards_with_numbers_of_their_own(parallel):
    recipe = make_recipe("qwen3_moe", config=CONFIG, parallel=parallel)
    held: dict[str, set] = {}
    numbers: dict[str, list[int]] = {}
    for rank in range(parallel.world):
        with fake_world(parallel, rank, "cpu", lambda _: None, lambda *_: None):
            model = build_model(recipe, "cpu")
            for name, p in model.named_parameters():
                if not is_expert(name):
                    continue
                part = own_part(p)
                shape = tuple(one.stop - one.start for one in part)
                assert tuple(local_part(p).shape) == shape
                declared = weight(name, tuple(p.shape))
                assert held_shape(declared, parallel, rank) == shape
                held.setdefault(name, set()).update(range(part[0].start, part[0].stop))
                numbers.setdefault(name, []).append(shard_number(p))
                assert prod(shape) * parallel.dp_shard == p.numel()
    assert held
    for name, experts in held.items():
        assert experts == set(range(CONFIG["num_experts"]))
        assert numbers[name] == [*range(parallel.dp_shard)] * parallel.dp_replicate


def weight(name, shape):
    return Weight(name=name, shape=shape, part="block", layer=0)


def test_shards_of_a_product_that_ranks_share_have_numbers_of_their_own():
    """Or states in 8 bits, which are saved by number, would be saved over one another."""
    parallel = Parallel(dp_shard=2, tp=2, sequence_parallel=True)
    recipe = make_recipe(config={**CONFIGS["llama"], "vocab_size": 98}, parallel=parallel)
    found = []
    for rank in range(4):
        with fake_world(parallel, rank, "cpu", lambda _: None, lambda *_: None):
            model = build_model(recipe, "cpu")
            found.append(shard_number(model.get_parameter("model.layers.0.mlp.up_proj.weight")))
    assert sorted(found) == [0, 1, 2, 3]
