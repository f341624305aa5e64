"""Runs of alike blocks, and the same model with runs of another length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.core.errors import NotCertified
from memfit.families import read_model
from memfit.records.model import Architecture
from memfit.records.recipe import Recipe

DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers")  # of config.json
DENSE_KEY = "first_k_dense_replace"  # the first layers that have no experts


def find_runs(recipe: Recipe) -> tuple[int, ...]:
    """How many successive blocks are alike: in weights, in kind, and in being recomputed.

    Raises NotCertified when config.json or the recipe treats single blocks by their number.
    """
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    layers = model.architecture.layers
    kind = model.architecture.kind
    full, part = recipe.recompute_blocks, recipe.recompute_blocks + recipe.selective_blocks
    kinds: list[list[Any]] = [[i < full, i < part, kind(i)] for i in range(layers)]
    for row in model.weights:
        if row.layer >= 0:
            name = row.name.replace(f".{row.layer}.", ".*.", 1)
            kinds[row.layer].append((name, row.shape, row.dtype, row.trainable))
    runs = tuple(len(list(group)) for _, group in groupby(kinds))
    in_order = _run_lengths(model.architecture, recipe)
    if runs != in_order:
        raise NotCertified(
            f"the blocks of `{model.name}` are not alike ({len(runs)} kinds in a row), so its"
            " depth cannot be extrapolated",
            hint="certify the recipe in full",
        )
    return runs


def _run_lengths(a: Architecture, recipe: Recipe) -> tuple[int, ...]:
    """What first blocks without experts, recomputing the first ones and training the last ones

    alone would make.
    """
    first_trained = a.layers - recipe.freeze.last_blocks if recipe.method == "freeze" else 0
    full, part = recipe.recompute_blocks, recipe.recompute_blocks + recipe.selective_blocks
    inside = (a.experts.dense_layers, full, part, max(first_trained, 0))
    cuts = sorted({0, a.layers, *(min(cut, a.layers) for cut in inside)})
    return tuple(after - before for before, after in pairwise(cuts))


def with_runs(recipe: Recipe, lengths: Sequence[int]) -> Recipe:
    """The recipe of a model whose runs of alike blocks have these lengths."""
    runs = find_runs(recipe)
    before, after = [0, *accumulate(runs)], [0, *accumulate(lengths)]
    moved = dict(zip(before, after, strict=True))
    layers = before[-1]
    config = _with_layers(recipe.model.config, layers, after[-1])
    dense = read_model(recipe.model).architecture.experts.dense_layers
    if dense:
        config[DENSE_KEY] = moved[min(dense, layers)]
    full = min(recipe.recompute_blocks, layers)
    part = min(full + recipe.selective_blocks, layers)
    freeze = recipe.freeze
    if recipe.method == "freeze":
        first = moved[max(layers - freeze.last_blocks, 0)]
        freeze = replace(freeze, last_blocks=after[-1] - first)
    return replace(
        recipe,
        model=replace(recipe.model, config=config),
        recompute_blocks=moved[full],
        selective_blocks=moved[part] - moved[full],
        freeze=freeze,
    )


def _with_layers(config: Mapping[str, Any], layers: int, now: int) -> dict[str, Any]:
    """config.json with another depth; lists with one entry a block must hold one value."""
    changed = dict(config)
    for key, value in config.items():
        if isinstance(value, list) and len(value) == layers:
            if any(entry != value[0] for entry in value):
                raise NotCertified(
                    f"`{key}` of config.json differs from block to block, so the depth cannot be"
                    " extrapolated",
                    hint="certify the recipe in full",
                )
            changed[key] = value[:1] * now
    for key in DEPTH_KEYS:
        if key in config:
            changed[key] = now
    return changed
