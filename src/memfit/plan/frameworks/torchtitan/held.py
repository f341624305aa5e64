"""What a rank of torchtitan holds in the loss, in the backward and in the optimizer's step.

All sums serve one recipe or many: where a recipe's numbers are arrays, so are the results.
"""

from __future__ import annotations

from memfit.plan.frameworks import Job
from memfit.plan.frameworks.shared.fsdp import Buffers, gathered
from memfit.plan.frameworks.torchtitan.stage import Count, Elements, Share, cut, units
from memfit.plan.step_time.arrays import Number, larger, rounded, say, smaller, where
from memfit.records.ledger import Kind, Phase

NATIVE_NORM = 202503  # torch's RMSNorm instead of one in Python (#985)
COMPILED_LOSS = 202504  # the loss is compiled where blocks are (#1033)
LOSSES = {  # bytes of an element of the logits -> what they are
    4: "compiled: bf16 logits and their gradient",
    12: "fp32: log-softmax, its gradient, the logits' gradient",
    16: "loss parallel, fp32: log-softmax, its gradient, the exponential, their sum",
}
OWN_LOGITS = 2  # bytes of an element: a chunk's backward runs while the logits have a name

Parts = dict[tuple[Kind, str], tuple[int, str]]


def describe_instants(job: Job, elements: Elements, count: Count) -> dict[Phase, Parts]:
    """What is alive in the loss, in the backward and in the optimizer's step of a rank."""
    shards = job.recipe.parallel.dp_shard * job.recipe.parallel.cp
    share = cut(job, elements, count)
    buffers = gathered(units(job, share, count), 2, 4, shards)
    states = _states(share.all, shards)
    held = states | _saved(job, count) | _whole(job, share, buffers)
    loss = held | (_loss(job) if count.last else {})
    backward = held | _backward(job, share, count, buffers)
    if count.last and job.recipe.loss == "chunked":
        loss |= _chunks(job, share, elements)
        backward |= _after_chunks(job, share, count, buffers)
    step = dict(states)
    if job.recipe.optimizer.implementation == "foreach":
        local = 4 * share.all // shards
        step[Kind.TEMPORARY, "adam"] = (local, "square roots of all second moments")
    return {Phase.LOSS: loss, Phase.BACKWARD: backward, Phase.OPTIMIZER_STEP: step}


def _states(n: Number, shards: Number) -> Parts:
    among = say(" / {} ranks", shards).removesuffix(" / 1 ranks")
    return {
        (Kind.PARAMETERS, "shards"): (
            4 * n // shards, say("{:,} fp32 weights x 4 B", n) + among
        ),
        (Kind.OPTIMIZER_STATE, "adam"): (
            8 * n // shards, say("two fp32 moments: {:,} weights x 8 B", n) + among
        ),
        (Kind.GRADIENTS, "shards"): (
            4 * n // shards,
            say("{:,} fp32 gradients x 4 B", n) + among
            + "; their pool is the reduce-scatter stream's, so that no other phase can use it",
        ),
    }  # fmt: skip


def _tokens(job: Job) -> Number:
    """Tokens of one micro-batch on one rank: context parallelism cuts the sequence."""
    return job.recipe.tokens // job.recipe.parallel.cp


def saved_per_token(job: Job) -> Number:
    """Bytes that one block without recomputing keeps of a token.

    Two norms (torch's: the input; one in Python: the input in fp32 and the normed one in bf16;
    both one fp32 number a row), the inputs of two groups of projections, whole; queries, keys and
    values of all heads (`repeat_kv`), the output, its log-sum-exp; both halves of the gate, silu's
    output (compiled, it is recomputed) and the product.
    """
    r, a = job.recipe, job.model.architecture
    t, h = r.parallel.tp, a.hidden
    compiled = r.compile == "blocks"
    python_norm = not compiled and job.option("version") < NATIVE_NORM  # type: ignore[operator]
    norms = (2 * (6 if python_norm else 2) * h + 8) / t
    cut = 8 * a.heads * a.head_dim + 4 * a.heads + (6 if compiled else 8) * a.ffn
    return rounded(norms + 4 * h + cut / t)


