"""The lean operations of a request's blocks (`memfit.train.lean`)."""

from __future__ import annotations

from memfit.families.capabilities.lean import find_lean
from memfit.records.model import Architecture
from memfit.records.recipe import LEAN, Lean
from memfit.records.request import RecomputeBlocks, Request


def requested_lean(request: Request) -> tuple[Lean, ...]:
    """The lean operations that a request names; none where it leaves them to memfit."""
    stated = request.lean
    if isinstance(stated, tuple):
        return tuple(operation for operation in LEAN if operation in stated)
    return LEAN if stated == "all" else ()


def choose_lean(request: Request, a: Architecture) -> tuple[Lean, ...]:
    """`auto`: all that the family has; none beside blocks that are recomputed selectively, or whose
    products in FP8, or of rounded weights, keep what they keep; nor where ranks share products.
    """
    recompute = request.recompute
    selective = (
        recompute.selective if isinstance(recompute, RecomputeBlocks) else recompute == "selective"
    )
    if request.lean == "auto":
        own = request.precision == "fp8-mixed" or request.qat != "none"
        own = own or (request.parallel != "auto" and request.parallel.tp > 1)
        return () if selective or own else find_lean(a)
    return requested_lean(request)
