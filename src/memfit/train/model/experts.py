"""The routed experts of a mixture: grouped products over tokens in the order of their experts.

Hugging Face's models look their experts up by name, as they do attention. Its `eager` form loops
over the experts that were chosen: how much it holds depends on the routing, and nothing without
data can run it. Its `grouped_mm` form holds the same whatever the routing, but multiplies in the
weights' dtype under autocast, and asks the device which kernels it has. The form here holds what
`grouped_mm` holds, and its products are autocast as every other product is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import grouped_mm

from memfit.core.libraries import quiet_import
from memfit.train.distributed.dealt import deal_rows, exchange
from memfit.train.model.quantised import QuantisedExperts

with quiet_import():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "memfit_grouped"


def register_experts() -> str:
    """Make `run_experts` known to Hugging Face; returns the name to build the model with."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, run_experts)
    return NAME


def run_experts(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """What Hugging Face's experts compute: (tokens, hidden) -> the same.

    chosen: (tokens, per_token) numbers of experts; shares: what each of them counts for. No size
    depends on their values: an expert that nobody chose has a group of no rows, and one that all
    chose has all of them.
    """
    per_token = chosen.shape[-1]
    ordered, order = torch.sort(chosen.flatten())
    back = torch.empty_like(order)
    back.scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    numbers = torch.arange(experts.num_experts, device=order.device)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    x = _Spread.apply(hidden, order, back, per_token)  # type: ignore[no-untyped-call]
    group = getattr(experts, "group", None)  # of the ranks that the experts are dealt to
    deal = None if group is None else deal_rows(len(order), ends, group)
    if deal is not None:
        ends, ordered = deal.ends, deal.numbers
        x = exchange(x, deal.sizes, group)
        x = _Restore.apply(x, deal.back, deal.order)  # type: ignore[no-untyped-call]
    x = _product(experts, "gate_up_proj", x, ends, ordered)
    x = experts._apply_gate(x)
    x = _product(experts, "down_proj", x, ends, ordered)
    if deal is not None:
        x = _Restore.apply(x, deal.order, deal.back)  # type: ignore[no-untyped-call]
        x = exchange(x, deal.sizes[::-1], group)
    x = _Restore.apply(x, order, back)  # type: ignore[no-untyped-call]
    x = x.view(-1, per_token, hidden.shape[-1]) * shares.unsqueeze(-1)
    out: Tensor = x.sum(dim=1, dtype=x.dtype).to(hidden.dtype)
    return out


def _product(experts: Any, name: str, x: Tensor, ends: Tensor, ordered: Tensor) -> Tensor:
    """Each group of rows with its expert's matrix: (rows, columns) -> (rows, others)."""
    weight, transposed = getattr(experts, name), experts.is_transposed
    if isinstance(weight, QuantisedExperts):
        product = weight.multiply(x, ends, transposed=transposed)
    else:
        product = _multiply(x, _own(weight) if transposed else _own(weight).mT, ends)
    if not experts.has_bias:
        return product
    return product.add_(_own(getattr(experts, f"{name}_bias"))[ordered])


def _multiply(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    product: Tensor = grouped_mm(x.to(dtype), weight.to(dtype), offs=ends)
    return product


def _own(weight: Tensor) -> Tensor:
    """What this rank has of all experts, where they are dealt to ranks."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class _Spread(torch.autograd.Function):
    """Each token once for each of its experts, in the order of the experts: (rows, hidden).

    The derivatives are written out, here and in `_Restore`, because those of `x[order]` add into
    zeros of the whole, and hold twice as much where tensors are watched as where they are not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor, per_token: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.per_token = per_token
        return x[order // per_token]

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        rows = outer[0][back].view(-1, ctx.per_token, outer[0].shape[-1])
        return rows.sum(dim=1), None, None, None


class _Restore(torch.autograd.Function):
    """Return the rows in the order of the tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[back]

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (order,) = ctx.saved_tensors
        return outer[0][order], None, None
