"""Seconds of one block of one micro-batch, and of the head: products, attention, what is around.

Of every operation its FLOP over what the device reaches, or its bytes over the bandwidth.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.plan.step_time import work
from memfit.plan.step_time.adapters import WHOLE
from memfit.plan.step_time.arrays import Number, ceil_div, everywhere, larger, smaller, where
from memfit.plan.step_time.communication.exchanges import (
    all_to_all,
    context_ring,
    send_seconds,
    tensor_seconds,
)
from memfit.plan.step_time.own import Points, find_usual_launch, rate_at
from memfit.plan.step_time.rates import Setting
from memfit.plan.step_time.runs import BLOCKS_DO_NOT_READ, once
from memfit.plan.step_time.work import Product
from memfit.records.model import CHUNK


class Passes(NamedTuple):
    """Seconds of forward, of the inputs' gradients, of the weights' gradients."""

    forward: Number
    inputs: Number
    weights: Number

    @property
    def all(self) -> Number:
        """Seconds of all three."""
        return self.forward + self.inputs + self.weights


def multiply(
    product: Product,
    speed: Number,
    setting: Setting,
    measured: Points = (),
    *,
    grouped: bool = False,
) -> Passes:
    """Seconds of one weight's products; grouped: all of a kind are one call.

    Small sides leave tiles and multiprocessors idle: each takes (1 + tile / side) of the time at
    full speed. Beside it some of the weight's own bytes: 2 an element read, and for the gradient
    of the weight 8, an fp32 buffer read and written. `measured`, the user's own curve, knows what
    small products leave idle; `speed` is then a share of it.
    """
    layout, machine, rates = setting.layout, setting.machine, setting.rates
    idle = 1 / larger(product.m, 1) + 1 / larger(product.n, 1) + 1 / larger(product.k, 1)
    if measured:
        calls = 1.0 if grouped else larger(product.count, 1e-9)
        speed = speed * rate_at(measured, product.flop / calls)
    busy = product.flop / speed * (1 if measured else 1 + rates.compute.tile * idle)
    moved = rates.compute.weight_traffic * product.count * product.n * product.k
    moved = moved / (machine.memory * rates.elementwise.memory)
    faster = layout.numbers.eight * (machine.eight > 0)  # weights in int8: their forward's products
    forward = where(faster > 0, machine.products / larger(machine.eight, 1), 1.0) * busy
    return Passes(forward + moved, busy + moved, layout.update.trains * (busy + 4 * moved))


def _add(passes: list[Passes], factor: Number = 1.0) -> Passes:
    forward, inputs, weights = (sum(p[i] for p in passes) * factor for i in range(3))
    return Passes(forward, inputs, weights)


def block_products(setting: Setting) -> Passes:
    """Of attention, and of the feed-forward or the experts."""
    shape, layout, rates = setting.shape, setting.layout, setting.rates
    own = setting.machine.own.products
    speed = (
        (1.0 if own else setting.machine.products) * rates.compute.products / rates.compute.slowdown
    )
    attention = _add(
        [multiply(p, speed, setting, own) for p in work.attention_products(shape, layout)]
    )
    plain = _add(
        [multiply(p, speed, setting, own) for p in work.feed_products(shape, layout)], shape.plain
    )
    sparse = 1 - shape.plain
    shared = _add(
        [multiply(p, speed, setting, own) for p in work.shared_products(shape, layout)], sparse
    )
    routed = _add(
        [
            multiply(p, speed, setting, own, grouped=True)
            for p in work.expert_products(shape, layout)
        ],
        sparse * rates.compute.grouped,
    )
    return _add([attention, plain, shared, routed])


def attend(setting: Setting) -> tuple[Number, Number]:
    """Seconds of attention itself, forward and backward.

    A fused kernel's backward has 2.5 times the FLOP (2205.14135) and reaches a tenth less of the
    peak; written out, it is the forward twice, and the scores go to memory and back five times.
    """
    shape, layout, machine, rates = setting
    found = work.attend(shape, layout)
    out = layout.numbers.written_out > 0
    if machine.own.attention:
        return _attend_as_measured(setting, found)
    narrow = where(out, 1.0, larger(128 / shape.key, 1) ** rates.attending.narrow_head)
    narrow = narrow * where(out * (shape.key % 8 > 0), rates.attending.misaligned, 1.0)
    narrow = narrow * (1 + rates.attending.ring_attention * (1 - 1 / layout.mesh.cp))
    forward = found.flop / (machine.wide_peak * rates.attending.attention) * narrow
    written = found.score_bytes * 5 / (machine.memory * rates.elementwise.memory)
    backward = forward * where(out, 2.0, 2.75)
    return forward + written, backward + 1.2 * written


# DoRA's sum W + s B A in fp32 is written, read and written with a 16-bit W added, and read
MEASURED_BYTES = 4 + (4 + 2 + 4) + 4

# torchao's cast to FP8 without a compiler: magnitudes written and read, then scaled, clamped and
# narrowed, each a kernel that reads and writes fp32
EAGER_CAST_BYTES = (4 + 4) + 4 + (4 + 4) + (4 + 4) + (4 + 1)
FUSED_CAST_BYTES = 3  # what `casts` takes one element to move where frameworks fuse it


def _attend_as_measured(setting: Setting, found: work.Attention) -> tuple[Number, Number]:
    """By the user's own curve, of heads of 64 elements, forward and backward together.

    FLOP count as there: the half that causality leaves, of six products. The backward is as much
    longer than the forward as elsewhere.
    """
    shape, layout, machine, rates = setting
    out = layout.numbers.written_out > 0
    flop = 3 * found.flop * where(out, 0.5, 1.0)
    wider = (
        larger(128 / shape.key, 1) ** rates.attending.narrow_head / 2**rates.attending.narrow_head
    )
    seconds = flop / rate_at(machine.own.attention, flop) * where(out, 1.0, wider)
    seconds = seconds * (1 + rates.attending.ring_attention * (1 - 1 / layout.mesh.cp))
    back = where(out, 2.0, 2.75)
    return seconds / (1 + back), seconds * back / (1 + back)


class Around(NamedTuple):
    """Seconds of what a block does beside products and attention, forward."""

    elementwise: Number
    casts: Number
    unpacking: Number
    adapters: Number
    norms: Number  # once a forward, and not in backward
    coding: Number  # the same: what int8 products read and write around themselves


def around(setting: Setting) -> Around:
    """Bytes over bandwidth: element-wise operations, casts to FP8, unpacking, adapters."""
    shape, layout, machine, rates = setting
    bandwidth = machine.memory * rates.elementwise.memory
    moved, sparse = work.elementwise(shape, layout), 1 - shape.plain
    fusion = rates.elementwise.passes * where(
        layout.numbers.compiled > 0, rates.elementwise.fused, 1.0
    )
    tokens, routed = work.tokens_of(layout), work.routed_tokens(shape, layout)
    clamped = shape.clamped * rates.elementwise.clamp * 24 * routed * shape.expert_ffn
    passed = fusion * (moved.around + shape.plain * moved.activation + sparse * moved.routing)
    passed = passed + fusion * sparse * (clamped + rates.elementwise.permute * moved.permuting)
    narrowed = 3 * tokens * shape.hidden + tokens * shape.ffn / layout.mesh.tp * shape.plain
    narrowed = narrowed + sparse * routed * (shape.expert_ffn + shape.hidden)
    feed = 3 * shape.hidden * (shape.plain * shape.ffn + sparse * shape.shared_ffn)
    frozen = work.attention_weights(shape) + feed + work.expert_weights(shape)
    frozen = layout.numbers.packed * frozen
    adapted = (
        (1 - layout.update.trains) * tokens * (8 * shape.hidden + 2 * shape.ffn) / layout.mesh.tp
    )
    adapted = adapted * layout.beside.adapted
    return Around(
        # a third of both ways is the forward's; counted bytes go as fast as copies do
        elementwise=passed / bandwidth + layout.numbers.normed * tokens / 3 / machine.memory,
        casts=layout.numbers.narrow * rates.elementwise.cast * 3 * narrowed / bandwidth,
        unpacking=(
            rates.elementwise.unpack * 10 * frozen + EAGER_CAST_BYTES * layout.numbers.recast
        )
        / bandwidth,
        adapters=rates.elementwise.adapter * 4 * adapted / bandwidth,
        norms=MEASURED_BYTES * layout.numbers.measured / bandwidth,
        coding=work.quantised_bytes(shape, layout) / bandwidth,
    )


def remake(setting: Setting) -> Number:
    """Return the seconds in which backward recomputes gated products, unsaved by lean blocks.

    Counted over the kernels of train/lean, not fitted: a product is five numbers an element read
    and written, and the activation beside it two more; with adapters no product is made. A norm's
    output costs nothing: 16 bytes an element recompute it, and the lean norm's own backward
    moves 76 of them in bf16 where eager's moves 92.
    """
    shape, layout, machine, rates = setting
    numbers = (
        layout.recompute.remade
        * (2 + 5 * layout.update.trains)
        * shape.ffn
        * work.tokens_of(layout)
    )
    return numbers * layout.numbers.element / (machine.memory * rates.elementwise.memory)


def scan(setting: Setting) -> tuple[Number, Number]:
    """Seconds of linear attention beside products by weights, forward and backward.

    Its bytes are counted and go as fast as copies do; those of its small products among them, whose
    FLOP take the time of one turn's call as often as there are turns.
    """
    layout, machine, rates = setting.layout, setting.machine, setting.rates
    found, own = layout.scan, machine.own.products
    if everywhere(found.turn == 0):
        return 0.0, 0.0
    rows, tokens, chunks = count_chunks(layout)
    there = tokens * found.token_moved + rows * chunks * found.state_moved
    back = tokens * (found.token_back + chunks * found.chunk_back)
    back = back + rows * chunks * found.state_back
    flop = tokens * found.token_flop
    speed = (1.0 if own else machine.products) * rates.compute.products / rates.compute.slowdown
    if own:
        speed = speed * rate_at(own, larger(flop / larger(chunks, 1), 1.0))
    return there / machine.memory + flop / speed, back / machine.memory + 2 * flop / speed


def count_chunks(layout: work.Layout) -> tuple[Number, Number, Number]:
    """Rows, tokens of all rows with what fills up their last chunks, and chunks of a row."""
    chunks = ceil_div(layout.rows.sequence, CHUNK)
    rows = layout.rows.micro_batch
    return rows, rows * chunks * CHUNK, chunks


class Block(NamedTuple):
    """Seconds of one block and micro-batch on one rank, the mean of all blocks."""

    forward: Number
    backward: Number
    repeated: Number  # of the forward, in the backward
    exposed: Number  # collectives of tp, cp and ep in one forward; a backward has as many
    launched: Number  # on the host, of the forward
    launched_back: Number  # and of the backward
    waited: Number  # of the forward's, those that nothing on the device runs beside


class Spent(NamedTuple):
    """Seconds of one block and micro-batch of what no recomputing and no schedule changes."""

    forward: Number
    backward: Number  # without what it computes again
    products: Number  # of the forward, as are all below
    attention: Number
    elementwise: Number
    adapters: Number
    inside: Number  # exposed collectives of tp
    dispatch: Number  # and of ep
    ring: Number  # and of cp
    head: Number  # the whole head and loss, both ways
    send: Number  # one message to the next stage


def _spend(setting: Setting) -> Spent:
    shape, layout, _, rates = setting
    products, extra = block_products(setting), around(setting)
    there, back = attend(setting)
    # weights in int8 are multiplied as they are, and unpacked in backward alone
    scanned, scanned_back = scan(setting)
    forward = products.forward + there + sum(extra) - layout.numbers.eight * extra.unpacking
    forward = forward + scanned
    backward = products.inputs + products.weights + back + scanned_back
    backward = backward + 2 * (extra.elementwise + extra.casts + extra.adapters) + extra.unpacking
    backward = backward + remake(setting)
    reduced = rates.exposed.exposed_tensor * where(
        layout.sent.asynchronous > 0, rates.exposed.asynchronous, 1.0
    )
    return Spent(
        forward=forward,
        backward=backward,
        products=products.forward,
        attention=there,
        elementwise=extra.elementwise + scanned,
        adapters=extra.adapters,
        # two all-reduces a forward; where tp ranks share the experts' tokens, half of that
        inside=reduced * tensor_seconds(setting) * where(shape.experts > 0, 1, 2),
        dispatch=(1 - shape.plain) * all_to_all(setting),
        ring=context_ring(setting, there),
        head=time_head(setting),
        send=send_seconds(setting),
    )


def spend(setting: Setting) -> Spent:
    """The same, worked out once for each mesh and micro-batch."""
    return Spent(*once(_spend, setting, BLOCKS_DO_NOT_READ))


def time_block(setting: Setting, spent: Spent) -> Block:
    """One block of the mean kind: seconds of its passes, before launches are weighed."""
    shape, layout, _, rates = setting
    share = where(
        layout.recompute.recomputed > 0,
        layout.recompute.recomputed,
        rates.elementwise.selective * 0.25,
    )
    cheap = layout.numbers.written_out * spent.attention + share * spent.elementwise
    cheap = cheap + layout.recompute.products_repeated * spent.products
    whole = spent.forward + spent.inside + spent.dispatch
    repeated = layout.recompute.repeated * whole + layout.recompute.selective * cheap
    entered = layout.recompute.entered
    passes = (
        layout.recompute.repeated
        + layout.recompute.recomputed * layout.recompute.selective
        + layout.loss.references
    ) / 3
    counted = layout.numbers.operations  # routing among them
    each = setting.machine.own.launch or rates.host.launch / WHOLE
    if not (setting.machine.own.launch or everywhere(layout.scan.turn == 0)):
        # what was fitted is of blocks whose operations others fuse
        each = find_usual_launch() or each
    launch = where(counted > 0, each * counted, rates.host.launch)
    host = launch * where(layout.numbers.compiled > 0, 0.6, 1.0) * (1 + passes)
    host = host + where(counted > 0, 0.0, (1 - shape.plain) * rates.host.expert_launch)
    host = host * where(layout.mesh.tp > 1, 1 + rates.host.tensor_launch, 1.0)
    beside = rates.host.adapter_launch * layout.beside.adapters - layout.beside.spared
    host = host * (1 + (1 - layout.update.trains) * beside) + layout.update.update_launch
    quantised = each * layout.numbers.quantised * where(counted > 0, 1.0, 0.0)
    turns, turns_back = _launch_turns(setting, each)
    launched = host / 3 + quantised + turns  # a third of the launches are the forward's
    alone = spent.forward - spent.adapters  # the base model's
    return Block(
        forward=spent.forward + layout.loss.references * alone,
        backward=entered * spent.backward,
        repeated=smaller(layout.recompute.repeated + layout.recompute.selective, entered)
        / larger(layout.recompute.repeated + layout.recompute.selective, 1e-9)
        * repeated,
        exposed=spent.inside + spent.dispatch + spent.ring,
        launched=launched,
        launched_back=(host * 2 / 3 + quantised + turns_back) * entered,
        waited=where(layout.numbers.waits > 0, launched, 0.0),
    )


def _launch_turns(setting: Setting, each: Number) -> tuple[Number, Number]:
    """Seconds in which the host launches the turns of linear attention's scan, both ways; each:
    of one operation."""
    layout = setting.layout
    _, _, chunks = count_chunks(layout)
    repeated = layout.recompute.repeated + layout.recompute.recomputed * layout.recompute.selective
    turn = layout.scan.turn
    there = (1 + layout.loss.references) * turn
    return each * chunks * there, each * chunks * (layout.scan.turn_back + repeated * turn)


def time_head(setting: Setting) -> Number:
    """Seconds of logits and loss, forward and backward, of one micro-batch; never recomputed."""
    layout, machine, rates = setting.layout, setting.machine, setting.rates
    passes, logits, scored = _head(setting)
    chunks = layout.loss.chunk_bytes / (machine.memory * rates.elementwise.memory)
    return passes.all + logits + chunks + layout.loss.heads * (passes.forward + scored)


def score_head(setting: Setting) -> Number:
    """Seconds of logits and log-probabilities of one micro-batch, without a gradient."""
    passes, _, scored = _head(setting)
    return passes.forward + scored


def _head(setting: Setting) -> tuple[Passes, Number, Number]:
    """Passes of the head's product; seconds of logits and loss both ways, and forward alone."""
    shape, layout, machine, rates = setting
    tokens = where(shape.scores > 0, layout.rows.micro_batch, work.tokens_of(layout))
    product = Product(tokens, shape.outputs / layout.mesh.tp, shape.hidden)
    own = machine.own.wide
    speed = (1.0 if own else machine.wide_products) * rates.compute.head / rates.compute.slowdown
    logits = product.m * product.n
    fitted = 6 * layout.numbers.element * logits * rates.elementwise.passes**0.5
    fitted = fitted / (machine.memory * rates.elementwise.memory)
    counted = layout.loss.logit > 0
    both = where(counted, layout.loss.logit * logits / machine.memory, fitted)
    alone = where(counted, layout.loss.scored * logits / machine.memory, fitted / 3)
    return multiply(product, speed, setting, own), both, alone
