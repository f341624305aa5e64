"""What one step computes and moves, of one rank: products, attention, bytes. No seconds yet.

All fields are Python numbers or numpy arrays of them; shapes are products of three lengths
(m rows, n columns, k the length that is summed over), tokens are those of one rank and micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

from memfit.plan.step_time.arrays import Number, everywhere, larger, smaller, where


class Shape(NamedTuple):
    """A decoder in numbers; widths in elements."""

    layers: Number
    hidden: Number
    heads: Number
    kv_heads: Number
    key: Number  # elements of a head's queries and keys
    value: Number  # and of its values
    query_rank: Number  # latent attention (2405.04434): of compressed queries; 0 = they are not
    kv_rank: Number  # and of compressed keys and values; 0 = plain attention
    rotated: Number  # elements of a latent key that all heads share
    ffn: Number
    gated: Number  # 1 where two products enter the feed-forward, else 0
    experts: Number
    per_token: Number
    expert_ffn: Number
    shared_ffn: Number
    plain: Number  # share of the blocks whose feed-forward is a plain one
    window: Number  # tokens that a sliding block looks back over; 0 = none slides
    sliding: Number  # share of the blocks that slide
    clamped: Number  # 1 where experts have biases and clamp (gpt-oss): more element-wise passes
    vocab: Number
    own_head: Number  # 1 where the head has a weight of its own, of the vocabulary's size
    scores: Number = 0.0  # 1 where the head makes one number of a row
    linear: Number = 0.0  # share of the blocks that have linear attention
    entering: Number = 0.0  # columns of the products that enter it, of a block that has it
    leaving: Number = 0.0  # rows of the product behind it
    gates: Number = 0.0  # 1 where the queries' product makes a gate of attention's result, too

    @property
    def outputs(self) -> Number:
        """Numbers that the head makes of what it reads."""
        return where(self.scores > 0, 1.0, self.vocab)


class Rows(NamedTuple):
    """The rows that a rank reads in a step."""

    sequence: Number
    micro_batch: Number
    accumulation: Number


class Mesh(NamedTuple):
    """How many ranks share what."""

    dp: Number  # ranks with a share of the batch
    shard: Number  # of them, those among which states (zero 1), gradients, weights (3) are cut
    zero: Number
    tp: Number
    sequence_parallel: Number  # 1 or 0
    cp: Number
    pp: Number
    ep: Number


class Stages(NamedTuple):
    """How blocks are dealt to the ranks of a pipeline."""

    chunks: Number  # pieces of a pipeline rank (virtual stages)
    most: Number  # blocks of the fullest pipeline rank but the last
    last: Number  # blocks of the last one, which has the head
    balanced: Number  # 1 where stages are dealt by their cost, the head's included
    bubble: Number = 1.0  # of 1F1B's, or interleaved's: what the schedule's ranks wait


class Recompute(NamedTuple):
    """Which blocks the backward enters, and what it computes a second time."""

    repeated: Number  # share of the blocks that backward computes again in full
    selective: Number  # share of the blocks of which it computes cheap parts again
    products_repeated: Number  # share of such a block's products among those parts
    # share of a block's element-wise work that a selective recomputation repeats, where that is
    # known: all of memfit's own; 0: a quarter, as fitted
    recomputed: Number = 0.0
    remade: Number = 0.0  # 1 where backward makes gated products again (train/lean)
    entered: Number = 1.0  # share of the blocks that backward enters: all but frozen first ones


class Numbers(NamedTuple):
    """In which formats blocks compute, and what it takes to bring their numbers there."""

    element: Number  # bytes of an activation
    narrow: Number  # 1 where blocks multiply in FP8 or FP4
    packed: Number  # passes over frozen weights that are unpacked before each product; 0: none
    compiled: Number  # 1 where element-wise operations are fused by a compiler
    written_out: Number  # 1 where attention writes its scores to memory (math, eager)
    eight: Number = 0.0  # 1 where frozen weights multiply in int8, their outliers aside
    recast: Number = 0.0  # elements of a block's weights that each pass narrows, unfused
    measured: Number = 0.0  # elements of a block's weights that a forward measures (DoRA, QAT)
    operations: Number = 0.0  # of a block, trained whole, where torch's are counted; 0: as fitted
    quantised: Number = 0.0  # operations more, a pass, of products by weights in codes
    waits: Number = 0.0  # 1 where the host waits for each forward product: it looks for outliers
    normed: Number = 0.0  # bytes of a token's queries and keys, both ways, that eager norms move


class Loss(NamedTuple):
    """What the loss adds to one forward and its backward."""

    chunk_bytes: Number  # moved a micro-batch because the loss goes through the head in chunks
    references: Number = 0.0  # forwards without a gradient before each micro-batch's own
    heads: Number = 0.0  # the head's products beyond one forward and its backward
    logit: Number = 0.0  # bytes of one logit, both ways, where they are counted; 0: as fitted
    scored: Number = 0.0  # and of a forward without a gradient


class Sent(NamedTuple):
    """What ranks send each other, and what runs beside it."""

    gradient_bytes: Number  # an element of a gradient takes on the wire
    asynchronous: Number  # 1 where tp's collectives run beside the products they feed
    deduplicated: Number  # 1 where a token goes once to each domain that has experts of it
    overlapped: Number  # 1 where tokens travel to experts while another micro-batch is computed
    gathered: Number = 2.0  # bytes of a weight of a block on the wire
    gathered_once: Number = 0.0  # 1 where weights of zero 3 stay gathered until the backward


class Update(NamedTuple):
    """What the optimizer updates and moves."""

    trains: Number  # 1: all weights; 0: adapters beside frozen ones
    state_bytes: Number  # read and written for one updated parameter
    offloaded: Number  # bytes of an updated parameter that pass the link to the host, both ways
    update_flop: Number = 0.0  # of the optimizer's own matrix products, a step
    update_launch: Number = 0.0  # s that the host takes to update a block's weights in its backward


class Offloading(NamedTuple):
    """Activations that wait in host memory."""

    offloads: Number = 0.0  # share of the blocks all of whose activations wait there
    stowed: Number = 0.0  # bytes of one of them, copied there and back
    input_share: Number = 0.0  # share of the blocks whose input alone waits there
    input_bytes: Number = 0.0  # bytes of one of those


class Beside(NamedTuple):
    """Adapters of a frozen base, over those of a block whose every projection has one."""

    adapters: Number = 1.0  # how many there are
    adapted: Number = 1.0  # elements of what they read and write
    spared: Number = 0.0  # of a block's launches, those that frozen matrices leave out


class Scan(NamedTuple):
    """What linear attention launches, moves and multiplies, of the mean block; one rank's rows."""

    turn: Number = 0.0  # operations of a chunk's turn, forward
    turn_back: Number = 0.0
    token_moved: Number = 0.0  # bytes of a token, forward
    token_back: Number = 0.0
    chunk_back: Number = 0.0  # bytes of a token and chunk of its row
    state_moved: Number = 0.0  # bytes of a row and chunk
    state_back: Number = 0.0
    token_flop: Number = 0.0  # of a token's products within the rule, forward


