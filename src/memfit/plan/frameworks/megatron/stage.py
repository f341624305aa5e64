"""What one pipeline stage holds at the instants where its memory may peak.

All sums serve one recipe or many, as in `_megatron_shape`; `last` is always a plain truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from memfit.plan.frameworks import Instant
from memfit.plan.frameworks.megatron.block import (
    Adapters,
    BlockSettings,
    Parts,
    backward_extra,
    save_block,
)
from memfit.plan.frameworks.megatron.shape import Shape, count_kinds
from memfit.plan.frameworks.shared.pipeline import count_in_flight
from memfit.plan.step_time.arrays import Number, ceil_div, say, smaller, where
from memfit.records import Record
from memfit.records.ledger import Kind, Phase
from memfit.records.model import Experts

Held = dict[tuple[Kind, str], tuple[int, str]]  # (kind, owner) -> bytes, because
MIB = 2**20
GROUPED_STREAMS = 4  # on which Transformer Engine runs the products of grouped linears


class Settings(Record, frozen=True, kw_only=True):
    """How Megatron runs the step, of what more than one stage shares."""

    block: BlockSettings
    recompute: str  # none | selective | full
    recomputed_blocks: Number  # the first ones of each stage's chunk, where `full`
    recompute_group: int  # blocks between two kept inputs (--recompute-num-layers, uniform)
    weight: int  # bytes of an element of a linear's weight, with its copies in FP8
    loss: str  # plain | native | te: --cross-entropy-loss-fusion and its implementation
    loss_copies: int  # fp32 tensors of the logits' size at the loss's worst instant
    main_gradient: int  # bytes of a gradient in the buffer
    state: int  # bytes of states a parameter that the distributed optimizer cuts
    step_extra: int  # bytes a parameter that only the optimizer's step holds
    group: int  # micro-batches in a row of one chunk (--microbatch-group-size-per-vp-stage)
    workspace: int  # cuBLAS's workspace of one thread, bytes
    engine_workspace: int  # Transformer Engine's, bytes
    grouped: bool  # --moe-grouped-gemm
    mask: bool  # the dataloader makes an attention mask


class Stage(Record, frozen=True, kw_only=True):
    """One stage: which blocks its chunks hold, and whether it has the embedding or the head."""

    index: int
    chunks: tuple[range, ...]
    first: bool
    last: bool

    @property
    def tail(self) -> range:
        """The blocks whose backward comes first."""
        return self.chunks[-1] or self.chunks[0]


class Count(Record, frozen=True, kw_only=True):
    """A stage in numbers: what it holds of each kind, and keeps of all micro-batches in flight."""

    index: Number
    first: Number
    last: bool
    plain: Number  # blocks with a plain feed-forward
    sparse: Number  # blocks with experts
    flights: Number  # micro-batches of all chunks whose backward has not begun
    embedded: Number  # of them, those of the first chunk
    inputs: Number  # block inputs kept for recomputing, of all flights
    saved_plain: Number  # blocks that keep everything, of all flights
    saved_sparse: Number
    tail_sparse: Number  # whether the first backward's block has experts
    recomputed: Number  # blocks that it computes again at once; 0 = none


class Block(Record, frozen=True, kw_only=True):
    """One rank's share of a block; bytes are of one micro-batch."""

    parameters: int  # all but routed experts
    experts: int  # parameters of the routed ones
    saved: Parts
    total: int  # bytes saved
    dropped: int  # bytes that selective recomputing does not keep
    backward: int  # the most that its backward adds


class Blocks(Record, frozen=True, kw_only=True):
    """The kinds of blocks of a model, and the empty gradients that Transformer Engine keeps."""

    plain: Block
    sparse: Block | None  # with experts; None in a dense model
    placeholders: tuple[int, int, int]  # elements: of plain blocks, of sparse ones, of both


def leave_alike(experts: Experts, stages: Sequence[Stage]) -> list[Stage]:
    """The first of all stages that hold the same: later ones have no more in flight."""
    found: dict[object, Stage] = {}
    for stage in stages:
        kinds = tuple((len(c), count_kinds(experts, c.start, c.stop)) for c in stage.chunks)
        found.setdefault((stage.first, stage.last, kinds), stage)
    return list(found.values())


