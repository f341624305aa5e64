"""nanotron's step: bf16 weights, gradients and master weights in fp32, ZeRO-1, 1F1B.

Read from huggingface/nanotron at e24d248 (February 2025, the code of the Ultrascale Playbook's
runs); files named below are under `src/nanotron`.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, final

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.core.units import GIB
from memfit.plan.frameworks import Framework, Job, Knob, Slack, TimeTraits, frameworks, make_ledger
from memfit.plan.frameworks.shared.pipeline import deal_by_cost
from memfit.plan.frameworks.shared.plain import plain_values
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.model import Architecture

# The CPU launches ahead of the device until 1024 launches wait; a pass over a block is about 43.
AHEAD = 24  # passes over a block, forward or backward
LAUNCH = 1e-3  # seconds that the CPU takes to launch one
USED_FLOPS, USED_LINK = 0.4, 2 / 3  # of the datasheet's, for what a pass takes the device
BEYOND_NODE = 40e9  # bytes/s of a rank, where tensor parallelism leaves the node
NODE = 8
OUTSIDE = 4 * GIB  # context and NCCL's five groups: world, data, tensor, pipeline, model

Parts = dict[tuple[Kind, str], tuple[int, str]]


class Stage(NamedTuple):
    """What one pipeline rank holds; sizes are of its share under tensor parallelism."""

    blocks: int
    first: bool
    last: bool
    in_flight: int  # micro-batches whose activations wait for their backward
    waiting: int  # micro-batches that the CPU can have launched before the first backward
    embedding: int  # elements
    head: int  # elements; 0 where the weights are the embedding's
    block: int  # elements of one block

    @property
    def parameters(self) -> int:
        """Elements that this rank holds."""
        return self.embedding + self.head + self.blocks * self.block


@final
class Nanotron(Framework):
    """`run_train.py` with a Llama config: flash attention, Triton's RMSNorm, fused Adam."""

    name = "nanotron"
    title = "nanotron"
    source = "huggingface/nanotron e24d248"
    time = TimeTraits(always_cuts_tokens=True, deals_by_cost=True)
    values: ClassVar = plain_values(implementation=("fused", "foreach"))
    cuts = 1
    axes = ("dp_replicate", "dp_shard", "zero", "tp", "sequence_parallel", "pp")
    knobs = {  # noqa: RUF012
        "pipeline": Knob(
            default="1f1b", values=("1f1b", "afab"), means="`parallelism.pp_engine`: the schedule"
        ),
        "recompute_allgather": Knob(
            default=True, means="`tp_recompute_allgather`: gathered inputs are gathered again"
        ),
        "async_communication": Knob(
            default=False, means="`tp_linear_async_communication`: collectives beside products"
        ),
        "rank": Knob(
            default="fullest", values=("fullest", "first"),
            means="whose memory: of all ranks, or rank 0's, which alone nanotron writes down",
        ),
    }  # fmt: skip
    slack = Slack(
        low=0.98, typical=1.04, high=1.13,
        source="fitted: rows of huggingface/nanotron with split `fit`; 1st to 9th decile",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """Refuse what `trainer.py` cannot do."""
        p, a = job.recipe.parallel, job.model.architecture
        if p.dp_shard > 1 and p.zero != 1:
            raise InvalidRequest(
                f"`parallel.zero: {p.zero}` is not in nanotron, which has ZeRO-1 or none",
                hint="`zero: 1` cuts the optimizer's states; name `dp_replicate` for none",
            )
        if p.dp_shard > 1 and p.dp_replicate > 1:
            raise InvalidRequest(
                f"`parallel.dp_replicate: {p.dp_replicate}` beside `dp_shard: {p.dp_shard}`:"
                " nanotron cuts states among all data-parallel ranks or among none",
                hint="name one of the two",
            )
        if a.experts.count or a.latent.kv_rank:
            raise InvalidRequest(
                f"`{job.model.name}` has experts or latent attention, which nanotron's Llama has"
                " not",
                hint="a dense decoder with grouped attention is described",
            )
        for what, n in (("heads", a.heads), ("key-value heads", a.kv_heads), ("vocab", a.vocab)):
            if n % p.tp:
                raise InvalidRequest(
                    f"`parallel.tp: {p.tp}` does not divide {n} {what} of `{job.model.name}`",
                    hint="nanotron gives each tensor-parallel rank equally many",
                )

    def predict(self, job: Job) -> Ledger:
        """The largest rank's ledger; pipeline ranks differ in blocks, micro-batches and logits."""
        ranks = range(job.recipe.parallel.pp)
        if job.option("rank") == "first":
            ranks = range(1)
        ledgers = (_stage_ledger(job, rank) for rank in ranks)
        # of a small model with a large vocabulary, a rank may be dealt no block, and hold nothing
        return max(ledgers, key=lambda ledger: ledger.peak if ledger.entries else 0)


def _stage_ledger(job: Job, rank: int) -> Ledger:
    stage, states = find_stage(job, rank), _states(job, rank)
    parallel, a, tokens = job.recipe.parallel, job.model.architecture, job.recipe.tokens
    n = stage.parameters
    forward = states | _activations(job, stage)
    if stage.last:
        forward[Kind.LOGITS, "head"] = (
            10 * (tokens * a.vocab // parallel.tp),
            "bf16, their fp32 copy and the softmax kept for the backward: 2 + 4 + 4 B a logit"
            " (tensor_parallel/functional.py)",
        )
    embedding_gradient = 2 * stage.embedding if stage.first and not stage.last else 0
    forward[Kind.FRAGMENTATION, "embedding"] = (
        embedding_gradient,
        "the embedding's bf16 gradient is larger than any block that the forward frees",
    )
    forward[Kind.FRAGMENTATION, "collectives"] = (_pending(job, stage), PENDING)
    backward = states | {
        (Kind.ACTIVATIONS, "blocks"): (
            (stage.in_flight - 1) * stage.blocks * saved_bytes(job),
            f"{stage.in_flight - 1} micro-batches that still wait for their backward",
        ),
        (Kind.GRADIENTS, "bf16"): (2 * n, "bf16 gradients, added to the fp32 ones at the end"),
    }
    step = states | _optimizer_step(job, stage)
    first_step = (  # cached blocks of the first forward; Adam's states come after it
        sum(size for size, _ in forward.values())
        - forward[Kind.FRAGMENTATION, "collectives"][0]  # the CPU is slow in a first step
        - _adam(job, n)
        + _own_segments(job, stage)
    )
    extra = first_step - sum(size for size, _ in step.values())
    memory = job.device.memory
    if memory is not None and first_step * Nanotron.slack.typical > memory - OUTSIDE:
        extra = 0  # cached blocks go back to the driver instead
    step[Kind.FRAGMENTATION, "cache"] = (
        max(0, extra),
        "cached blocks of the forward, too small for the buffers of the step",
    )
    last = Phase.LOSS if stage.last else Phase.FORWARD
    return make_ledger({last: forward, Phase.BACKWARD: backward, Phase.OPTIMIZER_STEP: step})


PENDING = (
    "blocks that a collective may still read: the CPU runs ahead of the device, and what another"
    " stream uses is not given out again before that stream has caught up"
)


def find_stage(job: Job, rank: int) -> Stage:
    """Blocks by their cost, as `models/base.py` deals them: matrix sizes, the head's included.

    A stage is full when its costs reach its share of all. (The code compares with `>`; the runs
    of the playbook, whose shares come out even, hold a block fewer than that gives.)
    """
    p, a = job.recipe.parallel, job.model.architecture
    cost = 4 * a.hidden * a.heads * a.head_dim + 3 * a.ffn * a.hidden
    counts = deal_by_cost(a.layers, cost, a.vocab * a.hidden, p.pp)
    first, last = rank == 0, rank == p.pp - 1
    micro = job.recipe.accumulation
    warm = micro if job.option("pipeline") == "afab" else min(p.pp - rank, micro)
    table = a.vocab * a.hidden // p.tp
    tied_here = a.tied_embeddings and first
    return Stage(
        blocks=counts[rank], first=first, last=last, in_flight=warm,
        waiting=warm if micro <= p.pp else 2 * warm,
        embedding=table if first else 0,
        head=table if last and not tied_here else 0,
        block=_block_elements(a, p.tp),
    )  # fmt: skip


def _block_elements(a: Architecture, tp: int) -> int:
    heads = a.hidden * a.head_dim * (2 * a.heads + 2 * a.kv_heads)
    return (heads + 3 * a.hidden * a.ffn) // tp + 2 * a.hidden


def _adam(job: Job, n: int) -> int:
    return 8 * n // job.recipe.parallel.dp_shard


def _states(job: Job, rank: int) -> Parts:
    p, n = job.recipe.parallel, find_stage(job, rank).parameters
    cut = f" / {p.dp_shard} (ZeRO-1)" if p.dp_shard > 1 else ""
    parts: Parts = {
        (Kind.PARAMETERS, "bf16"): (2 * n, f"{n:,} weights x 2 B"),
        (Kind.OPTIMIZER_STATE, "master"): (
            4 * n // p.dp_shard,
            f"fp32 master weights: {n:,} x 4 B{cut}",
        ),
        (Kind.OPTIMIZER_STATE, "adam"): (_adam(job, n), f"two fp32 moments: {n:,} x 8 B{cut}"),
        (Kind.GRADIENTS, "fp32"): (
            4 * n,
            "fp32 gradients of all weights, whatever ZeRO cuts (optim/gradient_accumulator.py)",
        ),
    }
    if p.dp_replicate > 1:
        parts[Kind.GRADIENTS, "buckets"] = (
            2 * n,
            "DDP's bf16 buckets; with ZeRO there is no DDP (trainer.py)",
        )
    return parts


def saved_bytes(job: Job) -> int:
    """Bytes that one block keeps of one micro-batch until its backward (models/llama.py).

    Per token: two norms keep their inputs, two projections theirs; queries (as a view of all
    three where each query has its own key), keys and values joined, the output and its
    log-sum-exp; gate and up side by side, silu's output, the product.
    """
    r, a = job.recipe, job.model.architecture
    t = r.parallel.tp
    cut = t if r.parallel.sequence_parallel else 1
    stream = 2 * a.hidden  # one bf16 tensor as wide as the model
    if r.recompute_blocks:
        return r.tokens * stream // cut
    ways = cut if job.option("recompute_allgather") else 1
    q, kv = 2 * a.heads * a.head_dim, 2 * a.kv_heads * a.head_dim
    queries = q + 2 * kv if a.heads == a.kv_heads else q
    attention = queries + 2 * kv + q + 4 * a.heads
    if t > 1 and cut == 1 and r.micro_batch > 1:
        attention += q  # the output projection's input, made contiguous
    each = (2 * stream + 8) / cut + 2 * stream / ways + (attention + 8 * a.ffn) / t
    return round(r.tokens * each)


def _activations(job: Job, stage: Stage) -> Parts:
    blocks = stage.blocks * stage.in_flight
    saved = blocks * saved_bytes(job)
    parts: Parts = {
        (Kind.ACTIVATIONS, "blocks"): (
            saved,
            f"{stage.blocks} blocks x {stage.in_flight} micro-batches in flight",
        ),
    }
    if job.recipe.recompute_blocks:
        bare = replace(job, recipe=replace(job.recipe, recompute_blocks=0))
        parts[Kind.ACTIVATIONS, "recomputed block"] = (saved_bytes(bare), "one block, run again")
    return parts


def _pending(job: Job, stage: Stage) -> int:
    """Bytes of freed blocks that a tensor-parallel collective may still use.

    A pass over a block frees the inputs (whole) and outputs (cut) of two collectives. How many
    passes the CPU is ahead: what the launch queue takes, less what the device does meanwhile.
    """
    r, a = job.recipe, job.model.architecture
    t = r.parallel.tp
    if t == 1 or not r.parallel.sequence_parallel:
        return 0
    link = job.device.link.unidirectional
    flops = job.device.flops.get("bf16")
    if link is None or flops is None:
        return 0
    moved = 8 * r.tokens * a.hidden * 2 * (1 - 1 / t)
    pass_seconds = 2 * stage.block * r.tokens / (flops * USED_FLOPS)
    pass_seconds += moved / (link * USED_LINK if t <= NODE else BEYOND_NODE)
    passes = min(AHEAD, stage.blocks * stage.waiting) * max(0.0, 1 - LAUNCH / pass_seconds)
    return round(passes * r.tokens * (4 * a.hidden + 4 * a.hidden / t))


def _largest_cached(job: Job, stage: Stage) -> int:
    """The largest block that the forward leaves in the cache: logits, or gate beside up."""
    r, a = job.recipe, job.model.architecture
    return 4 * r.tokens * (a.vocab if stage.last else a.ffn) // r.parallel.tp


def _optimizer_step(job: Job, stage: Stage) -> Parts:
    """Buffers that `ZeroDistributedOptimizer` gathers the new weights through (optim/zero.py)."""
    shards, n = job.recipe.parallel.dp_shard, stage.parameters
    parts: Parts = {}
    if job.recipe.optimizer.implementation == "foreach":
        parts[Kind.TEMPORARY, "adam"] = (4 * n // shards, "square roots of all second moments")
    if shards > 1:
        parts[Kind.ALL_GATHER, "weights"] = (
            4 * n + 2 * n // shards,
            "new bf16 weights: one buffer a rank, NCCL's flat one, and this rank's own share",
        )
    return parts


def _own_segments(job: Job, stage: Stage) -> int:
    """Bytes of a first optimizer step that no cached block of the forward can hold."""
    p, a = job.recipe.parallel, job.model.architecture
    limit, n, shards = _largest_cached(job, stage), stage.parameters, p.dp_shard
    taken = 0
    if shards > 1:
        taken += 2 * n if 2 * n > limit else 0
        taken += 2 * n + 2 * n // shards if 2 * n // shards > limit else 0
    width = a.hidden // p.tp
    qkv = width * a.head_dim * (a.heads + 2 * a.kv_heads)
    matrices = (
        (stage.embedding, 1), (stage.head, 1), (2 * width * a.ffn, stage.blocks),
        (width * a.ffn, stage.blocks), (qkv, stage.blocks),
    )  # fmt: skip
    for elements, count in matrices:
        each = 4 * elements // shards
        taken += 2 * each * count if each > limit else 0
    return taken


frameworks.register("nanotron")(Nanotron())
