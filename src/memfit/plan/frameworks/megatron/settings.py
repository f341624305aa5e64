"""Megatron-LM's own arguments, as its step is described with them."""

from __future__ import annotations

from typing import cast

from memfit.core.errors import InvalidRequest, MemoryUnknown
from memfit.plan.frameworks import (
    Job,
)  # fmt: skip
from memfit.plan.frameworks.megatron.block import Adapters, BlockSettings, Layers
from memfit.plan.frameworks.megatron.stage import (
    MIB,
    Settings,
)

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


LINEARS = {  # Megatron's linear of each of Hugging Face's
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv",
    "c_attn": "linear_qkv", "query_key_value": "linear_qkv", "qkv_proj": "linear_qkv",
    "Wqkv": "linear_qkv", "o_proj": "linear_proj", "gate_up_proj": "linear_fc1",
    "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2",
    **{name: name for name in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")},
}  # fmt: skip


def check_adapters(job: Job) -> None:
    """Adapters: beside known linears of a dense model; FP8, with one scale a tensor, there too."""
    a, recipe = job.model.architecture, job.recipe
    sparse = bool(a.experts.count or a.latent.kv_rank or job.option("num_experts"))
    lora = recipe.method == "lora"
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


def recomputed_modules(job: Job) -> list[str]:
    """Return the names of the modules that selective recomputation reruns."""
    return [name.strip() for name in str(job.option("recompute_modules")).split(",")]


def read_settings(job: Job) -> Settings:
    """How the step runs, from the recipe and Megatron's own arguments.

    Raises MemoryUnknown and InvalidRequest: of adapters that are not described.
    """
    check_adapters(job)
    recipe = job.recipe
    selective = recipe.recompute == "selective" and recipe.recompute_blocks > 0
    whole = recipe.precision == "fp32"
    summed = whole or bool(job.option("accumulate_allreduce_grads_in_fp32"))
    layers = cast(Layers, str(job.option("transformer_impl")))
    capability = job.device.capability or (0, 0)
    wide = capability == (9, 0) or bool(job.option("deterministic_mode"))
    adapters = None
    if recipe.method == "lora":
        linears = frozenset(LINEARS[name] for name in recipe.lora.targets)
        adapters = Adapters(linears=linears, rank=recipe.lora.rank, dropout=recipe.lora.dropout > 0)
    fp8 = recipe.precision == "fp8-mixed"
    return Settings(
        block=BlockSettings(
            layers=layers,
            attention=recipe.attention,
            scatters_heads=job.option("cp_comm_type") == "a2a",
            hidden_dropout=float(job.option("hidden_dropout")) > 0,
            attention_dropout=float(job.option("attention_dropout")) > 0,
            fused_softmax=bool(job.option("masked_softmax_fusion")),
            recomputed=frozenset(recomputed_modules(job)) if selective else frozenset(),
            adapters=adapters,
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
    """Return bytes of an element of a linear's weight: as stored, and of its FP8 copies.

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
