"""Tokens on their way to the ranks of their experts and back (`parallel.ep`).

Rows of a rank's tokens are in the order of their experts, so the rows for each rank lie together:
one exchange (`all_to_all_single`) takes them there. What arrives lies rank after rank and is put
into the order of the experts here. How many rows come is known only when the numbers of rows have
been exchanged, which the host waits for once a layer; the second exchange goes the same way back.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

c10d: Any = dist  # whose names its types leave out
Sizes = tuple[list[int], list[int]]  # rows sent to each rank, rows received from each


class Deal(NamedTuple):
    """Where the rows of one call go."""

    sizes: Sizes
    order: Tensor  # (received,) which arrived row stands where, in the order of the experts
    back: Tensor  # the inverse
    ends: Tensor  # (own experts,) int32: where the rows of each end
    numbers: Tensor  # (received,) the rank's own number of each row's expert


class Received:
    """How uneven the routing was: the most rows that a rank received in a call over the most that
    it sent in one, which is what an even routing would bring."""

    def __init__(self) -> None:
        self._came = self._sent = 0

    def note(self, came: int, sent: int) -> None:
        """Of one layer's call."""
        self._came, self._sent = max(self._came, came), max(self._sent, sent)

    def take(self) -> float:
        """The share since the last call; 0 where nothing was sent."""
        found = self._came / max(self._sent, 1)
        self._came = self._sent = 0
        return found


received = Received()  # of this process, which is one rank


def deal_rows(rows: int, ends: Tensor, group: Any) -> Deal:
    """Tell the other ranks how many of this rank's rows come.

    ends: (experts,) int32, where those of each expert end.
    """
    ranks = group.size()
    own = len(ends) // ranks
    counts = ends.clone()
    counts[1:] -= ends[:-1]
    arrived = torch.empty_like(counts)
    c10d.all_to_all_single(arrived, counts, group=group)
    sizes = read_sizes(rows, counts, arrived, ranks)
    experts = torch.arange(own, device=ends.device).repeat(ranks)
    each = torch.repeat_interleave(experts, arrived, output_size=sum(sizes[1]))
    numbers, order = torch.sort(each)
    back = torch.empty_like(order)
    back.scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    firsts = torch.arange(own, device=ends.device)
    own_ends = torch.searchsorted(numbers, firsts, right=True, out_int32=True)
    return Deal(sizes, order, back, own_ends, numbers)


def read_sizes(rows: int, counts: Tensor, arrived: Tensor, ranks: int) -> Sizes:
    """Rows for each rank and from each. A trace, which has no values, takes them as the recipe
    says instead (`certify.tracing.world`)."""
    both = torch.stack((counts, arrived)).view(2, ranks, -1).sum(-1)
    sent, came = both.tolist()
    received.note(sum(came), rows)
    return sent, came


def exchange(rows: Tensor, sizes: Sizes, group: Any) -> Tensor:
    """(sent, width) -> (received, width); its derivative goes the other way."""
    return cast(Tensor, _Exchange.apply(rows, sizes, group))  # type: ignore[no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: Sizes, group: Any) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _exchange(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        sent, came = ctx.sizes
        return _exchange(outer[0].contiguous(), (came, sent), ctx.group), None, None


def _exchange(rows: Tensor, sizes: Sizes, group: Any) -> Tensor:
    sent, came = sizes
    out = rows.new_empty((sum(came), *rows.shape[1:]))
    c10d.all_to_all_single(out, rows, came, sent, group=group)
    return out
