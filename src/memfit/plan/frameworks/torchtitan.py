"""torchtitan's step: FSDP2 in mixed precision, with tensor, context and pipeline parallelism.

Read from pytorch/torchtitan between December 2024 and August 2025 (`parallelize.py` of llama3,
`train.py`, `components/loss.py`, `distributed/activation_checkpoint.py`); what changed in between
goes by `options.version`, the year and month of the code.
"""

from __future__ import annotations

from typing import NamedTuple, final

from memfit.errors import InvalidRequest, MemoryUnknown
from memfit.ledger import Kind, Ledger, Phase
from memfit.model import Model
from memfit.plan.clock.orders import count_held, find_schedule
from memfit.plan.frameworks import Framework, Job, Knob, Slack, frameworks, make_ledger
from memfit.plan.frameworks._fsdp import Buffers, Unit, gathered
from memfit.plan.frameworks._pipeline import deal_sizes

NATIVE_NORM = 202503  # torch's RMSNorm instead of one in Python (#985)
COMPILED_LOSS = 202504  # the loss is compiled where blocks are (#1033)
ENDS_APART = 202507  # embedding, and norm with head, are units of their own (#1094)

Parts = dict[tuple[Kind, str], tuple[int, str]]


class Stage(NamedTuple):
    """What a pipeline rank holds; elements are of its share under tensor parallelism."""

    blocks: tuple[int, ...]  # in each of its pieces of the model
    in_flight: tuple[int, ...]  # micro-batches of each piece that wait for their backward
    block: int  # elements of one block
    embedding: int
    head: int  # with the final norm; 0 where another rank has it
    last: bool

    @property
    def parameters(self) -> int:
        """Elements that this rank's data-parallel group holds together."""
        return sum(self.blocks) * self.block + self.embedding + self.head