def count_stage(shape: Shape, settings: Settings, stage: Stage, flights: Sequence[Number]) -> Count:
    """The stage in numbers; flights: micro-batches in flight of each of its chunks."""
    held = [shape.count_kinds(chunk.start, chunk.stop) for chunk in stage.chunks]
    full = settings.recompute == "full"
    inputs: Number = 0
    saved: list[Number] = [0, 0]
    for layers, count in zip(stage.chunks, flights, strict=True):
        recomputed = smaller(settings.recomputed_blocks, len(layers)) if full else 0
        inputs += count * ceil_div(recomputed, settings.recompute_group)
        plain, sparse = shape.count_kinds(layers.start + recomputed, layers.stop)
        saved = [saved[0] + count * plain, saved[1] + count * sparse]
    tail = stage.tail
    whole = full and (settings.recomputed_blocks >= len(tail)) & (len(tail) > 0)
    return Count(
        index=stage.index,
        first=stage.first,
        last=stage.last,
        plain=sum(plain for plain, _ in held),
        sparse=sum(sparse for _, sparse in held),
        flights=sum(flights),
        embedded=flights[0],
        inputs=inputs,
        saved_plain=saved[0],
        saved_sparse=saved[1],
        tail_sparse=shape.count_kinds(tail.start, tail.stop)[1] > 0,
        recomputed=where(whole, min(settings.recompute_group, len(tail)), 0),
    )


def read_blocks(shape: Shape, settings: Settings) -> Blocks:
    """Each kind of block of the model."""
    sparse = bool(shape.experts.count)
    elements = [_placeholders(shape, plain=True, sparse=False)]
    if sparse:
        elements.append(_placeholders(shape, plain=False, sparse=True))
        elements.append(_placeholders(shape, plain=True, sparse=True))
    return Blocks(
        plain=_read_block(shape, settings, moe=False),
        sparse=_read_block(shape, settings, moe=True) if sparse else None,
        placeholders=(elements[0], elements[sparse], elements[2 * sparse]),
    )


def _read_block(shape: Shape, settings: Settings, *, moe: bool) -> Block:
    block = settings.block
    saved = save_block(shape, block, moe=moe)
    total, dropped = sum(saved.values()), 0
    if block.recomputed:
        whole = structs.replace(block, recomputed=frozenset())
        dropped = sum(save_block(shape, whole, moe=moe).values()) - total
    return Block(
        parameters=shape.dense_parameters(moe=moe),
        experts=shape.expert_parameters if moe else 0,
        saved=saved,
        total=total,
        dropped=dropped,
        backward=backward_extra(shape, block, moe=moe),
    )


def count_parameters(shape: Shape, blocks: Blocks, count: Count) -> tuple[Number, Number]:
    """Parameters of one rank: all but routed experts, and routed experts."""
    dense: Number = count.plain * blocks.plain.parameters
    expert: Number = 0
    if blocks.sparse is not None:
        dense += count.sparse * blocks.sparse.parameters
        expert = count.sparse * blocks.sparse.experts
    ends = shape.table + shape.ends.positions * shape.hidden + shape.ends.embedding_norm
    dense += where(count.first, ends, 0)
    if count.last:
        dense += shape.norm * shape.hidden
        # a tied head is the embedding on one stage, a copy with states of its own on two
        dense += where(count.first, 0, shape.table) if shape.ends.tied else shape.table
    return dense, expert


def _count_linears(shape: Shape, count: Count) -> Number:
    """Parameters of a stage's linears, on one rank of a dense model."""
    wide = 2 * (shape.attention.query + shape.attention.keys) + (shape.widen + 1) * shape.ffn
    return (count.plain + count.sparse) * wide * shape.hidden // shape.mesh.tp


def hold_states(shape: Shape, settings: Settings, blocks: Blocks, count: Count) -> Held:
    """Weights, gradients in their contiguous buffers, and the optimizer's shard."""
    dense, expert = count_parameters(shape, blocks, count)
    if settings.block.adapters is not None:
        return _hold_adapted(shape, settings, settings.block.adapters, count, dense)
    both = dense + expert
    cut = dense // shape.mesh.shards + expert // shape.mesh.expert_shards
    among = say(" among {} ranks", shape.mesh.shards).removesuffix(" among 1 ranks")
    more, copies = 0, ""
    if settings.weight != shape.element:
        more = (settings.weight - shape.element) * _count_linears(shape, count)
        copies = f", those of linears {settings.weight} B with what is kept in FP8"
    return {
        (Kind.PARAMETERS, "blocks and tables"): (
            shape.element * both + more,
            say("{} parameters of stage {}, {} B each", both, count.index, shape.element) + copies,
        ),
        (Kind.GRADIENTS, "buffers"): (
            settings.main_gradient * both,
            f"contiguous main gradients, {settings.main_gradient} B a parameter",
        ),
        (Kind.OPTIMIZER_STATE, "optimizer"): (
            settings.state * cut,
            say("master weights and moments, {} B a parameter{}", settings.state, among),
        ),
    }  # fmt: skip


