"""torchtune's finetuning steps: all in bf16, on one device or sharded by FSDP2; LoRA and QLoRA.

Read from pytorch/torchtune bd2a0fc (`recipes/full_finetune_*`, `lora_finetune_*`, `modules/`) and
from November 2024, when its table of techniques was measured.
"""

from __future__ import annotations

from typing import NamedTuple, final

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import Framework, Job, Knob, Slack, frameworks, make_ledger
from memfit.plan.frameworks.shared.fsdp import Buffers, Unit, gathered
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.model import Weight

CHUNKS = 8  # of the chunked loss, along the tokens
NF4 = 0.5 + 1 / 64 + 2 / (64 * 256)  # torchao: 4 bits, a scale of 64 in int8, of 256 x 64 in bf16
LAYOUTS = {"nf4": NF4}  # bytes a weight of torchao's own formats
EIGHT_BIT = 2 * (1 + 4 / 256)  # bitsandbytes: two moments, an fp32 scale of 256 elements each

Parts = dict[tuple[Kind, str], tuple[int, str]]


class Sizes(NamedTuple):
    """Elements and bytes that the instants are made of; `held` are of one rank."""

    trained: int  # elements that receive gradients
    stored: float  # bytes of all weights, adapters too
    table: int  # elements of the embedding
    head: int  # of the output's matrix; the embedding's where they are tied
    block: float  # bytes of one block's weights as stored
    widest: int  # elements of the largest matrix of a block
    adapters: int  # elements of one block's adapters
    targets: int  # matrices of one block with an adapter


@final
class Torchtune(Framework):
    """`tune run` of a decoder whose blocks are `TransformerSelfAttentionLayer`."""

    name = "torchtune"
    title = "torchtune"
    source = "pytorch/torchtune bd2a0fc (2026-04) and 1814feb (2024-11)"
    values = {  # noqa: RUF012
        "precision": ("bf16",),
        "method": ("full", "lora"),
        "base_format": ("bf16", *LAYOUTS),
        "optimizer": ("adamw", "adamw8bit"),
        "implementation": ("fused", "foreach"),
        "recompute": ("full", "none"),
        "attention": ("flash",),
        "loss": ("chunked", "plain"),
        "compile": ("none", "blocks"),
        "offload": ("none", "activations", "parameters"),
    }
    axes = ("dp_shard",)
    knobs = {  # noqa: RUF012
        "optimizer_in_bwd": Knob(
            default=False, means="a weight is updated as soon as its gradient is there"
        ),
        "custom_sharded_layers": Knob(
            default=False, means="embedding and output are FSDP2 units of their own"
        ),
    }
    slack = Slack(
        low=1.0, typical=1.04, high=1.15,
        source="torchtitan's, whose allocations are alike; torchtune prints active bytes",
    )  # fmt: skip

    def check(self, job: Job) -> None:
        """Refuse what the recipes refuse, and what is not read."""
        r, a = job.recipe, job.model.architecture
        if r.base_format in LAYOUTS and r.method != "lora":
            raise InvalidRequest(
                f"`base_format: {r.base_format}` with `method: full`: 4-bit weights cannot be"
                " trained",
                hint=f"QLoRA is `method: lora` with `base_format: {r.base_format}`",
            )
        if job.option("optimizer_in_bwd") and r.accumulation > 1:
            raise InvalidRequest(
                f"`options.optimizer_in_bwd: true` with {r.accumulation} micro-batches a step:"
                " torchtune refuses it",
                hint="gradients cannot be summed where each is used at once",
            )
        if a.experts.count or a.latent.kv_rank:
            raise InvalidRequest(
                f"`{job.model.name}` has experts or latent attention; of torchtune, only dense"
                " decoders are described",
                hint="",
            )

    def predict(self, job: Job) -> Ledger:
        """Every data-parallel rank holds the same."""
        sizes = measure(job)
        buffers = _buffers(job, sizes)
        return make_ledger(
            {
                Phase.LOSS: _held(job, sizes, buffers) | _saved(job, sizes) | _loss(job, sizes),
                Phase.BACKWARD: _held(job, sizes, buffers) | _backward(job, sizes, buffers),
                Phase.OPTIMIZER_STEP: _held(job, sizes, buffers) | _gradients(job, sizes),
            }
        )