class Layout(NamedTuple):
    """How a step is laid out over ranks, and what of it is repeated or narrow."""

    rows: Rows
    mesh: Mesh
    stages: Stages
    recompute: Recompute
    numbers: Numbers
    loss: Loss
    sent: Sent
    update: Update
    offloading: Offloading = Offloading()
    beside: Beside = Beside()
    scan: Scan = Scan()


class Product(NamedTuple):
    """One weight's matrix product: 2 m n k FLOP forward, `count` times."""

    m: Number
    n: Number
    k: Number
    count: Number = 1.0

    @property
    def flop(self) -> Number:
        """Of its forward; the gradients of input and weight take as much each."""
        return 2.0 * self.m * self.n * self.k * self.count


class Attention(NamedTuple):
    """Scores and their products with values, of one block and micro-batch, one rank."""

    flop: Number  # of the forward
    score_bytes: Number  # of the scores, where they are written out


def tokens_of(layout: Layout) -> Number:
    """Tokens of one rank and micro-batch."""
    return layout.rows.micro_batch * layout.rows.sequence / layout.mesh.cp


def attention_products(shape: Shape, layout: Layout) -> tuple[Product, ...]:
    """Queries, keys and values in one product, and the output's; or latent attention's five.

    Where some blocks have linear attention, theirs too: what enters in one product, and the last.
    """
    m, tp = tokens_of(layout), layout.mesh.tp
    latent = shape.kv_rank > 0
    queries = shape.heads * shape.key
    plain_in = queries * (1 + shape.gates) + shape.kv_heads * (shape.key + shape.value)
    compressed = shape.query_rank > 0
    unrotated = shape.key - shape.rotated
    attention = (
        Product(m, where(latent, where(compressed, shape.query_rank, queries / tp), plain_in / tp),
                shape.hidden),
        Product(m, shape.hidden, shape.heads * shape.value / tp),
        Product(m, queries / tp, shape.query_rank, latent * compressed * 1.0),
        Product(m, shape.kv_rank + shape.rotated, shape.hidden, latent * 1.0),
        Product(m, shape.heads * (unrotated + shape.value) / tp, shape.kv_rank, latent * 1.0),
    )  # fmt: skip
    if everywhere(shape.linear == 0):
        return attention
    full = 1 - shape.linear
    return (
        *(product._replace(count=product.count * full) for product in attention),
        Product(m, shape.entering, shape.hidden, shape.linear),
        Product(m, shape.hidden, shape.leaving, shape.linear),
    )