def _hold_adapted(
    shape: Shape, settings: Settings, adapters: Adapters, count: Count, dense: Number
) -> Held:
    """Frozen weights as they are stored, and the states of the adapters alone."""
    each = shape.adapter_parameters(adapters.linears, adapters.rank)
    trained = (count.plain + count.sparse) * each
    linears = _count_linears(shape, count)
    return {
        (Kind.PARAMETERS, "frozen"): (
            settings.weight * linears + shape.element * (dense - linears),
            say(
                "{} frozen parameters: linears {} B each, others {}",
                dense, settings.weight, shape.element,
            ),
        ),
        (Kind.PARAMETERS, "adapters"): (
            shape.element * trained, say("{} parameters", trained)
        ),
        (Kind.GRADIENTS, "adapters"): (settings.main_gradient * trained, "main gradients"),
        (Kind.OPTIMIZER_STATE, "adapters"): (
            settings.state * trained // shape.mesh.shards,
            say("{} B a parameter among {} ranks", settings.state, shape.mesh.shards),
        ),
    }  # fmt: skip


def hold_fixed(shape: Shape, settings: Settings, blocks: Blocks, count: Count) -> Held:
    """What stays from the first step on beside the states."""
    block, e = settings.block, shape.element
    held: Held = {}
    if count.last or block.attention == "eager" or not block.engine:
        held[Kind.WORKSPACE, "cuBLAS"] = (
            2 * settings.workspace, "torch's products: one workspace for the forward's thread, one"
            " for the backward's"
        )  # fmt: skip
    moe = count.sparse > 0
    # the router's product is Transformer Engine's in any case
    streams = where(moe, 1 + GROUPED_STREAMS * (block.engine and settings.grouped), block.engine)
    held[Kind.WORKSPACE, "Transformer Engine"] = (
        streams * settings.engine_workspace, "cuBLASLt's workspaces of its linears"
    )  # fmt: skip
    if block.engine and block.fuses_wgrad and block.adapters is None:
        plain, sparse, both = blocks.placeholders
        held[Kind.WORKSPACE, "placeholders of weight gradients"] = (
            e * where(moe, where(count.plain > 0, both, sparse), plain),
            "Transformer Engine keeps one empty gradient for each shape of weight",
        )
    elif not block.engine and block.attention == "eager":
        scores = (
            e
            * shape.attention.heads
            * shape.tokens
            * shape.rows.sequence
            * shape.mesh.cp
            // shape.mesh.tp
        )
        held[Kind.WORKSPACE, "scores"] = (scores, "a buffer of the local attention's scores")
    if count.last:
        held[Kind.ALL_GATHER, "head"] = (
            where(shape.mesh.sp, e * shape.tokens * shape.hidden, 0),
            "the head gathers its input into a buffer that stays",
        )
    tokens = shape.tokens * (3 * 8 + 4)
    if settings.mask:
        tokens += where(
            count.first | count.last, shape.tokens * shape.rows.sequence * shape.mesh.cp, 0
        )
    held[Kind.INPUT, "batch"] = (tokens, "tokens, labels, loss mask, positions, attention mask")
    return held


