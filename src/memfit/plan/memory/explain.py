"""Why an entry of the predicted ledger is as large as it is: the formula, with its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from memfit.adapters.shared.reference_copy import REFERENCE, copied_rows
from memfit.adapters.shared.value_model import VALUE
from memfit.core.units import show_bytes, show_count
from memfit.records.ledger import Kind
from memfit.records.model import DTYPE_BYTES, Model, Weight
from memfit.records.recipe import Recipe


def explain(kind: Kind, owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    """One phrase for an entry; model: after the adapter."""
    if kind in _BY_KIND:
        return _BY_KIND[kind](owner, nbytes, model, recipe)
    return f"{show_bytes(nbytes)} of {kind}"


class Weights(NamedTuple):
    """The weights of one component, in sum."""

    products: str  # as `_products` says them
    nbytes: int


@lru_cache(maxsize=1024)
def _sum(model: Model, owner: str, *, trainable: bool) -> Weights:
    """Return the weights' description; trainable: of those alone. Cached for its many weights."""
    part = "block" if owner == "blocks" else owner
    rows = [
        w for w in model.weights
        if w.part == part and (w.trainable if trainable else not w.of_value)  # which is apart
    ]  # fmt: skip
    return Weights(_products(rows), sum(w.nbytes for w in rows))


@lru_cache(maxsize=256)
def _trainable(model: Model) -> int:
    return model.trainable_parameters


def _products(rows: Iterable[Weight]) -> str:
    """`6.48B x 2 B (bfloat16) + 8.39M x 4 B (float32)`."""
    counts: dict[str, tuple[int, int]] = {}
    for row in rows:
        count, nbytes = counts.get(row.coding or row.dtype, (0, 0))
        counts[row.coding or row.dtype] = count + row.numel, nbytes + row.nbytes
    return " + ".join(
        f"{show_count(count)} x {DTYPE_BYTES.get(kind) or f'{nbytes / count:.3f}'} B ({kind})"
        for kind, (count, nbytes) in counts.items()
    )


def _parameters(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    if owner == REFERENCE:
        return f"a frozen copy of what is trained, the reference: {_products(copied_rows(model))}"
    if owner == VALUE:
        own = _products(w for w in model.weights if w.of_value)
        return f"the value's own model, trained beside the policy: {own}"
    products = _sum(model, owner, trainable=False).products
    return products + _cut(recipe) if products else f"buffers of {owner}: {show_bytes(nbytes)}"


def _cut(recipe: Recipe) -> str:
    """A rank's share, where there are ranks."""
    shards = recipe.parallel.shards * recipe.parallel.tp
    return f", cut among {shards} ranks" if shards > 1 else ""


def _gradients(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    products, whole = _sum(model, owner, trainable=True)
    if not whole:  # tied: the head's gradient is summed into the embedding's
        return f"{show_bytes(nbytes)}: gradients made by the {owner}"
    if recipe.parallel.world > 1:
        return f"{nbytes / whole:.1%} of {products}: a unit's while whole, then this rank's share"
    return products if nbytes >= whole else f"{nbytes / whole:.0%} of {products}, so far"


def _state(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    count = _trainable(model)
    optimizer = recipe.optimizer
    return (
        f"{show_count(count)} trainable parameters x"
        f" {nbytes * recipe.parallel.shards * recipe.parallel.tp / count:.2f} B"
        f" ({optimizer.name}, {optimizer.implementation}){_cut(recipe)}"
    )


def _units(nbytes: int, model: Model, recipe: Recipe) -> str:
    tokens, hidden = recipe.micro_batch * recipe.own_row, model.architecture.hidden
    return f"{nbytes / (tokens * hidden):.2f} B x {tokens} tokens x {hidden} hidden"


def _activations(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    if owner != "blocks":
        return _units(nbytes, model, recipe)
    layers, recomputed = model.architecture.layers, recipe.recompute_blocks
    part = recipe.selective_blocks
    each = _units(nbytes // layers, model, recipe)
    suffix = f", {recomputed} of them recomputed" if recomputed else ""
    suffix += f", {part} of them but for products and attention" if part else ""
    return f"{layers} blocks{suffix} x {each} on average"


def _logits(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    vocab = model.architecture.vocab // recipe.parallel.tp
    own = recipe.micro_batch * recipe.own_row
    tokens = min(own, recipe.loss_chunk) if recipe.loss == "chunked" else own
    what = "tokens of a chunk" if recipe.loss == "chunked" else "tokens"
    return f"{nbytes / (tokens * vocab):.2f} B x {tokens} {what} x {vocab} vocabulary"


def _temporary(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    return f"freed by the next operation: {_units(nbytes, model, recipe)}"


def _input(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    names = "ids, labels, positions" if recipe.packing else "ids, labels"
    if recipe.learns == "conversations":
        names = "ids, labels, labels of prompts"
    each = f"{names}: {recipe.micro_batch} x {recipe.own_row} x 8 B (int64) each"
    if recipe.mismatches:
        each += ", and as many of answers to other prompts"
    if recipe.rates:
        each += f"; ratings: {recipe.micro_batch} x 1 B"
    if recipe.preference.reference != "precomputed":
        return each
    return f"{each}; the reference's log-probabilities: {recipe.micro_batch} x 4 B"


def _workspace(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    if owner == "cublas":
        return (
            f"cuBLAS, {show_bytes(nbytes)} of the forward's thread and, once it ran, of autograd's"
        )
    return f"{show_bytes(nbytes)} inside one kernel; read from torch's sources, not measured"


def _rounding(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    return "blocks are multiples of 512 B and keep remainders of up to 1 MiB; an estimate"


def _gathered(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    return f"weights gathered from {recipe.parallel.shards} ranks, and what they are gathered in"


def _reduced(owner: str, nbytes: int, model: Model, recipe: Recipe) -> str:
    ranks = recipe.parallel.dp * recipe.parallel.cp
    return f"gradients of one unit on their way to {ranks} ranks, and what came of them"


_BY_KIND: dict[Kind, Callable[[str, int, Model, Recipe], str]] = {
    Kind.PARAMETERS: _parameters,
    Kind.GRADIENTS: _gradients,
    Kind.OPTIMIZER_STATE: _state,
    Kind.ACTIVATIONS: _activations,
    Kind.LOGITS: _logits,
    Kind.TEMPORARY: _temporary,
    Kind.INPUT: _input,
    Kind.ALL_GATHER: _gathered,
    Kind.REDUCE_SCATTER: _reduced,
    Kind.WORKSPACE: _workspace,
    Kind.FRAGMENTATION: _rounding,
}
