"""Freezing: part of the weights is trained, the rest is only read."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import final

from msgspec.structs import replace

from memfit.adapters import adapters
from memfit.adapters.shared.in_place import InPlace, store_in_place
from memfit.adapters.shared.quantised_base import check_base
from memfit.core.errors import InvalidRequest, did_you_mean
from memfit.records.model import SCORE, Model, Weight
from memfit.records.recipe import Recipe


@final
class Freeze(InPlace):
    """Trains the last blocks, the final norm and the head, and whatever a pattern matches.

    A tied head is the embedding and stays frozen unless a pattern names it: training it would
    send the backward pass, and keep the activations, through every frozen block.
    """

    def adapt(self, model: Model, recipe: Recipe) -> Model:
        """See `Adapter.adapt`."""
        check_base(model, recipe.base_format, recipe.method)
        freeze, layers = recipe.freeze, model.architecture.layers
        if freeze.last_blocks > layers:
            raise InvalidRequest(
                f"`freeze.last_blocks: {freeze.last_blocks}`"
                f" but `{model.name}` has {layers} blocks",
                hint=f"use 1 to {layers}, or `method: full`",
            )
        if not freeze.last_blocks and not freeze.patterns:
            raise InvalidRequest(
                "`method: freeze` would train nothing:"
                " no `freeze.last_blocks`, no `freeze.patterns`",
                hint="add `freeze: {last_blocks: 2}`",
            )
        _check_patterns(model, freeze.patterns)
        first = layers - freeze.last_blocks
        rows = (
            replace(row, trainable=_is_trained(row, first, layers, freeze.patterns))
            for row in model.weights
        )
        return store_in_place(model, rows, recipe)


def _is_trained(row: Weight, first: int, layers: int, patterns: tuple[str, ...]) -> bool:
    at_the_end = first < layers and (row.layer >= first or row.part in ("norm", "head"))
    if row.name == SCORE:
        return True
    return at_the_end or any(fnmatchcase(row.name, pattern) for pattern in patterns)


def _check_patterns(model: Model, patterns: tuple[str, ...]) -> None:
    names = [row.name for row in model.weights]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = did_you_mean(pattern, names)
            raise InvalidRequest(
                f"`freeze.patterns`: `{pattern}` matches no weight of `{model.name}`",
                hint=f"did you mean {near}?" if near else f"names look like `{names[-1]}`",
            )


adapters.register("freeze")(Freeze())
