"""NVIDIA's Megatron-LM: contiguous buffers, tensor, sequence, context, expert and pipeline ranks.

Every part is read from Megatron-LM's and Transformer Engine's source; nothing is fitted. The
fullest stage of the pipeline decides, or the last one, whose memory Megatron logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks import (
    Framework,
    Job,
    Knob,
    Peaks,
    Rule,
    Slack,
    Split,
    frameworks,
    make_ledger,
    obey,
)  # fmt: skip
from memfit.plan.frameworks.megatron.settings import (
    BYTES,
    check_adapters,
    read_settings,
    recomputed_modules,
)
from memfit.plan.frameworks.megatron.shape import check_parts, list_divisions, read_shape
from memfit.plan.frameworks.megatron.split import deal_stages, list_splits, pick_stages
from memfit.plan.frameworks.megatron.stage import (
    count_stage,
    describe_instants,
    find_flights,
    leave_alike,
    peak_of,
    read_blocks,
)
from memfit.plan.frameworks.megatron.step_time import CLOCK_KNOBS, refuse_bytes
from memfit.plan.frameworks.shared.plain import plain_values
from memfit.plan.step_time.arrays import Number
from memfit.records.ledger import Ledger
from memfit.records.recipe import Parallel

RECOMPUTABLE = (
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts",
)  # fmt: skip

DTYPES = tuple(BYTES)
KNOBS = {
    "transformer_impl": Knob(
        default="transformer_engine", means="whose layers; legacy: of before megatron-core",
        values=("transformer_engine", "local", "legacy"),
    ),
    "hidden_dropout": Knob(default=0.0, means="dropout of the residual stream (Megatron: 0.1)"),
    "attention_dropout": Knob(default=0.0, means="dropout of probabilities (Megatron: 0.1)"),
    "make_vocab_size_divisible_by": Knob(default=128, means="the vocabulary is padded to it x tp"),
    "position_embedding_type": Knob(
        default="model", means="`model`: as the model's own",
        values=("model", "rope", "learned_absolute"),
    ),
    "untie_embeddings_and_output_weights": Knob(default=False, means="a head of its own"),
    "disable_bias_linear": Knob(default=False, means="no biases in linears"),
    "swiglu": Knob(
        default="model", means="whether the feed-forward is gated", values=("model", "on", "off"),
    ),
    "normalization": Knob(
        default="model", means="the norms", values=("model", "RMSNorm", "LayerNorm"),
    ),
    "qk_layernorm": Knob(default=False, means="norms of queries and keys"),
    "cross_entropy_loss_fusion": Knob(
        default="none", means="the fused loss and whose", values=("none", "native", "te"),
    ),
    "in_place_loss": Knob(default=True, means="False: before June 2024 (core 0.8), one copy more"),
    "masked_softmax_fusion": Knob(default=True, means="False: eager softmax, in fp32"),
    "gradient_accumulation_fusion": Knob(default=True, means="wgrad adds to its buffer"),
    "accumulate_allreduce_grads_in_fp32": Knob(default=True, means="fp32 main gradients"),
    "exp_avg_dtype": Knob(default="fp32", means="of Adam's first moment", values=DTYPES),
    "exp_avg_sq_dtype": Knob(default="fp32", means="of Adam's second moment", values=DTYPES),
    "main_params_dtype": Knob(default="fp32", means="of master weights", values=DTYPES),
    "use_distributed_optimizer": Knob(default=True, means="dp_shard x cp ranks share the states"),
    "deterministic_mode": Knob(default=False, means="cuBLAS's workspaces are 8 of 4 MiB"),
    "create_attention_mask_in_dataloader": Knob(default=True, means="a mask comes with a batch"),
    "decoder_first_pipeline_num_layers": Knob(default=0, means="blocks of the first stage"),
    "decoder_last_pipeline_num_layers": Knob(default=0, means="blocks of the last stage"),
    "account_for_embedding_in_pipeline_split": Knob(default=False, means="it counts as a block"),
    "account_for_loss_in_pipeline_split": Knob(default=False, means="it counts as a block"),
    "microbatch_group_size_per_vp_stage": Knob(default=0, means="0: as many as stages"),
    "recompute_num_layers": Knob(default=1, means="blocks between kept inputs (uniform)"),
    "recompute_modules": Knob(default="core_attn", means="of selective, comma-separated"),
    "num_experts": Knob(default=0, means="experts put into a model that has none"),
    "moe_router_topk": Knob(default=2, means="experts a token visits, of those"),
    "moe_ffn_hidden_size": Knob(default=0, means="their width; 0: the model's"),
    "moe_shared_expert_intermediate_size": Knob(default=0, means="width of a shared expert"),
    "moe_grouped_gemm": Knob(default=True, means="one kernel for all experts of a rank"),
    "expert_tensor_parallel_size": Knob(default=0, means="ranks of an expert; 0: tp"),
    "expert_imbalance": Knob(default=1.0, means="tokens of the fullest rank's experts / mean"),
    "cp_comm_type": Knob(
        default="p2p", means="how cp ranks attend to each other's tokens", values=("p2p", "a2a"),
    ),
    "fp8_param_gather": Knob(default=False, means="weights are stored in FP8 alone"),
    "fp8_dot_product_attention": Knob(default=False, means="attention in FP8 too"),
    "activation_func_fp8_input_store": Knob(default=False, means="its input is kept in FP8"),
    "rank": Knob(
        default="fullest", means="`first` has rank 0; `last` has the rank that Megatron logs",
        values=("fullest", "first", "last"),
    ),
    **CLOCK_KNOBS,
}  # fmt: skip

VALUES = plain_values(
    precision=("bf16-mixed", "fp16-mixed", "fp32", "fp8-mixed", "fp4-mixed"),
    method=("full", "lora"), recompute=("none", "full", "selective"),
    attention=("flash", "cudnn", "eager"),
)  # fmt: skip


@final
class Megatron(Framework):
    """Megatron-core's GPT with its own or Transformer Engine's layers."""

    name = "megatron"
    title = "Megatron-LM"
    source = "NVIDIA/Megatron-LM d98e8a6 (megatron/core) and TransformerEngine 2"
    values = VALUES
    axes = (
        "dp_replicate", "dp_shard", "zero", "tp", "sequence_parallel", "cp", "pp", "virtual_pp",
        "ep",
    )  # fmt: skip
    knobs = KNOBS
    recomputes_some = True  # --recompute-method block
    cuts = 1
    ends = 2
    arrays = True
    slack = Slack(
        low=1.01, typical=1.053, high=1.10,
        source="reserved over allocated of 16 runs on 8 B200 (MooreThreads/SimuMax)",
    )  # fmt: skip

    def count_groups(self, parallel: Parallel) -> int:
        """See `Framework.count_groups`: all ranks, each axis, all ranks of a model, the embeddings.

        megatron/core/parallel_state.py; NCCL connects a group at its first collective.
        """
        p = parallel
        axes = (p.dp * p.cp, p.tp, p.cp, p.pp, p.ep)
        return (p.world > 1) + sum(n > 1 for n in axes) + (p.tp * p.pp > 1) + (p.pp > 1)

    def rules(self, job: Job) -> list[Rule]:
        """See `Framework.rules`."""
        p, micro_batches = job.recipe.parallel, job.recipe.accumulation
        group: Number = job.option("microbatch_group_size_per_vp_stage") or p.pp
        over = micro_batches % group
        engine = job.option("transformer_impl") == "transformer_engine"
        plain = job.recipe.attention == "eager" or not engine
        short = (micro_batches < group) | (group < p.pp) | ((over > 0) & (over < p.pp))
        return [
            Rule(
                "zero", (p.dp_shard > 1) & (p.zero != 1),
                "`parallel.zero: {}` with `dp_shard: {}`: Megatron-LM's distributed optimizer cuts"
                " the states alone", (p.zero, p.dp_shard), "use `zero: 1`",
            ),
            Rule(
                "chunks", (p.virtual_pp > 1) & (p.pp == 1),
                "`parallel.virtual_pp: {}` interleaves the chunks of a pipeline, and `pp: 1` is"
                " none", (p.virtual_pp,), "use `virtual_pp: 1`",
            ),
            Rule(
                "interleaving", (p.virtual_pp > 1) & short,
                "{} micro-batches in groups of {} on {} stages: interleaved, no group may have"
                " fewer than there are stages", (micro_batches, group, p.pp),
                "Megatron-LM's schedules.py raises: let `pp` divide them",
            ),
            Rule(
                "kernels of context parallelism", (p.cp > 1) & plain,
                "`parallel.cp: {}` needs a kernel of Transformer Engine, and `attention: {}` of"
                " `transformer_impl: {}` is none",
                (p.cp, job.recipe.attention, job.option("transformer_impl")),
                "use `attention: flash` or `cudnn`",
            ),
            *list_divisions(job),
        ]  # fmt: skip

    def list_splits(self, job: Job, ranks: Sequence[int]) -> list[Split]:
        """See `Framework.list_splits`."""
        return [split for pp in ranks for split in list_splits(job, pp)]

    def check(self, job: Job) -> None:
        """See `Framework.check`."""
        if job.model.architecture.parallel_residual:
            raise InvalidRequest(
                f"`{job.model.name}` computes attention and feed-forward side by side, and"
                " Megatron-LM's block does not",
                hint="set `use_parallel_residual: false` in its config",
            )
        obey(self.rules(job))
        refuse_bytes(job)
        check_adapters(job)
        check_parts(job)
        for name in recomputed_modules(job):
            if name not in RECOMPUTABLE:
                raise InvalidRequest(
                    f"`options.recompute_modules` names `{name}`",
                    hint=f"described: {', '.join(RECOMPUTABLE)}",
                )

    def predict(self, job: Job) -> Ledger:
        """See `Framework.predict`."""
        shape, settings = read_shape(job), read_settings(job)
        blocks = read_blocks(shape, settings)
        stages = leave_alike(
            shape.experts, pick_stages(str(job.option("rank")), deal_stages(job, shape))
        )
        counts = (
            count_stage(shape, settings, stage, find_flights(shape, settings, stage))
            for stage in stages
        )
        held = (describe_instants(shape, settings, blocks, count) for count in counts)
        return make_ledger(max(held, key=peak_of))

    def measure(self, job: Job) -> Peaks:
        """See `Framework.measure`."""
        from memfit.plan.frameworks.megatron.columns import measure

        return measure(job)


frameworks.register("megatron")(Megatron())
