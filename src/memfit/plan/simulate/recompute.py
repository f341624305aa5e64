"""How many blocks backward recomputes, whole or in part, and in which order a search tries them.

The first blocks are recomputed whole, the next ones selectively (all but products with weights
and fused attention, train/step/recompute.py), the last ones not at all: backward reaches the first
ones when the others' activations are gone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from memfit.families.capabilities.added import can_select
from memfit.records.model import Architecture
from memfit.records.recipe import Recipe
from memfit.records.request import RecomputeBlocks


class RecomputedBlocks(NamedTuple):
    """The number of blocks of each kind; the others are not recomputed."""

    full: int
    selective: int

    @property
    def knobs(self) -> dict[str, int]:
        """Of a recipe."""
        return {"recompute_blocks": self.full, "selective_blocks": self.selective}

    @classmethod
    def of(cls, recipe: Recipe) -> RecomputedBlocks:
        """Of a recipe of memfit's own step."""
        return cls(recipe.recompute_blocks, recipe.selective_blocks)


def find_recompute(stated: Any, layers: int) -> RecomputedBlocks:
    """What a request states; `auto` begins with none."""
    if isinstance(stated, RecomputeBlocks):
        return RecomputedBlocks(stated.blocks, stated.selective)
    return {"full": RecomputedBlocks(layers, 0), "selective": RecomputedBlocks(0, layers)}.get(
        stated, RecomputedBlocks(0, 0)
    )


def state_recompute(recompute: RecomputedBlocks, layers: int) -> Any:
    """The same in a request's words."""
    word = {(0, 0): "none", (layers, 0): "full", (0, layers): "selective"}.get(recompute)
    if word is not None:
        return word
    stated = {"blocks": recompute.full, "selective": recompute.selective}
    return {key: n for key, n in stated.items() if n}


def describe_recompute(recompute: RecomputedBlocks, layers: int) -> str:
    """For a row of a table: `none`, `full`, `6/44 blocks`, `30/44 selective`, both."""
    stated_blocks = state_recompute(recompute, layers)
    if isinstance(stated_blocks, str):
        return stated_blocks
    parts = [f"{recompute.full}/{layers} blocks"] if recompute.full else []
    parts += [f"{recompute.selective}/{layers} selective"] if recompute.selective else []
    return " + ".join(parts)


def ladder(stated: Any, a: Architecture, recipe: Recipe) -> list[list[RecomputedBlocks]]:
    """Ways to recompute more and more, each step of which needs less memory and takes longer.

    Where seconds and bytes grow evenly with blocks, the least seconds for any number of bytes lie
    on one of two: whole blocks alone; or ever more selective ones, and from all of them on ever
    more whole ones.
    """
    layers = a.layers
    if stated != "auto":
        return [[find_recompute(stated, layers)]]
    whole = [RecomputedBlocks(n, 0) for n in range(layers + 1)]
    if not can_select(a, recipe):
        return [whole]
    part = [RecomputedBlocks(0, n) for n in range(layers + 1)]
    return [[*part, *(RecomputedBlocks(n, layers - n) for n in range(1, layers + 1))], whole]
