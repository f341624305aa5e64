"""Which families' blocks have lean operations (`memfit.train.lean`), and why others do not."""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.families import find_family
from memfit.records.model import Architecture
from memfit.records.recipe import LEAN, Lean

# Those whose derivative reads their input; relu's reads its result, which a product keeps anyway.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast")


def find_lean(a: Architecture) -> tuple[Lean, ...]:
    """The lean operations that blocks of this architecture can have."""
    if not find_family(a.family).lean or a.norm_after:
        return ()
    return LEAN if a.activation in ACTIVATIONS else ("norm",)


def check_lean(name: str, a: Architecture, operations: tuple[Lean, ...]) -> None:
    """Raise InvalidRequest where a recipe asks for an operation that the blocks do not have."""
    own = find_lean(a)
    unsupported = [operation for operation in operations if operation not in own]
    if not unsupported:
        return
    if not own:
        raise InvalidRequest(
            f"`lean: {', '.join(operations)}` is written for blocks of one feed-forward behind a"
            f" norm, and those of `{name}` (`{a.family}`) are others",
            hint="use `lean: none`; `recompute` keeps less in every family",
        )
    raise InvalidRequest(
        f"`lean: {unsupported[0]}` makes an activation again from its input, and that of `{name}`,"
        f" `{a.activation}`, keeps its result alone",
        hint=f"use `lean: [{', '.join(own)}]`",
    )
