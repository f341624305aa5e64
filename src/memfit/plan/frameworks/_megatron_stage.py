"""What one pipeline stage holds at the instants where its memory may peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from memfit.ledger import Kind, Phase
from memfit.nouns import Noun
from memfit.plan.frameworks import Instant
from memfit.plan.frameworks._megatron_block import (
    BlockSettings,
    Parts,
    backward_extra,
    save_block,
)
from memfit.plan.frameworks._megatron_shape import Shape
from memfit.plan.frameworks._pipeline import count_in_flight

Held = dict[tuple[Kind, str], tuple[int, str]]  # (kind, owner) -> bytes, because
MIB = 2**20
GROUPED_STREAMS = 4  # on which Transformer Engine runs the products of grouped linears


class Settings(Noun, frozen=True, kw_only=True):
    """How Megatron runs the step, of what more than one stage shares."""

    block: BlockSettings
    recompute: str  # none | selective | full
    recomputed_blocks: int  # the first ones of each stage's chunk, where `full`
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


class Stage(Noun, frozen=True, kw_only=True):
    """One stage: which blocks its chunks hold, and whether it has the embedding or the head."""

    index: int
    chunks: tuple[range, ...]
    first: bool
    last: bool


def count_parameters(shape: Shape, stage: Stage) -> tuple[int, int]:
    """Parameters of one rank: all but routed experts, and routed experts."""
    plain, sparse = _count_kinds(shape, stage)
    dense = plain * shape.dense_parameters(moe=False)
    expert = 0
    if sparse:
        dense += sparse * shape.dense_parameters(moe=True)
        expert = sparse * shape.expert_parameters
    if stage.first:
        dense += shape.table + shape.positions * shape.hidden + shape.embedding_norm
    if stage.last:
        dense += shape.norm * shape.hidden
        # a tied head is the embedding on one stage, a copy with states of its own on two
        dense += 0 if shape.tied and stage.first else shape.table
    return dense, expert


def _count_kinds(shape: Shape, stage: Stage) -> tuple[int, int]:
    """Blocks of a stage with a plain feed-forward, and with experts."""
    kinds = [shape.count_kinds(chunk) for chunk in stage.chunks]
    return sum(plain for plain, _ in kinds), sum(sparse for _, sparse in kinds)


def _count_linears(shape: Shape, stage: Stage) -> int:
    """Parameters of a stage's linears, on one rank of a dense model."""
    layers = sum(len(chunk) for chunk in stage.chunks)
    wide = 2 * (shape.query + shape.keys) + (shape.widen + 1) * shape.ffn
    return layers * wide * shape.hidden // shape.tp


def hold_states(shape: Shape, settings: Settings, stage: Stage) -> Held:
    """Weights, gradients in their contiguous buffers, and the optimizer's shard."""
    dense, expert = count_parameters(shape, stage)
    if settings.block.adapted is not None:
        return _hold_adapted(shape, settings, stage, dense)
    both = dense + expert
    cut = dense // shape.shards + expert // shape.expert_shards
    among = f" among {shape.shards} ranks" if shape.shards > 1 else ""
    more, copies = 0, ""
    if settings.weight != shape.element:
        more = (settings.weight - shape.element) * _count_linears(shape, stage)
        copies = f", those of linears {settings.weight} B with what is kept in FP8"
    return {
        (Kind.PARAMETERS, "blocks and tables"): (
            shape.element * both + more,
            f"{both} parameters of stage {stage.index}, {shape.element} B each{copies}",
        ),
        (Kind.GRADIENTS, "buffers"): (
            settings.main_gradient * both,
            f"contiguous main gradients, {settings.main_gradient} B a parameter",
        ),
        (Kind.OPTIMIZER_STATE, "optimizer"): (
            settings.state * cut,
            f"master weights and moments, {settings.state} B a parameter{among}",
        ),
    }  # fmt: skip


