"""Megatron-DeepSpeed: Megatron's own blocks in DeepSpeed's pipeline engine, with its ZeRO-1.

Read from bigscience-workshop/Megatron-DeepSpeed and DeepSpeed 0.5.10 to 0.6 (runtime/pipe,
runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py): blocks are dealt greedily, a stage keeps
what it sends until its gradient comes, gradients are 16-bit tensors that the step copies.
"""

from __future__ import annotations

from typing import final

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import Framework, Job, Knob, Slack, frameworks, make_ledger, obey
from memfit.plan.frameworks.megatron import KNOBS, VALUES
from memfit.plan.frameworks.megatron.block import BlockSettings
from memfit.plan.frameworks.megatron.shape import Shape, check_parts, list_divisions, read_shape
from memfit.plan.frameworks.megatron.split import pick_stages
from memfit.plan.frameworks.megatron.stage import (
    MIB,
    Blocks,
    Held,
    Settings,
    Stage,
    add_backward,
    add_loss,
    count_parameters,
    count_stage,
    keep_blocks,
    peak_of,
    read_blocks,
)
from memfit.plan.frameworks.shared.pipeline import count_in_flight, deal_sizes
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.recipe import Parallel

SHARED = (
    "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by",
    "position_embedding_type", "untie_embeddings_and_output_weights", "disable_bias_linear",
    "swiglu", "normalization", "qk_layernorm", "use_distributed_optimizer", "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "expert_tensor_parallel_size",
    "rank",
)  # fmt: skip

OWN_VALUES = {
    **VALUES, "precision": ("fp16-mixed", "bf16-mixed"), "attention": ("eager", "flash"),
    "method": ("full",),
}  # fmt: skip
OWN_KNOBS = {
    **{name: KNOBS[name] for name in SHARED},
    "fp32_gradients": Knob(
        default=True, means="bf16's optimizer adds up in fp32 (DeepSpeed's BF16_Optimizer)"
    ),
    "pp_partition_method": Knob(
        default="type:transformer", means="what counts as a block of the pipeline",
        values=("type:transformer", "type:transformer|embedding"),
    ),
    "reduce_bucket_size": Knob(default=500_000_000, means="elements of a reduction"),
}  # fmt: skip


@final
class MegatronDeepSpeed(Framework):
    """GPT of Megatron-DeepSpeed, as BLOOM was trained."""

    name = "megatron-deepspeed"
    title = "Megatron-DeepSpeed"
    source = "bigscience-workshop/Megatron-DeepSpeed and deepspeedai/DeepSpeed 2151c78"
    values = OWN_VALUES
    axes = ("dp_replicate", "dp_shard", "zero", "tp", "pp")
    knobs = OWN_KNOBS
    slack = Slack(
        low=1.09, typical=1.17, high=1.25,
        source="fitted: rows of bigscience-workshop/bigscience whose split is `fit`",
    )  # fmt: skip
    cuts = 1

    def count_groups(self, parallel: Parallel) -> int:
        """See `Framework.count_groups`.

        All ranks, each axis, all ranks of a model; of a pipeline also the tied embeddings and a
        pair with either neighbour (runtime/pipe/topology.py).
        """
        p = parallel
        axes = sum(n > 1 for n in (p.dp, p.tp, p.pp))
        return (p.world > 1) + axes + (p.tp * p.pp > 1) + 3 * (p.pp > 1)

    def check(self, job: Job) -> None:
        """See `Framework.check`."""
        p = job.recipe.parallel
        if p.dp_shard > 1 and p.zero != 1:
            raise InvalidRequest(
                f"`parallel.zero: {p.zero}`: pipelines of DeepSpeed's run with ZeRO-1",
                hint="use `zero: 1`",
            )
        if job.model.architecture.experts.count or job.option("num_experts"):
            raise InvalidRequest("experts of Megatron-DeepSpeed are not described")
        if job.recipe.recompute == "selective" and job.recipe.recompute_blocks:
            raise InvalidRequest("`recompute: selective` is not in Megatron-DeepSpeed")
        obey(list_divisions(job))
        check_parts(job)

    def predict(self, job: Job) -> Ledger:
        """See `Framework.predict`."""
        shape, settings = read_shape(job), _read_settings(job)
        aware = "embedding" in str(job.option("pp_partition_method"))
        blocks, stages = read_blocks(shape, settings), _deal_stages(shape, aware)
        stages = pick_stages(str(job.option("rank")), stages)
        bucket = 2 * int(job.option("reduce_bucket_size"))
        replicated = job.recipe.parallel.dp_replicate > 1  # no ZeRO: runtime/fp16/fused_optimizer
        return make_ledger(
            max(
                (_describe(shape, settings, blocks, s, bucket, replicated) for s in stages),
                key=peak_of,
            )
        )


