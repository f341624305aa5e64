"""Experts in groups, of which a token may visit a few: DeepSeek-V2, DeepSeek-V3, GLM-4.5.

The routers are written over `memfit.meta` as Hugging Face's modules are; see `forward`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from memfit import meta
from memfit.core.errors import InvalidRequest
from memfit.families.shared.config import size, size_or, whole
from memfit.families.shared.experts import Routed, read_experts
from memfit.families.shared.forward import Forward, Weights, module
from memfit.meta import Tensor
from memfit.meta.elementwise import sigmoid
from memfit.meta.layers import routing
from memfit.records.model import Architecture, Experts, TensorSpec


def read_groups(config: Mapping[str, Any], defaults: Mapping[str, int]) -> Experts:
    """The experts, and the groups of them that a token may visit."""
    ffn = size(config, "moe_intermediate_size", defaults["moe_intermediate_size"])
    size(config, "num_experts_per_tok", defaults.get("num_experts_per_tok"))
    plain = read_experts(
        config,
        count=("n_routed_experts", defaults["n_routed_experts"]),
        per_token=("num_experts_per_tok", 8),
        ffn=("moe_intermediate_size", ffn),
        shared_ffn=size(config, "n_shared_experts", defaults["n_shared_experts"]) * ffn,
        dense_layers=whole(config, "first_k_dense_replace", defaults["first_k_dense_replace"]),
    )
    experts = replace(
        plain,
        groups=size_or(config, "n_group", defaults["n_group"]),
        groups_per_token=size_or(config, "topk_group", defaults["topk_group"]),
    )
    if experts.count % experts.groups:
        raise InvalidRequest(
            f"config.json: {experts.groups} groups (`n_group`) do not divide"
            f" {experts.count} experts"
        )
    if experts.groups_per_token > experts.groups:
        raise InvalidRequest(
            f"config.json: `topk_group: {experts.groups_per_token}` is more than"
            f" `n_group: {experts.groups}`"
        )
    reachable = experts.groups_per_token * experts.count // experts.groups
    if experts.per_token > reachable:
        raise InvalidRequest(
            f"config.json: `num_experts_per_tok: {experts.per_token}` is more than the"
            f" {reachable} experts of the groups that a token may visit"
        )
    return experts


def check_pairs(experts: Experts) -> None:
    """Raise InvalidRequest for groups of one expert, where a group is ranked by its two best."""
    if experts.count < 2 * experts.groups:
        raise InvalidRequest(
            f"config.json: {experts.groups} groups (`n_group`) of {experts.count} experts, but"
            " a group is ranked by its two best"
        )


def router_biases(a: Architecture) -> tuple[TensorSpec, ...]:
    """The corrections of the experts' scores, one vector a layer of experts."""
    layers = max(0, a.layers - a.experts.dense_layers)
    return (TensorSpec(shape=(a.experts.count,)),) * layers


@module
def route_by_sigmoid(forward: Forward, weights: Weights, x: Tensor) -> Routed:
    """DeepSeek-V3's (2412.19437, section 2.1.2): sigmoid scores, corrected only for the choice.

    x: (batch, tokens, hidden). Returns (tokens, experts), (tokens, per_token), (tokens, per_token).
    """
    experts = forward.architecture.experts
    x = meta.view(x, -1, forward.architecture.hidden)
    logits = _logits(weights, x)
    scores = sigmoid(logits)
    corrected = routing.correct(scores)
    best = routing.total(routing.top_k(_grouped(forward, corrected), 2)[0], -1)
    held, hidden = _hidden_groups(forward, best)
    corrected = meta.fill_masked(corrected, hidden)
    del hidden
    chosen = routing.top_k(corrected, experts.per_token)[1]
    shares = routing.gather_last(scores, chosen)
    total = meta.shift(routing.total_in_float(shares))
    shares = routing.divide_in_place(shares, total)
    shares = meta.scale(shares)
    del held
    return logits, shares, chosen


@module
def route_by_softmax(forward: Forward, weights: Weights, x: Tensor) -> Routed:
    """DeepSeek-V2's (2405.04434, section 2.1.2): softmax scores, with groups of the best groups."""
    experts = forward.architecture.experts
    x = meta.view(x, -1, forward.architecture.hidden)
    logits = _logits(weights, x)
    scores = routing.softmax_in_float(logits)
    held: tuple[Tensor, ...] = ()
    if experts.groups > 1:
        best = meta.view(routing.top_k(_grouped(forward, scores), 1)[0], -1, experts.groups)
        held, hidden = _hidden_groups(forward, best)
        scores = meta.fill_masked(scores, hidden)
        del hidden
    shares, chosen = routing.top_k(scores, experts.per_token)
    shares = meta.scale(shares)
    del held
    return logits, shares, chosen


def _logits(weights: Weights, x: Tensor) -> Tensor:
    """Return the router's logits in fp32, or in autocast's dtype under it."""
    return meta.linear(meta.cast(x, "float32"), meta.cast(weights["mlp.gate.weight"], "float32"))


def _grouped(forward: Forward, scores: Tensor) -> Tensor:
    """(tokens, experts) -> (tokens, groups, experts of a group)."""
    experts = forward.architecture.experts
    return meta.view(scores, -1, experts.groups, experts.count // experts.groups)


def _hidden_groups(forward: Forward, best: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """What lives as long as the router's call, and which experts a token may not visit."""
    experts = forward.architecture.experts
    chosen = routing.top_k(best, experts.groups_per_token)[1]
    mask = meta.empty(best.meter, best.shape, best.dtype)
    wide = mask.viewed((*mask.shape, experts.count // experts.groups), (*mask.strides, 0))
    wide = meta.reshape(wide, -1, experts.count)
    hidden = routing.inverted(wide)
    return (best, chosen, mask, wide), hidden
