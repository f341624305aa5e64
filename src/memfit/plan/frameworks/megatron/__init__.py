"""NVIDIA's Megatron-LM: contiguous buffers, tensor, sequence, context, expert and pipeline ranks.

Every part is read from Megatron-LM's and Transformer Engine's source; nothing is fitted. The
fullest stage of the pipeline decides, or the last one, whose memory Megatron logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from memfit.core.errors import InvalidRequest, MemoryUnknown
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
from memfit.plan.frameworks.megatron.block import BlockSettings
from memfit.plan.frameworks.megatron.shape import check_parts, list_divisions, read_shape
from memfit.plan.frameworks.megatron.split import deal_stages, list_splits, pick_stages
from memfit.plan.frameworks.megatron.stage import (
    MIB,
    Settings,
    count_stage,
    describe_instants,
    find_flights,
    leave_alike,
    peak_of,
    read_blocks,
)
from memfit.plan.frameworks.megatron.step_time import CLOCK_KNOBS, refuse_bytes
from memfit.plan.step_time.arrays import Number
from memfit.records.ledger import Ledger
from memfit.records.recipe import Parallel

RECOMPUTABLE = (
    "core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts",
)  # fmt: skip

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
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

VALUES = {
    "precision": ("bf16-mixed", "fp16-mixed", "fp32", "fp8-mixed", "fp4-mixed"),
    "method": ("full", "lora"),
    "base_format": ("fp32",),
    "optimizer": ("adamw",),
    "implementation": ("fused",),
    "recompute": ("none", "full", "selective"),
    "attention": ("flash", "cudnn", "eager"),
    "loss": ("plain",),
    "compile": ("none",),
    "offload": ("none",),
}  # fmt: skip


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
        _check_adapters(job)
        check_parts(job)
        for name in _modules(job):
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


LINEARS = {  # Megatron's linear of each of Hugging Face's
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv",
    "c_attn": "linear_qkv", "query_key_value": "linear_qkv", "qkv_proj": "linear_qkv",
    "Wqkv": "linear_qkv", "o_proj": "linear_proj", "gate_up_proj": "linear_fc1",
    "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2",
    **{name: name for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")},
}  # fmt: skip


def _check_adapters(job: Job) -> None:
    """Adapters: beside known linears of a dense model; FP8, with one scale a tensor, there too."""
    a, recipe = job.model.architecture, job.recipe
    lora = recipe.method == "lora"
    sparse = bool(a.experts.count or a.latent.kv_rank or job.option("num_experts"))
    if recipe.precision == "fp8-mixed" and sparse:
        raise MemoryUnknown(
            "`precision: fp8-mixed` with experts or latent attention is not described"
        )
    if lora and sparse:
        raise MemoryUnknown("adapters beside experts or latent attention are not described")
    for name in recipe.lora.targets if lora else ():
        if name not in LINEARS:
            raise InvalidRequest(
                f"`lora.targets` names `{name}`, which is none of Megatron-LM's linears",
                hint=f"known: {', '.join(LINEARS)}",
            )


def _modules(job: Job) -> list[str]:
    return [name.strip() for name in str(job.option("recompute_modules")).split(",")]


def read_settings(job: Job) -> Settings:
    """How the step runs, from the recipe and Megatron's own arguments.

    Raises MemoryUnknown and InvalidRequest: of adapters that are not described.
    """
    _check_adapters(job)
    recipe = job.recipe
    selective = recipe.recompute == "selective" and recipe.recompute_blocks > 0
    whole = recipe.precision == "fp32"
    summed = whole or bool(job.option("accumulate_allreduce_grads_in_fp32"))
    engine = job.option("transformer_impl") == "transformer_engine"
    capability = job.device.capability or (0, 0)
    wide = capability == (9, 0) or bool(job.option("deterministic_mode"))
    lora = recipe.method == "lora"
    fp8 = recipe.precision == "fp8-mixed"
    return Settings(
        block=BlockSettings(
            engine=engine,
            legacy=job.option("transformer_impl") == "legacy",
            attention=recipe.attention,
            scatters_heads=job.option("cp_comm_type") == "a2a",
            hidden_dropout=float(job.option("hidden_dropout")) > 0,
            attention_dropout=float(job.option("attention_dropout")) > 0,
            fused_softmax=bool(job.option("masked_softmax_fusion")),
            recomputed=frozenset(_modules(job)) if selective else frozenset(),
            adapted=frozenset(LINEARS[t] for t in recipe.lora.targets) if lora else None,
            adapter_dropout=lora and recipe.lora.dropout > 0,
            adapter_rank=recipe.lora.rank,
            fp8=fp8,
            fp8_attention=fp8 and bool(job.option("fp8_dot_product_attention")),
            fp8_activation=fp8 and bool(job.option("activation_func_fp8_input_store")),
            imbalance=float(job.option("expert_imbalance")),
            fuses_wgrad=bool(job.option("gradient_accumulation_fusion")),
        ),
        recompute="full" if recipe.recompute == "full" else "none",
        recomputed_blocks=recipe.recompute_blocks,
        recompute_group=int(job.option("recompute_num_layers")),
        weight=_weight_bytes(job),
        loss=str(job.option("cross_entropy_loss_fusion")),
        loss_copies=1 if job.option("in_place_loss") else 2,
        main_gradient=4 if summed else 2,
        state=_state_bytes(job),
        step_extra=0 if summed else 4,
        group=int(job.option("microbatch_group_size_per_vp_stage")),
        workspace=32 * MIB if wide else 8 * MIB + 2**17,
        engine_workspace=32 * MIB + 1024 if capability >= (9, 0) else 4 * MIB,
        grouped=bool(job.option("moe_grouped_gemm")),
        mask=bool(job.option("create_attention_mask_in_dataloader")),
    )


def _weight_bytes(job: Job) -> int:
    """Of an element of a linear's weight: as it is stored, and what is kept of it in FP8.

    Hopper's products read FP8 operands of one layout alone, so that the backward needs a copy laid
    out the other way; Blackwell's read both (Transformer Engine's Float8Tensor). Without
    --fp8-param-gather the weights themselves are 16-bit, and their FP8 copies last for a step.
    """
    precision = job.recipe.precision
    if precision != "fp8-mixed":
        return 4 if precision == "fp32" else 2
    copies = 1 if (job.device.capability or (0, 0)) >= (10, 0) else 2
    stored = job.recipe.method == "lora" or bool(job.option("fp8_param_gather"))
    return copies if stored else 2 + copies


def _state_bytes(job: Job) -> int:
    """Of a parameter: both moments, and a master copy unless the weights are fp32 themselves."""
    names = ["exp_avg_dtype", "exp_avg_sq_dtype"]
    names += [] if job.recipe.precision == "fp32" else ["main_params_dtype"]
    return sum(BYTES[str(job.option(name))] for name in names)


frameworks.register("megatron")(Megatron())
