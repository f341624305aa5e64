"""Causal attention of ranks that share the tokens of a row, each with its own of them.

torch's ring does it: keys and values of all ranks are gathered, one kernel call for each rank's of
them, the results joined by their log-sums (torch.distributed.tensor.experimental, a prototype in
torch 2.11 to 2.13). Its public context hands it over by DTensor, which has rows for CUDA's kernels
alone: on a CPU it ends with an operator that has no sharding strategy. So what it hands over to is
called here with the kernel of the device, and the same code runs, is proven and traced on both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.tensor.experimental._context_parallel._attention as torch_ring
from torch import Tensor

aten = torch.ops.aten
TOKENS = 2  # the dimension of (batch, heads, tokens, head_dim)


def attend_in_ring(
    query: Tensor, key: Tensor, value: Tensor, group: Any, scale: float | None
) -> Tensor:
    """(batch, heads, own tokens, head_dim) -> the same; key and value may have fewer heads.

    group: of the ranks that share rows, whose tokens are `parallelism.context.own_parts`.
    """
    out: Tensor = _Ring.apply(query, key, value, group, scale)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    """torch's ring, forward and backward, by the flash kernel of the device."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Any, scale: float | None
    ) -> Tensor:
        """See `attend_in_ring`."""
        kernel = aten._scaled_dot_product_flash_attention
        if query.device.type == "cpu":
            kernel = aten._scaled_dot_product_flash_attention_for_cpu
        torch_ring._cp_options.enable_load_balance = True
        out, sums, *rest = torch_ring._templated_ring_attention(
            group, TOKENS, kernel.default, query, key, value,
            is_causal=True, dropout_p=0.0, scale=scale,
        )  # fmt: skip
        ctx.group, ctx.scale, ctx.rest = group, scale, rest[:4]
        ctx.save_for_backward(query, key, value, out, sums, *rest[4:6])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of query, key and value."""
        query, key, value, out, sums, *random = ctx.saved_tensors
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        options: dict[str, Any] = {"dropout_p": 0.0, "scale": ctx.scale}
        if random:  # CUDA's
            kernel = aten._scaled_dot_product_flash_attention_backward
            names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
            options |= dict(zip(names, ctx.rest, strict=True))
            options |= dict(zip(("philox_seed", "philox_offset"), random, strict=True))
        torch_ring._cp_options.enable_load_balance = True
        of_query, of_key, of_value, *_ = torch_ring._templated_ring_attention_backward(
            ctx.group, TOKENS, kernel.default, grad, "grad_out", query, key, value, out, sums,
            is_causal=True, **options,
        )  # fmt: skip
        return of_query, of_key, of_value, None, None