def _placeholders(shape: Shape, *, plain: bool, sparse: bool) -> Number:
    """Elements of the distinct shapes of weights of these kinds of blocks' linears."""
    h, tp = shape.hidden, shape.mesh.tp
    seen: list[tuple[Number, Number]] = []
    if shape.attention.latent.kv_rank:
        m = shape.attention.latent
        head = m.unrotated + m.rotated
        seen += [
            (m.kv_rank + m.rotated, h),
            (shape.attention.heads * (m.unrotated + m.value) // tp, m.kv_rank),
            (h, shape.attention.heads * m.value // tp),
        ]
        if m.query_rank:
            seen += [(m.query_rank, h), (shape.attention.heads * head // tp, m.query_rank)]
        else:
            seen.append((shape.attention.heads * head // tp, h))
    else:
        seen += [
            ((shape.attention.query + 2 * shape.attention.keys) // tp, h),
            (h, shape.attention.query // tp),
        ]
    widths = [(shape.ffn, tp)] if plain else []
    if sparse:
        widths += [(shape.experts.ffn, shape.mesh.etp)]
        widths += [(shape.experts.shared_ffn, tp)] if shape.experts.shared_ffn else []
    for width, ranks in widths:
        seen += [(shape.widen * width // ranks, h), (h, width // ranks)]
    total: Number = 0
    for index, (rows, columns) in enumerate(seen):
        new: Number = True
        for other in seen[:index]:
            new = new & ((rows != other[0]) | (columns != other[1]))
        total += where(new, rows * columns, 0)
    return total


def keep_blocks(shape: Shape, blocks: Blocks, count: Count) -> dict[str, Number]:
    """What a stage's blocks keep of the micro-batches in flight, bytes by what they are."""
    total: dict[str, Number] = {"blocks' inputs": count.inputs * shape.stream}
    for part, nbytes in blocks.plain.saved.items():
        total[part] = count.saved_plain * nbytes
    for part, nbytes in (blocks.sparse.saved if blocks.sparse else {}).items():
        total[part] = total.get(part, 0) + count.saved_sparse * nbytes
    return total


def peak_of(phases: Mapping[Phase, Instant]) -> Number:
    """Bytes at the largest instant."""
    return max(sum(nbytes for nbytes, _ in held.values()) for held in phases.values())


def find_flights(shape: Shape, settings: Settings, stage: Stage) -> tuple[Number, ...]:
    """Micro-batches in flight of each chunk of a stage."""
    return count_in_flight(
        stage.index, stages=shape.mesh.pp, chunks=shape.mesh.chunks,
        micro_batches=shape.rows.micro_batches, group=settings.group,
    )  # fmt: skip


def describe_instants(
    shape: Shape, settings: Settings, blocks: Blocks, count: Count
) -> dict[Phase, Held]:
    """What is alive in the loss, in the backward and in the optimizer's step of a stage."""
    fixed = hold_states(shape, settings, blocks, count)
    fixed |= hold_fixed(shape, settings, blocks, count)
    why = say("{} forwards in flight on stage {}", count.flights, count.index)
    parts = keep_blocks(shape, blocks, count)
    saved: Held = {(Kind.ACTIVATIONS, part): (n, why) for part, n in parts.items()}
    if settings.block.hidden_dropout:
        saved[Kind.ACTIVATIONS, "embedding's dropout mask"] = (
            where(count.first, count.embedded * shape.own_tokens * shape.hidden, 0),
            "1 B an element",
        )
    backward = dict(saved) | add_backward(shape, blocks, count)
    phases: dict[Phase, Held] = {}
    if count.last:
        saved[Kind.ACTIVATIONS, "final norm"] = (
            2 * shape.stream, "its input and its output, which the head keeps"
        )  # fmt: skip
        phases[Phase.LOSS] = {**fixed, **saved, **add_loss(shape, settings)}
    phases[Phase.BACKWARD] = {**fixed, **backward}
    extra: Number = 0  # of adapters: a few megabytes
    if settings.step_extra and settings.block.adapters is None:
        dense, expert = count_parameters(shape, blocks, count)
        extra = settings.step_extra * (
            dense // shape.mesh.shards + expert // shape.mesh.expert_shards
        )
    phases[Phase.OPTIMIZER_STEP] = {
        **fixed, (Kind.TEMPORARY, "optimizer"): (extra, "fp32 copies of 16-bit gradients")
    }  # fmt: skip
    return phases


def add_backward(shape: Shape, blocks: Blocks, count: Count) -> Held:
    """Bytes beyond what the forwards saved: the last block's gradients and what it recomputes."""
    plain = blocks.plain
    inside, dropped, total = plain.backward, plain.dropped, plain.total
    if blocks.sparse is not None:
        sparse, moe = blocks.sparse, count.tail_sparse
        inside = where(moe, sparse.backward, inside)
        dropped = where(moe, sparse.dropped, dropped)
        total = where(moe, sparse.total, total)
    # the input of a group that is recomputed whole is kept already
    recomputed = where(count.recomputed > 0, count.recomputed * total - shape.stream, dropped)
    return {
        (Kind.TEMPORARY, "blocks"): (inside, "gradients inside the last block"),
        (Kind.ACTIVATIONS, "computed again"): (recomputed, "of one block, what was not kept"),
    }


def add_loss(shape: Shape, settings: Settings) -> Held:
    """Logits of one micro-batch at the loss's worst instant, of this rank's rows of the table."""
    logits = shape.tokens * shape.ends.vocab // shape.mesh.tp
    e = shape.element
    if settings.loss == "te":
        weight = e * shape.table
        return {
            (Kind.LOGITS, "head"): (e * logits, "the fused loss writes the gradient over them"),
            (Kind.TEMPORARY, "head"): (
                weight + 2 * e * shape.tokens * shape.hidden,
                "the gradients of the head's weight and input",
            ),
        }
    copies = settings.loss_copies + (settings.loss == "native")  # before the exponential, after it
    why = f"16-bit logits and {copies} fp32 tensors of their size, the softmax among them"
    return {(Kind.LOGITS, "head"): ((e + 4 * copies) * logits, why)}