def _hold_adapted(shape: Shape, settings: Settings, stage: Stage, dense: int) -> Held:
    """Frozen weights as they are stored, and the states of the adapters alone."""
    layers = sum(len(chunk) for chunk in stage.chunks)
    adapted, rank = settings.block.adapted or frozenset(), settings.block.adapter_rank
    trained = layers * shape.adapter_parameters(adapted, rank)
    linears = _count_linears(shape, stage)
    return {
        (Kind.PARAMETERS, "frozen"): (
            settings.weight * linears + shape.element * (dense - linears),
            f"{dense} frozen parameters: linears {settings.weight} B each, others {shape.element}",
        ),
        (Kind.PARAMETERS, "adapters"): (shape.element * trained, f"{trained} parameters"),
        (Kind.GRADIENTS, "adapters"): (settings.main_gradient * trained, "main gradients"),
        (Kind.OPTIMIZER_STATE, "adapters"): (
            settings.state * trained // shape.shards,
            f"{settings.state} B a parameter among {shape.shards} ranks",
        ),
    }  # fmt: skip


def hold_fixed(shape: Shape, settings: Settings, stage: Stage) -> Held:
    """What stays from the first step on beside the states."""
    block, e = settings.block, shape.element
    held: Held = {}
    matmuls = stage.last or block.attention == "eager" or not block.engine
    if matmuls:
        held[Kind.WORKSPACE, "cuBLAS"] = (
            2 * settings.workspace, "torch's products: one workspace for the forward's thread, one"
            " for the backward's"
        )  # fmt: skip
    moe = _count_kinds(shape, stage)[1] > 0
    if block.engine or moe:  # the router's product is Transformer Engine's in any case
        streams = 1 + GROUPED_STREAMS * (block.engine and moe and settings.grouped)
        held[Kind.WORKSPACE, "Transformer Engine"] = (
            streams * settings.engine_workspace, "cuBLASLt's workspaces of its linears"
        )  # fmt: skip
    if block.engine:
        held[Kind.WORKSPACE, "placeholders of weight gradients"] = (
            e * _placeholders(shape, stage) if block.fuses_wgrad and block.adapted is None else 0,
            "Transformer Engine keeps one empty gradient for each shape of weight",
        )
    elif block.attention == "eager":
        scores = e * shape.heads * shape.tokens * shape.sequence * shape.cp // shape.tp
        held[Kind.WORKSPACE, "scores"] = (scores, "a buffer of the local attention's scores")
    if shape.sp and stage.last:
        held[Kind.ALL_GATHER, "head"] = (
            e * shape.tokens * shape.hidden, "the head gathers its input into a buffer that stays"
        )  # fmt: skip
    tokens = shape.tokens * (3 * 8 + 4)
    if settings.mask and (stage.first or stage.last):
        tokens += shape.tokens * shape.sequence * shape.cp
    held[Kind.INPUT, "batch"] = (tokens, "tokens, labels, loss mask, positions, attention mask")
    return held


