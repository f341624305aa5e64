"""Attention with sinks, written out: no kernel of torch's has them.

Each head has a learned logit that stands beside a row's scores: it takes a share of the softmax
and gives no value (gpt-oss, 2508.10925; Xiao et al. 2309.17453). Hugging Face's eager form takes
the softmax in the scores' dtype; here it is fp32, as in torch's own math kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, *, sinks: Tensor, scale: float, window: int | None
) -> Tensor:
    """(batch, heads, tokens, head_dim), key and value with kv_heads, sinks (heads) -> as query.

    Causal; `window`: how many tokens a row looks back over, itself included; None is all.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    rows, heads, tokens, keys = *query.shape[:3], key.shape[2]
    scores = torch.matmul(query * scale, key.transpose(2, 3))
    hidden = _hidden(tokens, keys, keys if window is None else window, query.device)
    scores = scores.masked_fill_(hidden, -torch.inf)
    column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(rows, heads, tokens, 1)
    joined = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(joined, dim=-1, dtype=torch.float32)[..., :-1].to(value.dtype)
    return torch.matmul(weights, value)


def _hidden(tokens: int, keys: int, window: int, device: torch.device) -> Tensor:
    """(tokens, keys): which keys a row does not see. The last row is of the last key."""
    ones = torch.ones(tokens, keys, dtype=torch.bool, device=device)
    after = ones.triu(keys - tokens + 1)
    before = ones.tril(keys - tokens - window)
    return after.logical_or_(before)