def measure(job: Job) -> Sizes:
    """Elements by role: the frozen, the trained, the 4-bit ones."""
    r = job.recipe
    block = [w for w in job.model.weights if w.layer == 0]
    ends = [w for w in job.model.weights if w.layer < 0]
    table = sum(w.numel for w in ends if w.part == "embedding")
    own_head = sum(w.numel for w in ends if w.part == "head")
    matrices = [w for w in block if len(w.shape) == 2]
    adapted = [w for w in matrices if _is_target(w, r.lora.targets)] if r.method == "lora" else []
    adapters = sum(r.lora.rank * sum(w.shape) for w in adapted)
    dense = sum(w.numel for w in block)
    quantized = sum(w.numel for w in matrices) if r.base_format in LAYOUTS else 0
    stored = LAYOUTS.get(r.base_format, 0) * quantized + 2 * (dense - quantized) + 2 * adapters
    layers = job.model.architecture.layers
    every = layers * dense + sum(w.numel for w in ends)
    return Sizes(
        trained=layers * adapters if r.method == "lora" else every,
        stored=layers * stored + 2 * sum(w.numel for w in ends),
        table=table, head=own_head or table, block=stored,
        widest=max(w.numel for w in matrices), adapters=adapters, targets=len(adapted),
    )  # fmt: skip


def _is_target(weight: Weight, targets: tuple[str, ...]) -> bool:
    return any(target in weight.name.split(".") for target in targets)


def _shards(job: Job) -> int:
    return job.recipe.parallel.dp_shard


def _buffers(job: Job, sizes: Sizes) -> Buffers:
    """FSDP2's units, gathered and reduced in bf16: the blocks, and the rest as root or apart."""
    if _shards(job) == 1:
        return Buffers(0, 0, 0)
    block = round(sizes.block / 2)  # in elements of 2 B
    blocks = Unit(block, False, job.model.architecture.layers)
    units: tuple[Unit, ...] = (Unit(sizes.table, False), blocks, Unit(sizes.head, True))
    if not job.option("custom_sharded_layers"):
        tied = job.model.architecture.tied_embeddings
        units = (Unit(sizes.table + (0 if tied else sizes.head), True), blocks)
    return gathered(units, 2, 2, _shards(job))


def _held(job: Job, sizes: Sizes, buffers: Buffers) -> Parts:
    """Weights, the optimizer's states, and what FSDP2 keeps whole or in pools of its own."""
    r, shards = job.recipe, _shards(job)
    parts: Parts = {}
    if r.offload != "parameters":
        each = EIGHT_BIT if r.optimizer.name == "adamw8bit" else 4
        parts[Kind.PARAMETERS, "weights"] = (
            round(sizes.stored / shards),
            f"bf16 weights{', 4-bit ones in the blocks' if r.base_format in LAYOUTS else ''}",
        )
        parts[Kind.OPTIMIZER_STATE, "adam"] = (
            round(each * sizes.trained / shards),
            f"two moments of {sizes.trained:,} trained weights, {each:.3g} B together",
        )
    if shards > 1:
        parts[Kind.ALL_GATHER, "whole weights"] = (
            buffers.whole,
            "what stays gathered until its backward",
        )
        parts[Kind.FRAGMENTATION, "gather stream"] = (
            buffers.gather_pool,
            "flat outputs of two gathers in a row, in the pool of their stream",
        )
    return parts


