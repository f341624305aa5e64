"""What products of blocks with code of their own (fp8, rounded weights) have in common."""

from __future__ import annotations

from collections.abc import Iterable

from memfit.families import find_family
from memfit.records.model import Model, Weight
from memfit.records.request import RecomputeBlocks, Request


def is_of_block(weight: Weight) -> bool:
    """Whether a weight is a matrix of a block: embeddings and the head are none."""
    return weight.part == "block" and len(weight.shape) == 2


def find_beside(request: Request) -> list[str]:
    """Operations of blocks that a request asks for and that have products of their own."""
    recompute, beside = request.recompute, []
    if request.lean not in ("auto", "none", ()):
        beside.append(f"lean: {request.lean}")
    if recompute == "selective" or (isinstance(recompute, RecomputeBlocks) and recompute.selective):
        beside.append("recompute: selective")
    return beside


def find_clash(model: Model, beside: Iterable[str]) -> str:
    """What of a model, or beside it, leaves no plain products to replace; "" where nothing does."""
    if model.architecture.experts.count:
        return f"the experts of `{model.name}`, which are one grouped product"
    if not find_family(model.architecture.family).plain_linears:
        return f"the projections of `{model.name}`, which are no `nn.Linear`"
    if operations := ", ".join(beside):
        return f"`{operations}`, which has products of its own"
    return ""