def feed_products(shape: Shape, layout: Layout) -> tuple[Product, ...]:
    """The plain feed-forward's two products."""
    m, width = tokens_of(layout), shape.ffn / layout.mesh.tp
    return (
        Product(m, width * (1 + shape.gated), shape.hidden, (shape.ffn > 0) * 1.0),
        Product(m, shape.hidden, width, (shape.ffn > 0) * 1.0),
    )


def quantised_bytes(shape: Shape, layout: Layout) -> Number:
    """Bytes of one block's forward that LLM.int8 moves around its int8 products.

    An input of 16 bits: cast to fp16, its magnitudes, compared twice over, quantised (16 bytes a
    number); a result: int32, its fp16 values, with bias, cast, with the outliers' part (18).
    Source: bitsandbytes/backends/cuda/ops.py, int8_vectorwise_quant and int8_mm_dequant.
    """
    products = (*attention_products(shape, layout), *feed_products(shape, layout))
    return layout.numbers.eight * sum(p.count * p.m * (16 * p.k + 18 * p.n) for p in products)


def expert_products(shape: Shape, layout: Layout) -> tuple[Product, ...]:
    """The products of a rank's experts, over as many tokens each as an even routing brings."""
    own = larger(shape.experts / layout.mesh.ep, 1)
    rows = routed_tokens(shape, layout) / own
    return (
        Product(rows, shape.expert_ffn * 2, shape.hidden, (shape.experts > 0) * own),
        Product(rows, shape.hidden, shape.expert_ffn, (shape.experts > 0) * own),
    )


def shared_products(shape: Shape, layout: Layout) -> tuple[Product, ...]:
    """The products of the expert that every token visits."""
    m, width = tokens_of(layout), shape.shared_ffn / layout.mesh.tp
    there = (shape.shared_ffn > 0) * 1.0
    return Product(m, width * 2, shape.hidden, there), Product(m, shape.hidden, width, there)


def routed_tokens(shape: Shape, layout: Layout) -> Number:
    """Rows of a rank's experts: each token as often as it visits one; tp ranks share them."""
    return tokens_of(layout) * shape.per_token / layout.mesh.tp


def attend(shape: Shape, layout: Layout) -> Attention:
    """Attention's two products; kernels that know causality skip half of the scores."""
    pairs = layout.rows.micro_batch * layout.rows.sequence * layout.rows.sequence / layout.mesh.cp
    reached = where(
        (shape.window > 0) * (layout.numbers.written_out == 0),
        smaller(shape.window / layout.rows.sequence, 1.0), 1.0,
    )  # fmt: skip
    causal = where(layout.numbers.written_out > 0, 1.0, 0.5)
    full = causal * (1 - shape.sliding)
    pairs = pairs * (full + shape.sliding * smaller(reached, causal)) * (1 - shape.linear)
    heads = shape.heads / layout.mesh.tp
    return Attention(
        flop=2.0 * pairs * heads * (shape.key + shape.value),
        score_bytes=layout.numbers.written_out * layout.numbers.element * pairs * heads,
    )


