"""The tokens of each row cut among `cp` ranks (ring attention, Liu et al. 2310.01889): which tokens
a rank has, and where that can be.

What each rank attends to, and how keys and values go round, is torch's (`train.ring`); this file
only says which tokens are whose: those of torch's load balancing, a part of the row's beginning
and the part as far from its end, so that causal attention is as much work for every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from typing import TYPE_CHECKING, Any

from memfit.families import families_that, find_family
from memfit.parallelism.tensor import OTHERWISE
from memfit.records.model import Architecture
from memfit.records.recipe import Parallel, Recipe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

KERNELS = ("flash",)  # that return what partial results are joined by, on every device
PARTS = 2  # of a row for each rank: one from its beginning, one from its end


def row_multiple(parallel: Parallel) -> int:
    """What the tokens of a row are a multiple of, so that every rank has as many."""
    if parallel.cp == 1:
        return parallel.tp
    return parallel.cp * lcm(PARTS, parallel.tp)


def own_parts(tokens: int, parallel: Parallel, rank: int) -> tuple[range, range]:
    """Return this rank's two ranges of a row's tokens; `row_multiple` divides `tokens`."""
    each, place = tokens // (PARTS * parallel.cp), parallel.place(rank)
    last = PARTS * parallel.cp - 1 - place
    return range(place * each, (place + 1) * each), range(last * each, (last + 1) * each)


def why_no_shared_rows(recipe: Recipe, name: str, a: Architecture) -> tuple[str, str] | None:
    """Why ranks cannot share the tokens of rows, and what to use; None where they can."""
    cp = recipe.parallel.cp
    if cp == 1:
        return None
    if not find_family(a.family).shares_products:
        known = ", ".join(families_that("shares_products"))
        return (
            f"`parallel.cp: {cp}` is written for blocks of {known}, and those of"
            f" `{name}` are `{a.family}`",
            f"use {OTHERWISE}",
        )
    for found, instead in _refused(recipe, name, a):
        return f"{found}, and `parallel.cp: {cp}` is asked for", instead
    multiple = row_multiple(recipe.parallel)
    if recipe.sequence_length % multiple:
        whole = -(-recipe.sequence_length // multiple) * multiple
        return (
            f"`parallel.cp: {cp}` cuts rows into parts of a {multiple}th, which"
            f" `sequence_length: {recipe.sequence_length}` does not divide into",
            f"use `task.sequence_length: {whole}`",
        )
    return None


def _refused(recipe: Recipe, name: str, a: Architecture) -> Iterator[tuple[str, str]]:
    """What of a recipe is not built for such ranks, and what to use instead."""
    if recipe.packing:
        problem = "`packing: true` keeps documents apart, and torch's ring attends to whole rows"
        yield problem, "use `task.packing: false`"
    if recipe.attention not in KERNELS:
        problem = f"`attention: {recipe.attention}` is not held against one process in torch's ring"
        yield problem, f"use `attention: {KERNELS[0]}`"
    if a.windowed(recipe.sequence_length):
        problem = (
            f"`{name}` attends within windows of {a.sliding_window} tokens, torch's ring to all"
        )
        yield problem, f"use {OTHERWISE}"
    if a.head_dim % 8:
        problem = f"the flash kernel takes heads of a multiple of 8, and `{name}` has {a.head_dim}"
        yield problem, f"use {OTHERWISE}"
    if recipe.compile != "none":
        problem = f"`compile: {recipe.compile}` keeps more of torch's ring than is predicted"
        yield problem, "use `compile: none`"
    if recipe.offload == "activations":
        yield "`offload: activations` is not built for such ranks", "use `offload: none`"


def share_tokens(blocks: Iterable[nn.Module], parallel: Parallel, device_type: str) -> None:
    """Tell the attention of these blocks with which ranks it attends to whole rows, in place.

    A process group of `parallel.world` ranks must exist; every rank calls it.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils._python_dispatch import _disable_current_modes

    sizes = (parallel.pp * parallel.dp, parallel.cp, parallel.tp)
    with _disable_current_modes():  # a mesh is a table of real integers
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("rows", "cp", "tp"))
        group: Any = mesh["cp"].get_group()
    for block in blocks:
        block.get_submodule("self_attn").ring = group
