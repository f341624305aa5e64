"""How a token of DeepSeek's chooses its experts, over `memfit.sizes`.

Written as Hugging Face's modules are; see `families/forward.py`.
"""

from __future__ import annotations

from memfit import sizes
from memfit.families._experts import Routed
from memfit.families.forward import Forward, Weights, module
from memfit.sizes import Tensor, routing


@module
def route_by_sigmoid(forward: Forward, weights: Weights, x: Tensor) -> Routed:
    """DeepSeek-V3's (2412.19437, section 2.1.2): sigmoid scores, corrected only for the choice.

    x: (batch, tokens, hidden). Returns (tokens, experts), (tokens, per_token), (tokens, per_token).
    """
    experts = forward.architecture.experts
    x = sizes.view(x, -1, forward.architecture.hidden)
    logits = _logits(weights, x)
    scores = routing.sigmoid(logits)
    corrected = routing.correct(scores)
    best = routing.total(routing.top_k(_grouped(forward, corrected), 2)[0], -1)
    held, hidden = _hidden_groups(forward, best)
    corrected = sizes.fill_masked(corrected, hidden)
    del hidden
    chosen = routing.top_k(corrected, experts.per_token)[1]
    shares = routing.gather_last(scores, chosen)
    total = sizes.shift(routing.total_in_float(shares))
    shares = routing.divide_in_place(shares, total)
    shares = sizes.scale(shares)
    del held
    return logits, shares, chosen


@module
def route_by_softmax(forward: Forward, weights: Weights, x: Tensor) -> Routed:
    """DeepSeek-V2's (2405.04434, section 2.1.2): softmax scores, of the best groups if told."""
    experts = forward.architecture.experts
    x = sizes.view(x, -1, forward.architecture.hidden)
    logits = _logits(weights, x)
    scores = routing.softmax_in_float(logits)
    held: tuple[Tensor, ...] = ()
    if experts.groups > 1:
        best = sizes.view(routing.top_k(_grouped(forward, scores), 1)[0], -1, experts.groups)
        held, hidden = _hidden_groups(forward, best)
        scores = sizes.fill_masked(scores, hidden)
        del hidden
    shares, chosen = routing.top_k(scores, experts.per_token)
    shares = sizes.scale(shares)
    del held
    return logits, shares, chosen


def _logits(weights: Weights, x: Tensor) -> Tensor:
    """In fp32, unless autocast lowers the product again."""
    return sizes.linear(sizes.cast(x, "float32"), sizes.cast(weights["mlp.gate.weight"], "float32"))


def _grouped(forward: Forward, scores: Tensor) -> Tensor:
    """(tokens, experts) -> (tokens, groups, experts of a group)."""
    experts = forward.architecture.experts
    return sizes.view(scores, -1, experts.groups, experts.count // experts.groups)


def _hidden_groups(forward: Forward, best: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """What lives as long as the router's call, and which experts a token may not visit."""
    experts = forward.architecture.experts
    chosen = routing.top_k(best, experts.groups_per_token)[1]
    mask = sizes.empty(best.meter, best.shape, best.dtype)
    wide = mask.viewed((*mask.shape, experts.count // experts.groups), (*mask.strides, 0))
    wide = sizes.reshape(wide, -1, experts.count)
    hidden = routing.inverted(wide)
    return (best, chosen, mask, wide), hidden
