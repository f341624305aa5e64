"""Counting what a step, and a decoding step, launches: torch's dispatcher is the oracle."""

from unittest.mock import patch

import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.families import read_model
from memfit.families.capabilities.lean import find_lean
from memfit.train.generation import products
from memfit.train.generation.loop import generate_batch
from memfit.train.generation.settings import Settings
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights
from memfit.train.step.step import Batch, autocast, step
from tiny_models import RECURRENT, make_built, make_recipe

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers")
# how weights are stored and multiplied -> the precision of a whole training that does so
WAYS = {"cast": "bf16-mixed", "half": "bf16", "fp32": "fp32"}


class Counted(TorchDispatchMode):
    """Operations that are no views."""

    number = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        of = operator._schema.returns
        self.number += not any(r.alias_info and not r.alias_info.is_write for r in of)
        return operator(*args, **(kwargs or {}))


def deepen(recipe, more):
    """The recipe with so many more blocks, of the kinds that its own have in turn."""
    config = recipe.model.config
    depth = next(key for key in DEPTHS if key in config)
    layers = config[depth] + more
    changed = {depth: layers}
    if kinds := config.get("layer_types"):
        changed["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    return replace(recipe, model=replace(recipe.model, config={**config, **changed}))


def count_step(recipe):
    """Operations of one step."""
    built = make_built(recipe)
    ids = torch.zeros(1, recipe.sequence_length, dtype=torch.int64)
    batches = [Batch(ids, ids) for _ in range(recipe.accumulation)]
    with Counted() as counted:
        step(built, batches, ids.numel() * len(batches))
    return counted.number


def count_of_block(recipe):
    """Operations of one more block in one more micro-batch, whose gradients are added up."""
    found = {}
    for more in (1, 2):
        deep = replace(deepen(recipe, more), micro_batch=1)
        if recipe.recompute_blocks:
            deep = replace(deep, recompute_blocks=read_model(deep.model).architecture.layers)
        for times in (2, 3):
            found[more, times] = count_step(replace(deep, accumulation=times))
    return found[2, 3] - found[2, 2] - found[1, 3] + found[1, 2]


def count_decode(recipe):
    """Operations of one block in one decoding step of memfit's own loop, and of the rest of it."""
    # a CPU's products of fp32 weights are oneDNN's; a GPU launches what is counted
    with patch.object(products, "_is_available", lambda: False):
        first, last = (_count_decoding(deepen(recipe, n)) for n in (1, 2))
    depth = read_model(deepen(recipe, 1).model).architecture.layers
    return last - first, first - depth * (last - first)


def _count_decoding(recipe):
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    found = []
    for tokens in (3, 4):
        settings = Settings(max_new_tokens=tokens, rows=2, max_prompt=4, reach=8)
        with autocast(built), Counted() as counted:
            generate_batch(model, [[1, 2, 3], [4, 5, 6]], settings)
        found.append(counted.number)
    return found[1] - found[0]


def make_counted(family, way):
    """The recipe whose operations stand for a family: whole training with its lean operations."""
    recipe = make_recipe(family, precision=WAYS[way])
    lean = find_lean(read_model(recipe.model).architecture)
    return replace(recipe, base_format="bf16", lean=lean)


def count_family(family, way):
    """(operations of a step's block, of a decoding step's) of a family, as its table has them."""
    recipe = make_counted(family, way)
    if family in RECURRENT:  # blocks of attention alone: counted_linear.py counts the others
        config = {**recipe.model.config, "full_attention_interval": 1}
        recipe = replace(recipe, model=replace(recipe.model, config=config))
    return count_of_block(recipe), count_decode(recipe)[0]
