"""Answers that are compared on many ranks: what those that share a row's tokens, and those with
rows of their own, have together.

Ranks that share rows have the same loss; the first of them says it, and its sums, for all. Each has
the gradient of its own tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memfit.records.recipe import Recipe
from memfit.train.model.hugging_face import base_model

c10d: Any = dist  # whose names its types leave out
ATTRIBUTE = "held_groups"  # of Hugging Face's module: a `Together`


class Together(NamedTuple):
    """The ranks that this one's answers are compared with."""

    tokens: dist.ProcessGroup | None = None  # those that have the other tokens of its rows
    rows: dist.ProcessGroup | None = None  # those that have the other rows of the micro-batch
    says: bool = True  # whether this rank says what those of `tokens` have computed alike

    def sum_tokens(self, x: Tensor) -> Tensor:
        """Sums over a row's tokens, of those on this rank -> of all; the gradient is of its own."""
        if self.tokens is None:
            return x
        return cast(Tensor, _SumOfParts.apply(x, self.tokens))  # type: ignore[no-untyped-call]

    def count_each(self, learned: Tensor) -> Tensor:
        """(rows, tokens) bool -> (rows,) int64: how many of a row's tokens are learned."""
        found = learned.sum(1)
        if self.tokens is not None:
            c10d.all_reduce(found, group=self.tokens)
        return found

    def any(self, learned: Tensor) -> Tensor:
        """(rows, tokens) bool -> (rows,) bool: whether any of a row's tokens is learned."""
        return learned.any(1) if self.tokens is None else self.count_each(learned) > 0

    def number(self, learned: Tensor) -> Tensor:
        """How many rows have a token that is learned, 0-dim int64; 0 of a rank that says nothing"""
        found = self.any(learned).sum()
        return found if self.says else found.zero_()

    def mean(self, values: Tensor, counted: Tensor) -> Tensor:
        """(rows,) of both -> 0-dim: the mean of the values that count, on all ranks."""
        total, number = (values * counted).sum(), counted.sum()
        if self.rows is None:
            return total.div_(number.clamp_(min=1))
        both = torch.stack((total, number))
        c10d.all_reduce(both, group=self.rows)
        return both[0] / both[1].clamp_(min=1)


ALONE = Together()


class _SumOfParts(torch.autograd.Function):
    """A sum over ranks, each of which makes the same of it: a part's slope is the sum's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out = x.clone()
        c10d.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return outer[0], None


def keep_groups(model: nn.Module, recipe: Recipe, device_type: str) -> None:
    """Note with which ranks a model's answers are compared; every rank calls it."""
    from torch.distributed.device_mesh import init_device_mesh

    parallel, rank = recipe.parallel, dist.get_rank()
    shares_rows = recipe.mismatches and parallel.dp > 1
    if parallel.cp == 1 and not shares_rows:
        return
    sizes = (parallel.pp, parallel.dp, parallel.cp, parallel.tp)
    with _disable_current_modes():  # a mesh is a table of real integers
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "rows", "tokens", "tp"))
        found = Together(
            tokens=mesh["tokens"].get_group() if parallel.cp > 1 else None,
            rows=mesh["rows"].get_group() if shares_rows else None,
            says=parallel.place(rank) == 0,
        )
    object.__setattr__(base_model(model), ATTRIBUTE, found)


def find_groups(model: nn.Module) -> Together:
    """With which ranks the answers of a model are compared."""
    found: Together = getattr(base_model(model), ATTRIBUTE, ALONE)
    return found