def saved_per_token(job: Job) -> int:
    """Bytes that one block without recomputing keeps of a token.

    Two norms in Python (the input in fp32, the normed one in bf16; compiled: the input), the
    inputs of two groups of projections; queries, keys and values of all heads (they are
    expanded), the output, its log-sum-exp; both halves of the gate, silu's output (compiled, it
    is recomputed) and the product; what each adapter has between its two matrices.
    """
    r, a = job.recipe, job.model.architecture
    compiled = r.compile == "blocks"
    norms = 2 * (2 if compiled else 6) * a.hidden + 8
    attention = 8 * a.heads * a.head_dim + 4 * a.heads
    ladder = 2 * r.lora.rank * measure(job).targets if r.method == "lora" else 0
    return norms + 4 * a.hidden + attention + (6 if compiled else 8) * a.ffn + ladder


def _saved(job: Job, sizes: Sizes) -> Parts:
    """Activations at the end of a forward."""
    del sizes
    r, a = job.recipe, job.model.architecture
    if r.offload == "activations":
        return {}
    recomputed = min(r.recompute_blocks, a.layers)
    each = recomputed * 2 * a.hidden + (a.layers - recomputed) * saved_per_token(job)
    how = (
        f"{recomputed} of {a.layers} blocks keep their input alone" if recomputed else "all blocks"
    )
    return {(Kind.ACTIVATIONS, "blocks"): (r.tokens * each, how)}


def _trains_head(job: Job) -> bool:
    return job.recipe.method == "full"


def _loss(job: Job, sizes: Sizes) -> Parts:
    """Logits and cross-entropy, at the start of the backward."""
    r, a = job.recipe, job.model.architecture
    logits = r.tokens * a.vocab
    if r.loss == "plain":
        why = "fp32: log-softmax, its gradient, the logits' gradient"
        return {(Kind.LOGITS, "loss"): (12 * logits, why)}
    parts: Parts = {
        (Kind.LOGITS, "loss"): (
            2 * logits + 2 * logits // CHUNKS,
            f"bf16 logits in {CHUNKS} chunks, and the gradient of one",
        ),
        (Kind.ACTIVATIONS, "norm"): (2 * r.tokens * a.hidden, "the output's input"),
    }
    if _trains_head(job):
        parts[Kind.GRADIENTS, "output"] = (
            4 * sizes.head,
            "the output's bf16 gradient: the sum so far, and a chunk's",
        )
    return parts


def _gradients(job: Job, sizes: Sizes) -> Parts:
    """All gradients at the end of a backward; a tied table's come in two, one after the other."""
    r, shards = job.recipe, _shards(job)
    parts: Parts = {}
    if not job.option("optimizer_in_bwd") and r.offload != "parameters":
        nbytes = 2 * sizes.trained // shards
        parts[Kind.GRADIENTS, "all"] = (nbytes, f"bf16, of {sizes.trained:,} trained weights")
        if r.optimizer.implementation == "foreach" and r.optimizer.name == "adamw":
            parts[Kind.TEMPORARY, "adam"] = (nbytes, "square roots of all second moments")
    if job.model.architecture.tied_embeddings and _trains_head(job):
        parts[Kind.GRADIENTS, "table"] = (
            2 * sizes.table // shards,
            "the tied table's second gradient, before it is added to the first",
        )
    return parts


def _backward(job: Job, sizes: Sizes, buffers: Buffers) -> Parts:
    """The last block's backward: saved activations, and one recomputed block."""
    r, a = job.recipe, job.model.architecture
    parts = _saved(job, sizes)
    if _trains_head(job) and not job.option("optimizer_in_bwd"):
        parts[Kind.GRADIENTS, "output"] = (2 * sizes.head // _shards(job), "the output's gradient")
    if r.recompute_blocks or r.offload == "activations":
        recomputed = r.tokens * (saved_per_token(job) - 2 * a.hidden)
        parts[Kind.ACTIVATIONS, "recomputed block"] = (recomputed, "one block, run again")
    if r.base_format in LAYOUTS:
        parts[Kind.TEMPORARY, "dequantised"] = (2 * sizes.widest, "the largest matrix in bf16")
    if _trains_head(job) and _shards(job) > 1:
        parts[Kind.REDUCE_SCATTER, "inputs"] = (
            buffers.reduce_inputs,
            "flat bf16 inputs of a reduction and of the one before it",
        )
    return parts


frameworks.register("torchtune")(Torchtune())