class Elementwise(NamedTuple):
    """Bytes that one block's forward reads and writes beside its products."""

    around: Number  # norms, residuals, rotation, bias of attention and of the feed-forward's ends
    activation: Number  # between a plain feed-forward's products
    routing: Number  # the same of the experts
    permuting: Number  # tokens put in the order of their experts and back


def elementwise(shape: Shape, layout: Layout) -> Elementwise:
    """Bytes before a framework's fusion is counted."""
    width = layout.numbers.element
    tokens, tp = tokens_of(layout), layout.mesh.tp
    outside = where(layout.mesh.sequence_parallel > 0, tokens / tp, tokens)
    heads = (1 - shape.linear) * (shape.heads * shape.key + 2 * shape.kv_heads * shape.key)
    routed = routed_tokens(shape, layout)
    sparse = (shape.experts > 0) * 1.0
    return Elementwise(
        around=width * (14 * outside * shape.hidden + 3 * tokens / tp * heads),
        activation=width * tokens * shape.ffn / tp * (3 + shape.gated),
        routing=sparse * (4 * width * routed * shape.expert_ffn + 8 * tokens / tp * shape.experts),
        permuting=sparse * width * routed * shape.hidden * 6,
    )


def attention_weights(shape: Shape) -> Number:
    """Elements of one block's attention, the mean of all blocks."""
    queries = shape.heads * shape.key
    plain = shape.hidden * (
        queries * (1 + shape.gates) + shape.kv_heads * (shape.key + shape.value)
    )
    unrotated = shape.key - shape.rotated
    latent = (
        where(shape.query_rank > 0, (shape.hidden + queries) * shape.query_rank,
              shape.hidden * queries)
        + shape.hidden * (shape.kv_rank + shape.rotated)
        + shape.kv_rank * shape.heads * (unrotated + shape.value)
    )  # fmt: skip
    inner = where(shape.kv_rank > 0, latent, plain)
    attention = inner + shape.hidden * shape.heads * shape.value
    linear = shape.hidden * (shape.entering + shape.leaving)
    return (1 - shape.linear) * attention + shape.linear * linear


def plain_weights(shape: Shape) -> Number:
    """Elements of one block that all ranks of ep hold: attention, feed-forward, shared expert."""
    feed = shape.hidden * shape.ffn * (2 + shape.gated)
    shared = 3 * shape.hidden * shape.shared_ffn
    return attention_weights(shape) + shape.plain * feed + (1 - shape.plain) * shared


def expert_weights(shape: Shape) -> Number:
    """Elements of all routed experts of one block, the mean of all blocks."""
    return (1 - shape.plain) * 3.0 * shape.experts * shape.hidden * shape.expert_ffn


def gathered_elements(shape: Shape, layout: Layout) -> Number:
    """Elements of one block that FSDP gathers and reduces: of this rank's tp and ep share."""
    routed = where(layout.mesh.shard * layout.mesh.cp * layout.mesh.tp > layout.mesh.ep, 1.0, 0.0)
    plain = plain_weights(shape) / layout.mesh.tp
    return plain + routed * expert_weights(shape) / layout.mesh.ep


def own_weights(shape: Shape, layout: Layout) -> tuple[Number, Number]:
    """Elements that one rank updates gradients of: those that ep leaves whole, and its experts."""
    ends = shape.vocab * shape.hidden * (1 + shape.own_head)
    plain = (shape.layers * plain_weights(shape) + ends) / layout.mesh.tp / layout.mesh.pp
    return plain, shape.layers * expert_weights(shape) / layout.mesh.ep / layout.mesh.pp


def activation_bytes(shape: Shape, layout: Layout) -> Number:
    """Bytes of a micro-batch's activations, which tp's ranks gather or sum."""
    return 2 * tokens_of(layout) * shape.hidden


def key_value_bytes(shape: Shape, layout: Layout) -> Number:
    """Bytes of a rank's keys and values of one block, which go round the ring of cp."""
    width = shape.kv_heads * (shape.key + shape.value)
    return 2 * tokens_of(layout) * width / layout.mesh.tp


def stage_bytes(shape: Shape, layout: Layout) -> Number:
    """Bytes that one stage hands to the next for one micro-batch."""
    return activation_bytes(shape, layout) / where(
        layout.mesh.sequence_parallel > 0, layout.mesh.tp, 1
    )