def _placeholders(shape: Shape, stage: Stage) -> int:
    """Elements of the distinct shapes of weights of a stage's linears."""
    h, tp = shape.hidden, shape.tp
    plain, sparse = _count_kinds(shape, stage)
    seen: set[tuple[int, int]] = set()
    if shape.latent.kv_rank:
        m = shape.latent
        head = m.unrotated + m.rotated
        seen |= {
            (m.kv_rank + m.rotated, h),
            (shape.heads * (m.unrotated + m.value) // tp, m.kv_rank),
        }
        seen |= {(h, shape.heads * m.value // tp)}
        if m.query_rank:
            seen |= {(m.query_rank, h), (shape.heads * head // tp, m.query_rank)}
        else:
            seen |= {(shape.heads * head // tp, h)}
    else:
        seen |= {((shape.query + 2 * shape.keys) // tp, h), (h, shape.query // tp)}
    widths = [(shape.ffn, tp)] if plain else []
    if sparse:
        widths += [(shape.experts.ffn, shape.etp)]
        widths += [(shape.experts.shared_ffn, tp)] if shape.experts.shared_ffn else []
    for width, ranks in widths:
        seen |= {(shape.widen * width // ranks, h), (h, width // ranks)}
    return sum(rows * columns for rows, columns in seen)


def keep_blocks(
    shape: Shape, settings: Settings, chunks: Sequence[range], flights: Sequence[int]
) -> Parts:
    """What the chunks' blocks keep of so many micro-batches in flight each."""
    total: Parts = {}
    inputs = plain = sparse = 0
    for layers, count in zip(chunks, flights, strict=True):
        again = min(settings.recomputed_blocks, len(layers)) if settings.recompute == "full" else 0
        inputs += count * -(-again // settings.recompute_group)
        kinds = shape.count_kinds(layers[again:])
        plain += count * kinds[0]
        sparse += count * kinds[1]
    if inputs:
        total["blocks' inputs"] = inputs * shape.stream
    for moe, blocks in ((False, plain), (True, sparse)):
        if blocks:
            for part, nbytes in save_block(shape, settings.block, moe=moe).items():
                total[part] = total.get(part, 0) + blocks * nbytes
    return total


def peak_of(phases: Mapping[Phase, Instant]) -> int:
    """Bytes at the largest instant."""
    return max(sum(nbytes for nbytes, _ in held.values()) for held in phases.values())


def describe_instants(shape: Shape, settings: Settings, stage: Stage) -> dict[Phase, Held]:
    """What is alive in the loss, in the backward and in the optimizer's step of a stage."""
    fixed = hold_states(shape, settings, stage) | hold_fixed(shape, settings, stage)
    flights = count_in_flight(
        stage.index, stages=shape.pp, chunks=shape.chunks, micro_batches=shape.micro_batches,
        group=settings.group,
    )  # fmt: skip
    why = f"{sum(flights)} forwards in flight on stage {stage.index}"
    parts = keep_blocks(shape, settings, stage.chunks, flights)
    kept: Held = {(Kind.ACTIVATIONS, part): (n, why) for part, n in parts.items()}
    if stage.first and settings.block.hidden_dropout:
        kept[Kind.ACTIVATIONS, "embedding's dropout mask"] = (
            flights[0] * shape.own_tokens * shape.hidden, "1 B an element"
        )  # fmt: skip
    last = stage.chunks[-1] if stage.chunks[-1] else stage.chunks[0]
    backward = dict(kept) | add_backward(shape, settings, last)
    phases: dict[Phase, Held] = {}
    if stage.last:
        kept[Kind.ACTIVATIONS, "final norm"] = (
            2 * shape.stream, "its input and its output, which the head keeps"
        )  # fmt: skip
        phases[Phase.LOSS] = {**fixed, **kept, **add_loss(shape, settings)}
    phases[Phase.BACKWARD] = {**fixed, **backward}
    dense, expert = count_parameters(shape, stage)
    extra = settings.step_extra * (dense // shape.shards + expert // shape.expert_shards)
    if settings.block.adapted is not None:
        extra = 0  # a few megabytes
    phases[Phase.OPTIMIZER_STEP] = {
        **fixed, (Kind.TEMPORARY, "optimizer"): (extra, "fp32 copies of 16-bit gradients")
    }  # fmt: skip
    return phases


def add_backward(shape: Shape, settings: Settings, layers: range) -> Held:
    """Beyond what the forwards kept: the last block's gradients, and what it computes again."""
    moe = shape.count_kinds(layers)[1] > 0
    recomputed = settings.recompute == "full" and settings.recomputed_blocks >= len(layers) > 0
    block = settings.block
    again = 0
    if block.recomputed:
        whole = structs.replace(block, recomputed=frozenset())
        again = sum(save_block(shape, whole, moe=moe).values())
        again -= sum(save_block(shape, block, moe=moe).values())
    if recomputed:
        group = min(settings.recompute_group, len(layers))
        again = group * sum(save_block(shape, settings.block, moe=moe).values())
        again -= shape.stream  # the group's input is kept already
    return {
        (Kind.TEMPORARY, "blocks"): (
            backward_extra(shape, block, moe=moe), "gradients inside the last block"
        ),
        (Kind.ACTIVATIONS, "computed again"): (again, "of one block, what was not kept"),
    }  # fmt: skip


def add_loss(shape: Shape, settings: Settings) -> Held:
    """Logits of one micro-batch at the loss's worst instant, of this rank's rows of the table."""
    logits = shape.tokens * shape.vocab // shape.tp
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