@final
class Torchtitan(Framework):
    """`torchtitan/train.py` with a dense decoder: Llama 3 and what is built like it."""

    name = "torchtitan"
    title = "torchtitan"
    source = "pytorch/torchtitan 9dec370 (2024-12), e7c0cae (2025-06), 6fc499f (2025-08)"
    values = {  # noqa: RUF012
        "precision": ("bf16-mixed", "fp8-mixed"),
        "method": ("full",),
        "base_format": ("fp32",),
        "optimizer": ("adamw",),
        "implementation": ("fused", "foreach", "loop"),
        "recompute": ("selective", "full", "none"),
        "attention": ("flash", "cudnn"),
        "loss": ("plain",),
        "compile": ("none", "blocks"),
        "offload": ("none",),
    }
    axes = (
        "dp_replicate", "dp_shard", "tp", "sequence_parallel", "cp", "pp", "virtual_pp",
    )  # fmt: skip
    knobs = {  # noqa: RUF012
        "version": Knob(default=202508, means="year and month of the code, such as 202412"),
        "pipeline_schedule": Knob(
            default="1F1B", means="the order of a pipeline's pieces",
            values=("1F1B", "Interleaved1F1B", "GPipe", "ZBVZeroBubble", "InterleavedZeroBubble"),
        ),
        # what follows changes the time of a step alone
        "async_tp": Knob(default=False, means="tp's collectives run beside its products"),
        "float8_recipe": Knob(
            default="tensorwise", means="how FP8 values are scaled, of `precision: fp8-mixed`",
            values=("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"),
        ),
        "float8_all_gather": Knob(default=False, means="weights are gathered in FP8"),
        "cp_rotate": Knob(
            default="allgather", means="how keys and values reach the other cp ranks",
            values=("allgather", "alltoall"),
        ),
    }  # fmt: skip
    slack = Slack(
        low=0.97, typical=1.04, high=1.15,
        source="fitted: rows of pytorch/torchtitan and pytorch/ao with split `fit`; their range",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """Refuse what `parallelize.py` does otherwise, or what is not read."""
        p, a = job.recipe.parallel, job.model.architecture
        if p.tp > 1 and not p.sequence_parallel:
            raise InvalidRequest(
                f"`parallel.tp: {p.tp}` without `sequence_parallel: true`: torchtitan has none",
                hint="between products, its tensor parallelism cuts the tokens",
            )
        if a.experts.count or a.latent.kv_rank:
            raise InvalidRequest(
                f"`{job.model.name}` has experts or latent attention; of torchtitan, only dense"
                " decoders are described",
                hint="",
            )
        for what, n in (("heads", a.heads), ("key-value heads", a.kv_heads), ("vocab", a.vocab)):
            if n % p.tp:
                raise InvalidRequest(
                    f"`parallel.tp: {p.tp}` does not divide {n} {what} of `{job.model.name}`",
                    hint="cuts of unequal size are not described",
                )

    def predict(self, job: Job) -> Ledger:
        """The largest pipeline rank's ledger."""
        if job.recipe.parallel.pp > 1 and find_schedule(job.recipe).kind in ("zb-h1", "zb-v"):
            raise MemoryUnknown(
                f"`options.pipeline_schedule: {job.option('pipeline_schedule')}`: what the"
                " weights' backward waits with is not described"
            )
        elements = count(job.model)
        stages = (find_stage(job, rank, elements) for rank in range(job.recipe.parallel.pp))
        ledgers = (_stage_ledger(job, stage) for stage in stages)
        return max(ledgers, key=lambda ledger: ledger.peak)


def _stage_ledger(job: Job, stage: Stage) -> Ledger:
    shards = job.recipe.parallel.dp_shard * job.recipe.parallel.cp
    buffers = gathered(units(job, stage), 2, 4, shards)
    held = _states(stage.parameters, shards)
    held |= _kept(job, stage) | _whole(job, stage, buffers)
    loss = held | (_loss(job, stage) if stage.last else {})
    backward = held | _backward(job, stage, buffers)
    step = _states(stage.parameters, shards)
    if job.recipe.optimizer.implementation == "foreach":
        local = 4 * stage.parameters // shards
        step[Kind.TEMPORARY, "adam"] = (local, "square roots of all second moments")
    return make_ledger({Phase.LOSS: loss, Phase.BACKWARD: backward, Phase.OPTIMIZER_STEP: step})


class Elements(NamedTuple):
    """Elements of a model's parts."""

    block: int
    embedding: int
    head: int  # 0 where the embedding's weights serve
    norm: int


def count(model: Model) -> Elements:
    """Elements of a block (all alike), the embedding, the head and the final norm."""
    sums = {"embedding": 0, "head": 0, "norm": 0}
    block = 0
    for weight in model.weights:
        if weight.layer == 0:
            block += weight.numel
        elif weight.layer < 0:
            sums[weight.part] += weight.numel
    return Elements(block, sums["embedding"], sums["head"], sums["norm"])


def find_stage(job: Job, rank: int, e: Elements) -> Stage:
    """Blocks of a pipeline rank: equal pieces, the first and the last without the remainder.

    From `generate_split_points`: the remainder goes to the middle pieces, one block each.
    """
    p = job.recipe.parallel
    layers, pieces = job.model.architecture.layers, p.pp * p.virtual_pp
    each, more = divmod(layers, pieces)
    sizes = [each + (0 < i <= more) for i in range(pieces)]
    sizes[-1] = layers - sum(sizes[:-1])
    mine = deal_sizes(sizes, p.pp)[rank]
    first, last = rank == 0, rank == p.pp - 1
    tied_twice = e.embedding if not e.head and p.pp > 1 else 0
    head = (e.head or tied_twice) + e.norm if last else 0
    in_flight = count_held(find_schedule(job.recipe), rank)
    return Stage(
        blocks=tuple(len(piece) for piece in mine),
        in_flight=in_flight if p.pp > 1 else (1,),
        block=e.block // p.tp, embedding=e.embedding // p.tp if first else 0,
        head=head // p.tp, last=last,
    )  # fmt: skip


def units(job: Job, stage: Stage) -> tuple[Unit, ...]:
    """`apply_fsdp`'s units in forward order; a pipeline keeps all of them whole."""
    pipeline = job.recipe.parallel.pp > 1
    apart = job.option("version") >= ENDS_APART  # type: ignore[operator]
    blocks = [Unit(stage.block, pipeline)] * sum(stage.blocks)
    if not apart:  # the last block is gathered again at once, and the root stays whole
        blocks[-1] = Unit(stage.block, True)
        return (Unit(stage.embedding + stage.head, True), *blocks)
    return (Unit(stage.embedding, pipeline), *blocks, Unit(stage.head, True))


def _states(n: int, shards: int) -> Parts:
    cut = f" / {shards} ranks" if shards > 1 else ""
    return {
        (Kind.PARAMETERS, "shards"): (4 * n // shards, f"{n:,} fp32 weights x 4 B{cut}"),
        (Kind.OPTIMIZER_STATE, "adam"): (
            8 * n // shards,
            f"two fp32 moments: {n:,} weights x 8 B{cut}",
        ),
        (Kind.GRADIENTS, "shards"): (
            4 * n // shards,
            f"{n:,} fp32 gradients x 4 B{cut}; their pool is the reduce-scatter stream's, so that"
            " no other phase can use it",
        ),
    }


def _tokens(job: Job) -> int:
    """Tokens of one micro-batch on one rank: context parallelism cuts the sequence."""
    return job.recipe.tokens // job.recipe.parallel.cp


def saved_per_token(job: Job) -> int:
    """Bytes that one block without recomputing keeps of a token.

    Two norms (torch's: the input; one in Python: the input in fp32 and the normed one in bf16;
    both one fp32 number a row), the inputs of two groups of projections, whole; queries, keys and
    values of all heads (`repeat_kv`), the output, its log-sum-exp; both halves of the gate, silu's
    output (compiled, it is computed again) and the product.
    """
    r, a = job.recipe, job.model.architecture
    t, h = r.parallel.tp, a.hidden
    compiled = r.compile == "blocks"
    python_norm = not compiled and job.option("version") < NATIVE_NORM  # type: ignore[operator]
    norms = (2 * (6 if python_norm else 2) * h + 8) / t
    cut = 8 * a.heads * a.head_dim + 4 * a.heads + (6 if compiled else 8) * a.ffn
    return round(norms + 4 * h + cut / t)


def saved_by_policy(job: Job) -> int:
    """Bytes of a token that per-op checkpointing keeps of one block (`_save_list`).

    The block's input; every other matrix product: queries, values, the gate's first half, the
    block's last one (compiled code drops it: nothing needs it again); attention's output and
    log-sum-exp, where its operation is on the list (cuDNN's is not). Products in fp8 are the same
    operations to the policy.
    """
    r, a = job.recipe, job.model.architecture
    t, q, kv = r.parallel.tp, a.heads * a.head_dim, a.kv_heads * a.head_dim
    products = 2 * q + 2 * kv + 2 * a.ffn
    attention = 2 * q + 4 * a.heads if r.attention == "flash" else 0
    stream = 2 * a.hidden if r.compile == "none" and t == 1 else 0
    scattered = 2 * 2 * a.hidden // t if t > 1 else 0  # outputs of reduce-scatters are listed too
    return round(2 * a.hidden / t + (products + attention) / t + stream + scattered)


def _kept(job: Job, stage: Stage) -> Parts:
    """Activations of all micro-batches in flight."""
    r, a, t = job.recipe, job.model.architecture, job.recipe.parallel.tp
    tokens = _tokens(job)
    boundary = 2 * a.hidden // t
    again = min(r.recompute_blocks, a.layers) / a.layers
    lean = boundary if r.recompute == "full" else saved_by_policy(job)
    each = again * lean + (1 - again) * saved_per_token(job) if again < 1 else lean
    blocks = sum(n * m for n, m in zip(stage.blocks, stage.in_flight, strict=True))
    kept = round(tokens * each) * blocks
    how = "recomputed but for its input" if r.recompute == "full" else "the policy's operations"
    parts: Parts = {
        (Kind.ACTIVATIONS, "blocks"): (kept, f"{blocks} blocks x {tokens:,} tokens: {how}")
    }
    if stage.last and r.parallel.pp > 1:  # torch.distributed.pipelining: `output_chunks`
        logits = 2 * tokens * a.vocab // t * (r.accumulation - 1)
        parts[Kind.LOGITS, "outputs"] = (logits, "bf16 logits of the step's other micro-batches")
    if r.parallel.pp > 1:
        parts[Kind.INPUT, "pipeline"] = _between_stages(job, stage, tokens * boundary)
    return parts


def _between_stages(job: Job, stage: Stage, each: int) -> tuple[int, str]:
    """What `torch.distributed.pipelining` holds of a stage's ends; each: bytes of one tensor.

    Outputs wait with their micro-batch; tensors to receive into are made for all micro-batches
    when the schedule starts, for inputs and for gradients.
    """
    pieces, micro = len(stage.blocks), job.recipe.accumulation
    first, last = bool(stage.embedding), stage.last
    inputs = (pieces - first) * micro - (sum(stage.in_flight) - first * stage.in_flight[0])
    gradients = (pieces - last) * micro
    tensors = max(0, inputs) + gradients + sum(stage.in_flight)
    return tensors * each, f"{tensors} tensors between stages: sent, or to be received into"


def _whole(job: Job, stage: Stage, buffers: Buffers) -> Parts:
    parts: Parts = {
        (Kind.ALL_GATHER, "whole weights"): (buffers.whole, "bf16, kept until their backward"),
        (Kind.FRAGMENTATION, "gather stream"): (
            buffers.gather_pool,
            "flat outputs of two gathers in a row, in the pool of their stream",
        ),
    }
    if job.recipe.parallel.pp > 1:
        parts[Kind.GRADIENTS, "whole"] = (
            4 * stage.parameters,
            "fp32 sums over micro-batches: gradients are reduced in the last one alone",
        )
    return parts


def _loss(job: Job, stage: Stage) -> Parts:
    """The final norm, logits and cross-entropy (`components/loss.py`), when the most is alive."""
    r, a, t = job.recipe, job.model.architecture, job.recipe.parallel.tp
    version, tokens = job.option("version"), _tokens(job)
    logits = tokens * a.vocab // t
    norm = (8 if version < NATIVE_NORM else 4) * a.hidden / t  # type: ignore[operator]
    norm += 2 * a.hidden if t > 1 else 0
    parts: Parts = {
        (Kind.ACTIVATIONS, "norm"): (round(tokens * norm), "the final norm and the head's input")
    }
    if r.compile == "blocks" and version >= COMPILED_LOSS and t == 1:  # type: ignore[operator]
        parts[Kind.LOGITS, "loss"] = (4 * logits, "compiled: bf16 logits and their gradient")
        return parts
    if t > 1:
        parts[Kind.LOGITS, "loss"] = (
            16 * logits,
            "loss parallel, fp32: log-softmax, its gradient, the exponential, their sum",
        )
    else:
        parts[Kind.LOGITS, "loss"] = (
            12 * logits,
            "fp32: log-softmax, its gradient, the logits' gradient",
        )
    parts[Kind.FRAGMENTATION, "loss"] = (
        2 * logits,
        "the freed block of the bf16 logits is too small for fp32 ones",
    )
    return parts


def _backward(job: Job, stage: Stage, buffers: Buffers) -> Parts:
    """The last block's backward: gradients on their way, and what recomputing builds."""
    r, a, t = job.recipe, job.model.architecture, job.recipe.parallel.tp
    tokens = _tokens(job)
    parts: Parts = {
        (Kind.REDUCE_SCATTER, "inputs"): (
            buffers.reduce_inputs,
            "flat fp32 inputs of a reduction and of the one before it",
        ),
        (Kind.GRADIENTS, "block"): (2 * stage.block, "a block's bf16 gradients"),
    }
    if stage.head:
        parts[Kind.GRADIENTS, "head"] = (2 * stage.head, "the head's bf16 gradient")
    if r.recompute_blocks:
        again = max(0, saved_per_token(job) - 2 * a.hidden // t)
        parts[Kind.ACTIVATIONS, "recomputed block"] = (tokens * again, "one block, run again")
    if r.parallel.cp > 1:
        keys = 4 * a.heads * a.head_dim * tokens * r.parallel.cp // t
        parts[Kind.ALL_GATHER, "keys and values"] = (keys, "of the whole sequence, one block")
    return parts


frameworks.register("torchtitan")(Torchtitan())