def saved_by_policy(job: Job) -> Number:
    """Bytes of a token that per-op checkpointing keeps of one block (`_save_list`).

    The block's input; every other matrix product: queries, values, the gate's first half, the
    block's last one (compiled code drops it: nothing reads it later); attention's output and
    log-sum-exp, where its operation is on the list (cuDNN's is not). Products in fp8 are the same
    operations to the policy.
    """
    r, a = job.recipe, job.model.architecture
    t, q, kv = r.parallel.tp, a.heads * a.head_dim, a.kv_heads * a.head_dim
    products = 2 * q + 2 * kv + 2 * a.ffn
    attention = 2 * q + 4 * a.heads if r.attention == "flash" else 0
    stream = where(t == 1, 2 * a.hidden, 0) if r.compile == "none" else 0
    # outputs of reduce-scatters are listed too
    scattered = where(t > 1, 2 * 2 * a.hidden // t, 0)
    return rounded(2 * a.hidden / t + (products + attention) / t + stream + scattered)


def _saved(job: Job, count: Count) -> Parts:
    """Activations of all micro-batches in flight."""
    r, a, t = job.recipe, job.model.architecture, job.recipe.parallel.tp
    tokens = _tokens(job)
    boundary = 2 * a.hidden // t
    share_recomputed = smaller(r.recompute_blocks, a.layers) / a.layers
    lean = boundary if r.recompute == "full" else saved_by_policy(job)
    each = where(
        share_recomputed < 1,
        share_recomputed * lean + (1 - share_recomputed) * saved_per_token(job),
        lean,
    )
    saved = rounded(tokens * each) * count.waiting
    how = "recomputed but for its input" if r.recompute == "full" else "the policy's operations"
    pipeline = r.parallel.pp > 1
    parts: Parts = {
        (Kind.ACTIVATIONS, "blocks"): (
            saved, say("{} blocks x {:,} tokens: {}", count.waiting, tokens, how)
        )
    }  # fmt: skip
    if count.last:  # torch.distributed.pipelining: `output_chunks`
        chunked = r.loss == "chunked"
        width = a.hidden if chunked else a.vocab // t
        outputs = 2 * tokens * width * (r.accumulation - 1)
        what = "hidden states" if chunked else "logits"
        parts[Kind.LOGITS, "outputs"] = (
            where(pipeline, outputs, 0), f"bf16 {what} of the step's other micro-batches"
        )  # fmt: skip
    tensors = _between_stages(job, count)
    parts[Kind.INPUT, "pipeline"] = (
        where(pipeline, tensors * tokens * boundary, 0),
        say("{} tensors between stages: sent, or to be received into", tensors),
    )
    return parts


def _between_stages(job: Job, count: Count) -> Number:
    """Tensors that `torch.distributed.pipelining` holds of a stage's ends.

    Outputs wait with their micro-batch; tensors to receive into are made for all micro-batches
    when the schedule starts, for inputs and for gradients.
    """
    micro, first = job.recipe.accumulation, count.first
    inputs = (count.pieces - first) * micro - (count.flights - first * count.early)
    gradients = (count.pieces - count.last) * micro
    return larger(0, inputs) + gradients + count.flights


def _whole(job: Job, share: Share, buffers: Buffers) -> Parts:
    return {
        (Kind.ALL_GATHER, "whole weights"): (buffers.whole, "bf16, kept until their backward"),
        (Kind.FRAGMENTATION, "gather stream"): (
            buffers.gather_pool,
            "flat outputs of two gathers in a row, in the pool of their stream",
        ),
        (Kind.GRADIENTS, "whole"): (
            where(job.recipe.parallel.pp > 1, 4 * share.all, 0),
            "fp32 sums over micro-batches: gradients are reduced in the last one alone",
        ),
    }


def _loss(job: Job) -> Parts:
    """The final norm, logits and cross-entropy (`components/loss.py`), when the most is alive."""
    a, t = job.model.architecture, job.recipe.parallel.tp
    version, tokens = job.option("version"), _tokens(job)
    logits = tokens * a.vocab // t
    norm = (8 if version < NATIVE_NORM else 4) * a.hidden / t  # type: ignore[operator]
    norm += where(t > 1, 2 * a.hidden, 0)
    each = _logit_bytes(job)
    return {
        (Kind.ACTIVATIONS, "norm"): (
            rounded(tokens * norm), "the final norm and the head's input"
        ),
        (Kind.LOGITS, "loss"): (each * logits, LOSSES[each] if type(each) is int else ""),
        (Kind.FRAGMENTATION, "loss"): (
            where(each > 4, 2 * logits, 0),
            "the freed block of the bf16 logits is too small for fp32 ones",
        ),
    }  # fmt: skip


def _logit_bytes(job: Job) -> Number:
    r = job.recipe
    compiled = r.compile == "blocks" and job.option("version") >= COMPILED_LOSS  # type: ignore[operator]
    return where(r.parallel.tp > 1, 16, 4 if compiled else 12)


def _chunks(job: Job, share: Share, elements: Elements) -> Parts:
    """`ChunkedLossWrapper` at its worst instant: in the loss, in the head, or in its reduction.

    Each chunk of the tokens runs forward and backward; gradients add up in fp32, the hidden
    states' in a buffer and the head's in what FSDP2 keeps until the last chunk's is reduced.
    """
    r, a, t = job.recipe, job.model.architecture, job.recipe.parallel.tp
    tokens = _tokens(job)
    rows = tokens // job.option("loss_chunks")
    logits, slope = rows * (a.vocab // t), 2 * rows * a.hidden
    each = _logit_bytes(job)
    each = where(each > 4, each + OWN_LOGITS, each)
    apart = elements.head == 0  # tied: the embedding's unit, whole for the loss alone
    head = (elements.head or elements.embedding) // t
    in_head, in_reduction = 4 * logits + 2 * head + slope, 2 * logits + 4 * head + slope
    most = larger(larger(each * logits, in_head), in_reduction)
    of_logits = where(most == each * logits, most, where(most == in_head, 4 * logits, 2 * logits))
    pipeline = r.parallel.pp > 1  # whose `whole` gradients are the head's, too
    return {
        (Kind.LOGITS, "loss"): (of_logits, "logits of a chunk, their gradient, and between"),
        (Kind.FRAGMENTATION, "loss"): (
            where((each > 4) & (of_logits == most), 2 * logits, 0),
            "a freed block of bf16 logits is too small for fp32 ones",
        ),
        (Kind.GRADIENTS, "hidden"): (4 * tokens * a.hidden, "fp32, of the hidden states"),
        (Kind.GRADIENTS, "head"): (
            where(pipeline, 0, 4 * head) + (most - of_logits),
            "fp32, of the head: chunks so far, and this one's or what is reduced",
        ),
        (Kind.ALL_GATHER, "tied head"): (
            where(apart & (r.parallel.pp == 1), 2 * head, 0), "bf16, whole until the last chunk"
        ),
    }  # fmt: skip


def _after_chunks(job: Job, share: Share, count: Count, buffers: Buffers) -> Parts:
    """The head's gradient is reduced before the blocks' backward, and its weights are resharded."""
    pipeline = job.recipe.parallel.pp > 1
    pair = where(count.blocks > 1, 2, 1) * 4 * share.block
    whole = buffers.whole - where(pipeline, 0, 2 * share.head)
    return {
        (Kind.REDUCE_SCATTER, "inputs"): (pair, "flat fp32 inputs of two blocks' reductions"),
        (Kind.GRADIENTS, "head"): (0, ""),
        (Kind.ALL_GATHER, "whole weights"): (whole, "bf16, kept until their backward"),
    }


def _backward(job: Job, share: Share, count: Count, buffers: Buffers) -> Parts:
    """The last block's backward: gradients on their way, and what recomputing builds."""
    r, a, t = job.recipe, job.model.architecture, job.recipe.parallel.tp
    tokens = _tokens(job)
    parts: Parts = {
        (Kind.REDUCE_SCATTER, "inputs"): (
            buffers.reduce_inputs,
            "flat fp32 inputs of a reduction and of the one before it",
        ),
        (Kind.GRADIENTS, "block"): (2 * share.block, "a block's bf16 gradients"),
    }
    if count.last:
        parts[Kind.GRADIENTS, "head"] = (2 * share.head, "the head's bf16 gradient")
    recomputed = larger(0, saved_per_token(job) - 2 * a.hidden // t)
    parts[Kind.ACTIVATIONS, "recomputed block"] = (
        where(r.recompute_blocks > 0, tokens * recomputed, 0), "one block, run again"
    )  # fmt: skip
    keys = 4 * a.heads * a.head_dim * tokens * r.parallel.cp // t
    parts[Kind.ALL_GATHER, "keys and values"] = (
        where(r.parallel.cp > 1, keys, 0), "of the whole sequence, one block"
    )  # fmt: skip
    return parts
