"""Products of a block whose results a selective recomputation does not keep.

One is the last, where nothing but the residual stream reads it: recomputation stops before it, as
no derivative reads its result. The others are adapters': their results are as wide as those of
the base, and cost a hundredth of them to recompute.
"""

from __future__ import annotations

from collections.abc import Iterable

from memfit.base_formats import find_base_format
from memfit.core.errors import InvalidRequest
from memfit.families import find_family
from memfit.records.model import Architecture
from memfit.records.recipe import Recipe

ADAPTERS = (".lora_A.", ".lora_B.")  # in the names of their weights


def only_added(a: Architecture, matrices: Iterable[str]) -> str:
    """The module in the block that runs last and is only added; "" where there is none.

    matrices: names inside the block of its weights of two dimensions, in the order of the class.
    A router or a gate that comes last multiplies what its experts make, and an adapter follows
    its base, which runs first: "" then.
    """
    own = [n for n in matrices if "lora_" not in n and not n.endswith("_bias")]
    last = own[-1].removesuffix(".weight")
    if find_family(a.family).norm_after_blocks or last.endswith(("gate", "router", ".base_layer")):
        return ""
    return last


def can_select(a: Architecture, recipe: Recipe) -> bool:
    """Whether a selective recomputation knows all products of such blocks."""
    return not _why_unsupported("", a, recipe)


def check_selective(name: str, a: Architecture, recipe: Recipe) -> None:
    """Raise InvalidRequest where products are not torch's own, or are written into."""
    if unsupported := _why_unsupported(name, a, recipe):
        raise InvalidRequest(
            f"`recompute: selective` keeps products, and {unsupported[0]}",
            hint=f"use {unsupported[1]}",
        )


def _why_unsupported(name: str, a: Architecture, recipe: Recipe) -> tuple[str, str] | None:
    """Why it does not know them, and what to use instead."""
    blocks = "`recompute: full`, or `{blocks: n}`"
    if a.sinks and a.experts.count:
        return f"the experts of `{name}` add their bias into them", blocks
    if recipe.lean:
        return f"`lean: {', '.join(recipe.lean)}` keeps no more than that already", "`lean: none`"
    if recipe.parallel.ep > 1 and a.experts.shared_ffn:
        gathered = "the experts of `parallel.ep` would be gathered again"
        return f"beside the shared expert of `{name}` {gathered}", blocks
    if recipe.parallel.cp > 1:
        return "torch's ring calls its kernels within one operation", blocks
    if recipe.parallel.tp > 1:
        return f"those that {recipe.parallel.tp} ranks share are DTensor's", blocks
    if recipe.precision == "fp8-mixed":
        return "those of `precision: fp8-mixed` are torchao's", blocks
    if recipe.qat:
        return f"those of `qat: {recipe.qat}` round their weights each time", blocks
    if recipe.coding:
        base = find_base_format(recipe.base_format)
        return f"those of `base_format: {base.name}` are {base.library}'", blocks
    if recipe.method == "dora":
        return "`method: dora` multiplies its adapters to measure weights", blocks
    return None
