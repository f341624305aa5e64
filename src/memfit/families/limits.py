"""What a model's class excludes, whatever the device: one table for plan and trainer."""

from __future__ import annotations

from memfit.errors import InvalidRequest
from memfit.model import Architecture


def own_kernels(a: Architecture) -> tuple[str, ...]:
    """The only attention kernels that compute this model; empty where every kernel does."""
    return ("math",) if a.alibi or a.sinks else ()


def check_limits(name: str, a: Architecture, *, attention: str, packing: bool, loss: str) -> None:
    """Raise InvalidRequest where a recipe asks what the model's class cannot do exactly.

    attention and loss may be `auto`.
    """
    if a.alibi and attention not in ("auto", *own_kernels(a)):
        raise InvalidRequest(
            f"`attention: {attention}` knows no bias by distance, which `{name}` adds to its"
            " scores (alibi)",
            hint="use `attention: math`",
        )
    if a.sinks and attention not in ("auto", *own_kernels(a)):
        raise InvalidRequest(
            f"`attention: {attention}` knows no attention sinks, which `{name}` has",
            hint="use `attention: math`",
        )
    if a.alibi and packing:
        raise InvalidRequest(
            f"`packing: true`, but the class of `{name}` counts distances over the whole row and"
            " cannot keep documents apart",
            hint="use `packing: false`, which a request calls `task.packing`",
        )
    if a.head_bias and loss == "chunked":
        raise InvalidRequest(
            f"`loss: chunked` takes no bias in the head, and `{name}` has one (`lm_head.bias`)",
            hint="use `loss: plain`",
        )
