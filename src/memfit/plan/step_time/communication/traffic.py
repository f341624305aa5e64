"""Bytes that a rank sends in one step, by mesh axis: the messages whose seconds `clock/` counts.

Of a message of n bytes among r ranks a ring sends (r - 1) / r x n from every rank in an all_gather
or a reduce_scatter and twice that in an all_reduce (nccl-tests, doc/PERFORMANCE.md). Weights that
are gathered for both passes and gradients that are reduced once are 1.5 times what copies of the
model all-reduce, where both are of one dtype (ZeRO, 1910.02054, section 7).
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.plan.frameworks import find_framework
from memfit.plan.step_time import work
from memfit.plan.step_time.arrays import change, larger
from memfit.plan.step_time.predicted_time import Totals
from memfit.plan.step_time.read import read_basis, read_layout
from memfit.plan.step_time.work import Layout, Shape
from memfit.records.recipe import Recipe
from memfit.records.results import Traffic


def describe_traffic(totals: Totals, recipe: Recipe) -> tuple[Traffic, ...]:
    """Every axis of more than one rank, and what its collectives send; () of one device."""
    if recipe.parallel.world == 1:
        return ()
    shape = totals.shape
    layout = read_layout(recipe, shape, read_basis(recipe))
    products = sum(totals.dense) + totals.head
    if products and find_framework(recipe.framework).time.counts_weights:
        trained = sum(totals.trained) + totals.head_trained
        layout = change(layout, trains=trained / products)
    rows = [*_data(shape, layout), *_tensor(shape, layout), *_context(shape, layout)]
    rows += _experts(shape, layout)
    return tuple(row for row in (*rows, *_stages(shape, layout)) if row.nbytes)


def _sent(axis: str, collective: str, ranks: float, nbytes: float, because: str) -> Traffic:
    """Return a row of messages of these bytes in all."""
    share = {"all_reduce": 2.0, "send_recv": 1.0}.get(collective, 1.0)
    if collective != "send_recv":
        share *= (ranks - 1) / ranks
    return Traffic(
        axis=axis, collective=collective, ranks=int(ranks), nbytes=round(share * nbytes),
        because=because,
    )  # fmt: skip


def _data(shape: Shape, layout: Layout) -> Iterator[Traffic]:
    """Weights and gradients among data-parallel ranks."""
    shards, copies = layout.mesh.shard * layout.mesh.cp, layout.mesh.dp / layout.mesh.shard
    plain, routed = work.own_weights(shape, layout)
    parts = larger(shards / layout.mesh.ep, 1)  # ranks that have the same experts
    dealt = layout.mesh.ep > 1 and layout.mesh.zero >= 3
    elements = plain if dealt else plain + routed
    ends = shape.vocab * shape.hidden / layout.mesh.tp / layout.mesh.pp
    times = layout.rows.accumulation if layout.mesh.zero >= 3 and layout.mesh.pp == 1 else 1.0
    gradients = layout.update.trains * layout.sent.gradient_bytes * elements * times
    often = f" x {times:g} micro-batches" if times > 1 else ""
    wire = f"{layout.sent.gradient_bytes:g} B a gradient{often}"
    if shards > 1 and layout.mesh.zero >= 3:
        # the head's unit is not given up before the backward, nor is one with a tied embedding
        passes = 2 - layout.sent.gathered_once
        twice = passes * (elements - ends) + ends
        gathered = layout.sent.gathered * twice * times
        reason = f"weights, {layout.sent.gathered:g} B each, gathered {passes:g} times{often}"
        yield _sent("dp_shard", "all_gather", shards, gathered, reason)
        yield _sent("dp_shard", "reduce_scatter", shards, gradients, wire)
        if dealt:
            weights = layout.sent.gathered * passes * routed * times
            yield _sent("dp_shard", "all_gather", parts, weights, f"experts' {reason}")
            of_experts = layout.update.trains * layout.sent.gradient_bytes * routed * times
            yield _sent("dp_shard", "reduce_scatter", parts, of_experts, f"{wire} of an expert")
            gradients += of_experts * shards / parts
    elif shards > 1 and layout.mesh.zero >= 1:
        yield _sent("dp_shard", "reduce_scatter", shards, gradients, wire)
        updated = layout.update.trains * 2 * elements
        yield _sent("dp_shard", "all_gather", shards, updated, "updated weights, 2 B each")
    if layout.mesh.zero < 1:
        yield _sent("dp_replicate", "all_reduce", layout.mesh.dp * layout.mesh.cp, gradients, wire)
    elif copies > 1:
        reason = f"{wire}, of a rank's share" if shards > 1 else wire
        yield _sent("dp_replicate", "all_reduce", copies, gradients / shards, reason)


def _tensor(shape: Shape, layout: Layout) -> Iterator[Traffic]:
    """Activations that ranks of tp gather and sum, twice a block and pass."""
    if layout.mesh.tp <= 1:
        return
    blocks = shape.layers / layout.mesh.pp * layout.rows.accumulation
    each = work.activation_bytes(shape, layout)
    count = 4 * blocks  # after attention and the feed-forward, forward and backward
    reason = f"activations of {blocks:g} blocks' passes, forward and backward"
    if layout.mesh.sequence_parallel:
        yield _sent("tp", "all_gather", layout.mesh.tp, count * each, reason)
        yield _sent("tp", "reduce_scatter", layout.mesh.tp, count * each, reason)
    else:
        yield _sent("tp", "all_reduce", layout.mesh.tp, count * each, reason)


def _experts(shape: Shape, layout: Layout) -> Iterator[Traffic]:
    """Tokens to the ranks of their experts and back, of an even routing: in the forward, in the
    backward, and in the forward of recomputed blocks."""
    if layout.mesh.ep <= 1:
        return
    recomputed = layout.recompute.repeated + layout.recompute.selective
    blocks = (1 - shape.plain) * shape.layers / layout.mesh.pp * layout.rows.accumulation
    width = layout.numbers.element * shape.hidden
    each = work.routed_tokens(shape, layout) * width
    reason = f"tokens to their experts and back, {shape.per_token:g} experts each"
    count = (4 + 2 * recomputed) * blocks
    yield _sent("ep", "all_to_all", layout.mesh.ep, count * each, reason)


def _context(shape: Shape, layout: Layout) -> Iterator[Traffic]:
    """Keys and values round the ring: there; and back, with their gradients."""
    if layout.mesh.cp <= 1:
        return
    hops = (layout.mesh.cp - 1) * shape.layers / layout.mesh.pp * layout.rows.accumulation
    each = work.key_value_bytes(shape, layout)
    reason = "keys and values to the next rank, and with their gradients in the backward"
    yield _sent("cp", "send_recv", layout.mesh.cp, 3 * hops * each, reason)


def _stages(shape: Shape, layout: Layout) -> Iterator[Traffic]:
    """A hidden state to the next stage, and its gradient to the one before."""
    if layout.mesh.pp <= 1:
        return
    nbytes = 2 * work.stage_bytes(shape, layout) * layout.rows.accumulation * layout.stages.chunks
    reason = f"hidden states and gradients of {layout.rows.accumulation:g} micro-batches"
    yield _sent("pp", "send_recv", layout.mesh.pp, nbytes, reason)


def compare_with_copies(rows: tuple[Traffic, ...]) -> float | None:
    """What the data-parallel axes send over what copies of the model would, of equal gradients.

    None where the model is not cut among ranks.
    """
    cut = [row for row in rows if row.axis == "dp_shard"]
    reduced = sum(r.nbytes for r in cut if r.collective == "reduce_scatter")
    if not reduced:
        return None
    ours = sum(row.nbytes for row in rows if row.axis.startswith("dp_"))
    return ours / (2 * reduced)