def _read_settings(job: Job) -> Settings:
    recipe = job.recipe
    wide = recipe.precision == "bf16-mixed" and bool(job.option("fp32_gradients"))
    return Settings(
        block=BlockSettings(
            layers="legacy",
            attention=recipe.attention,
            scatters_heads=False,
            hidden_dropout=float(job.option("hidden_dropout")) > 0,
            attention_dropout=float(job.option("attention_dropout")) > 0,
            fused_softmax=True,
            recomputed=frozenset(),
            adapters=None,
            fp8=False,
            fp8_attention=False,
            fp8_activation=False,
            imbalance=1.0,
            fuses_wgrad=False,
        ),
        recompute="full" if recipe.recompute == "full" else "none",
        recomputed_blocks=recipe.recompute_blocks,
        recompute_group=1,
        weight=2,
        loss="plain",
        loss_copies=1,
        main_gradient=4 if wide else 0,
        state=12,
        step_extra=0,
        group=0,
        workspace=8 * MIB + 2**17,
        engine_workspace=0,
        grouped=False,
        mask=False,
    )


def _deal_stages(shape: Shape, aware: bool) -> list[Stage]:
    """As many blocks as the fullest stage needs for every stage but the last, which takes the rest.

    DeepSpeed's partition_balanced; `aware` counts the embedding and the head as a block each.
    """
    units = shape.layers + 2 * aware
    each = -(-units // shape.mesh.pp)
    sizes, left = [], units
    for _ in range(shape.mesh.pp):
        sizes.append(min(each, left))
        left -= sizes[-1]
    if aware:
        sizes[0] -= 1
        sizes[-1] -= 1
    if min(sizes) < 1:
        raise InvalidRequest(
            f"a stage of `parallel.pp: {shape.mesh.pp}` is left without one of the"
            f" {shape.layers} blocks"
        )
    return [
        Stage(index=i, chunks=chunks, first=i == 0, last=i == shape.mesh.pp - 1)
        for i, chunks in enumerate(deal_sizes(sizes, shape.mesh.pp))
    ]


def _hold_states(shape: Shape, settings: Settings, count: int) -> Held:
    return {
        (Kind.PARAMETERS, "blocks and tables"): (2 * count, f"{count} parameters, 2 B each"),
        (Kind.GRADIENTS, "sums"): (
            settings.main_gradient * count, "fp32 sums of the gradients of all micro-batches"
        ),
        (Kind.OPTIMIZER_STATE, "optimizer"): (
            12 * count // shape.mesh.shards,
            f"master weights and moments, 12 B a parameter among {shape.mesh.shards} ranks",
        ),
    }  # fmt: skip


def _describe(
    shape: Shape, settings: Settings, blocks: Blocks, stage: Stage, bucket: int, replicated: bool
) -> dict[Phase, Held]:
    """What is alive in the loss, in the backward and in the optimizer's step of a stage."""
    numbers = count_stage(shape, settings, stage, (1,))
    count = sum(count_parameters(shape, blocks, numbers))
    states = _hold_states(shape, settings, count)
    states[Kind.WORKSPACE, "cuBLAS"] = (2 * settings.workspace, "one of each thread")
    (flights,) = count_in_flight(
        stage.index, stages=shape.mesh.pp, chunks=1, micro_batches=shape.rows.micro_batches
    )
    parts = keep_blocks(shape, blocks, numbers)
    parts["what the stage sends"] = shape.stream
    if not stage.first:
        parts["what the stage received"] = shape.stream  # beside the copy that it runs on
    if stage.first and settings.block.hidden_dropout:
        parts["embedding's dropout mask"] = shape.own_tokens * shape.hidden
    why = f"{flights} forwards in flight on stage {stage.index}"
    saved: Held = {(Kind.ACTIVATIONS, part): (flights * n, why) for part, n in parts.items()}
    gradients: Held = {
        (Kind.GRADIENTS, "16-bit"): (2 * count, "a tensor for each weight, from backward to step")
    }
    phases: dict[Phase, Held] = {}
    if stage.last:
        phases[Phase.LOSS] = {**states, **saved, **gradients, **add_loss(shape, settings)}
    phases[Phase.BACKWARD] = {
        **states,
        **saved,
        **gradients,
        **add_backward(shape, blocks, numbers),
    }
    if settings.main_gradient:
        phases[Phase.OPTIMIZER_STEP] = states
        return phases
    if replicated:
        phases[Phase.OPTIMIZER_STEP] = {
            **states, **gradients, (Kind.TEMPORARY, "optimizer"): (
                8 * count, "fp32 copies of the gradients one by one, then flattened"
            ),
        }  # fmt: skip
        return phases
    own = 2 * count // shape.mesh.shards
    phases[Phase.ACCUMULATE] = {
        **states, **gradients, (Kind.REDUCE_SCATTER, "gradients"): (
            bucket + own, "a bucket, and the rank's own share of the mean"
        ),
    }  # fmt: skip
    phases[Phase.OPTIMIZER_STEP] = {
        **states, (Kind.TEMPORARY, "optimizer"): (
            own + own + 2 * own, "the rank's gradients, flattened, and their fp32 copy"
        ),
    }  # fmt: skip
    return phases


frameworks.register("megatron-deepspeed")(MegatronDeepSpeed())
