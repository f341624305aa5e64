"""Which families' blocks have lean operations (`memfit.train.lean`), and why others do not."""

from __future__ import annotations

from memfit.errors import InvalidRequest
from memfit.model import Architecture
from memfit.recipe import LEAN, Lean

# Their class's norm and gated feed-forward are Llama's; the tests prove it of each.
LEAN_FAMILIES = ("granite", "llama", "mistral", "qwen2", "qwen3", "smollm3")
ACTIVATION = "silu"  # the one whose derivative the lean product knows


def find_lean(a: Architecture) -> tuple[Lean, ...]:
    """The lean operations that blocks of this architecture can have."""
    if a.family not in LEAN_FAMILIES:
        return ()
    return LEAN if a.activation == ACTIVATION else ("norm",)


def check_lean(name: str, a: Architecture, asked: tuple[Lean, ...]) -> None:
    """Raise InvalidRequest where a recipe asks for an operation that the blocks do not have."""
    own = find_lean(a)
    lacking = [operation for operation in asked if operation not in own]
    if not lacking:
        return
    if not own:
        raise InvalidRequest(
            f"`lean: {', '.join(asked)}` is written for Llama's blocks, and those of `{name}`"
            f" (`{a.family}`) are others",
            hint="use `lean: none`; `recompute` keeps less in every family",
        )
    raise InvalidRequest(
        f"`lean: {lacking[0]}` knows `{ACTIVATION}`, and `{name}` has `{a.activation}`",
        hint=f"use `lean: [{', '.join(own)}]`",
    )
