"""Megatron-LM's arguments, in a script that starts `pretrain_gpt.py` with them."""

from __future__ import annotations

import shlex
from typing import Any, ClassVar, final

from msgspec.structs import replace

from memfit.export.files import ALL_AXES, OPTIMIZER_SAYS, File
from memfit.export.needs import Need, need
from memfit.export.target import Draft, Job, Target, exports
from memfit.export.targets.torchtitan_shared import check_steps
from memfit.export.torchrun import torchrun
from memfit.plan.frameworks import Job as Described
from memfit.plan.frameworks import find_framework, resolve_options
from memfit.plan.frameworks.megatron.shape import Shape, read_shape
from memfit.records.recipe import Option, Recipe

NAME = "megatron.sh"
# our knob, an argument of Megatron's own name: switched on by True
SWITCHES = (
    "qk_layernorm", "deterministic_mode", "overlap_grad_reduce", "overlap_param_gather",
    "tp_comm_overlap", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "fp8_param_gather", "use_distributed_optimizer",
    "use_megatron_fsdp", "overlap_moe_expert_parallel_comm", "accumulate_allreduce_grads_in_fp32",
)  # fmt: skip
OFF = {  # by False
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "create_attention_mask_in_dataloader": "--no-create-attention-mask-in-dataloader",
}
NUMBERS = (  # with a value, where it is not the default
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "expert_tensor_parallel_size", "mtp_num_layers", "pipeline_model_parallel_layout",
)  # fmt: skip
DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
SHAPED = (  # said by `_shape`, from what the knobs make of the model
    "position_embedding_type", "untie_embeddings_and_output_weights", "disable_bias_linear",
    "swiglu", "normalization", "num_experts", "moe_router_topk", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "qk_layernorm",
)  # fmt: skip
STEPPED = (
    "transformer_impl", "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by",
    "cross_entropy_loss_fusion", "microbatch_group_size_per_vp_stage", "recompute_num_layers",
    "recompute_modules", "moe_grouped_gemm", "cp_comm_type", "fp8_recipe",
    "moe_token_dispatcher_type",
)  # fmt: skip
STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine",
          "inverse-sqrt": "inverse-square-root", "wsd": "WSD"}  # fmt: skip
LOSS = "cross_entropy_loss_fusion"
FLEXIBLE = ("deepep", "hybridep")  # backends of one dispatcher
KNOBS = (*SWITCHES, *OFF, *NUMBERS, *DTYPES, *SHAPED, *STEPPED)
Words = list[str]


@final
class Megatron(Target):
    """`megatron.sh`, started from a checkout of Megatron-LM."""

    name = "megatron"
    title = "Megatron-LM"
    version = "d98e8a6"
    frameworks = ("megatron",)
    says: ClassVar = frozenset({
        "precision", *OPTIMIZER_SAYS, "recompute_blocks", "attention", "sequence_length",
        "micro_batch", "accumulation", "steps", "seed", "weights", "objective", "parallel",
        "method", "packing",
        *(f"options.{name}" for name in KNOBS),
    })  # fmt: skip
    axes: ClassVar = ALL_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        check_steps(job, self.name)
        left: dict[str, str] = {}
        words = write_arguments(job, left)
        becomes: dict[str, Any] = {"packing": True, "optimizer.implementation": "fused"}
        if f"options.{LOSS}" in left:
            becomes[f"options.{LOSS}"] = "native"
        lines = "".join(f"  {line}\n" for line in words)
        text = (
            "set -euo pipefail\n"
            f"{_environment(job)}"
            "# Data and tokenizer are stand-ins: put your --data-path and tokenizer in their"
            " place.\n"
            f"ARGUMENTS=(\n{lines})\n"
            f'{torchrun(job)} pretrain_gpt.py "${{ARGUMENTS[@]}}" "$@"\n'
        )
        file = File(name=NAME, text=text, first="#!/bin/bash\n")
        return Draft(
            files=(file,), left=left, start=f"bash {NAME}", becomes=becomes,
            needs=_find_needs(job), notes=NOTES,
        )  # fmt: skip


NOTES = (
    "weights: random ones; to go on from published ones convert them, and add --load",
    "data: stand-ins; preprocess yours, and put --data-path and its tokenizer in their place",
)


def _find_needs(job: Job) -> tuple[Need, ...]:
    """Kernels of NVIDIA's, where the layers are made of them."""
    if _options(job.recipe)["transformer_impl"] != "transformer_engine":
        return ()
    return (need("transformer-engine", "transformer_impl: transformer_engine"),)


def _environment(job: Job) -> str:
    """What Megatron asks of it: a queue of kernels in order, without which no product is shared.

    Megatron-FSDP refuses it, and tokens that travel beside another micro-batch want more queues.
    """
    p, options = job.recipe.parallel, _options(job.recipe)
    more = options["use_megatron_fsdp"] or options["overlap_moe_expert_parallel_comm"]
    ordered = (p.tp > 1 or p.cp > 1) and not more
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if ordered else ""


def write_arguments(job: Job, left: dict[str, str]) -> Words:
    """Lines of arguments, quoted for a shell; what they cannot say goes into `left`."""
    recipe = job.recipe
    if recipe.method != "full":
        left["method"] = f"{recipe.method}: pretrain_gpt.py has no adapters (Megatron-Bridge has)"
    if recipe.objective != "pretrain":
        left["objective"] = f"{recipe.objective}: pretrain_gpt.py pretrains"
    if not recipe.packing:
        left["packing"] = "false: rows are full"
    p = recipe.parallel
    if p.dp_shard > 1 and p.zero != 1:
        left["parallel.zero"] = f"{p.zero}: Megatron's distributed optimizer cuts states alone"
    if not p.reshard_after_forward:
        left["parallel.reshard_after_forward"] = "false: no weights are gathered"
    options = _options(recipe)
    shape = read_shape(
        Described(
            model=job.model,
            recipe=replace(recipe, framework="megatron", options=options),
            device=job.device,
        )
    )
    groups: list[list[object]] = [
        _shape(job, shape, options, left),
        _mesh(job, options),
        _step(job, left),
        _precision(recipe, options, left),
        _recompute(job, options, left),
        _optimizer(recipe, options, left),
        _switches(options),
        ["--tokenizer-type", "NullTokenizer", "--vocab-size", job.architecture.vocab],
        ["--mock-data"],
    ]
    return [shlex.join(map(str, group)) for group in groups if group]


def _options(recipe: Recipe) -> dict[str, Option]:
    megatron = find_framework("megatron")
    return resolve_options(megatron, recipe.options)


def _shape(job: Job, s: Shape, options: dict[str, Option], left: dict[str, str]) -> list[object]:
    a, config, latent = job.architecture, job.recipe.model.config, s.attention.latent
    words: list[object] = [
        "--num-layers", a.layers, "--hidden-size", a.hidden, "--ffn-hidden-size", a.ffn,
        "--num-attention-heads", a.heads, "--kv-channels", a.head_dim,
        "--max-position-embeddings", max(a.max_sequence, job.recipe.sequence_length),
        "--normalization", "RMSNorm" if s.norm == 1 else "LayerNorm",
    ]  # fmt: skip
    if a.kv_heads < a.heads and not latent.kv_rank:
        words += ["--group-query-attention", "--num-query-groups", a.kv_heads]
    words += ["--swiglu"] if s.widen == 2 else []
    words += ["--disable-bias-linear"] if not s.bias else []
    words += ["--add-qkv-bias"] if s.attention.qkv_bias and not s.bias else []
    words += ["--untie-embeddings-and-output-weights"] if not s.ends.tied else []
    words += ["--qk-layernorm"] if s.attention.qk_norm else []
    if s.ends.positions:
        words += ["--position-embedding-type", "learned_absolute"]
    else:
        parameters = config.get("rope_parameters") or {}
        words += ["--position-embedding-type", "rope"]
        if base := config.get("rope_theta", parameters.get("rope_theta")):
            words += ["--rotary-base", int(base)]
        else:
            left["model"] = "memfit's catalogue has no rotary base: add --rotary-base"
    if eps := config.get("rms_norm_eps", config.get("layer_norm_eps")):
        words += ["--norm-epsilon", eps]
    if latent.kv_rank:
        words += [
            "--multi-latent-attention", "--kv-lora-rank", latent.kv_rank,
            "--qk-head-dim", latent.unrotated, "--qk-pos-emb-head-dim", latent.rotated,
            "--v-head-dim", latent.value,
        ]  # fmt: skip
        words += ["--q-lora-rank", latent.query_rank] if latent.query_rank else []
    e = s.experts
    if e.count:
        words += [
            "--num-experts", e.count, "--moe-router-topk", e.per_token,
            "--moe-ffn-hidden-size", e.ffn,
        ]  # fmt: skip
        words += ["--moe-shared-expert-intermediate-size", e.shared_ffn] if e.shared_ffn else []
        if e.dense_layers:
            each = [0] * e.dense_layers + [1] * (a.layers - e.dense_layers)
            words += ["--moe-layer-freq", str(each).replace(" ", "")]
        words += ["--moe-grouped-gemm"] if options["moe_grouped_gemm"] else []
        if (kind := options["moe_token_dispatcher_type"]) in FLEXIBLE:
            words += ["--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", kind]
        else:
            words += ["--moe-token-dispatcher-type", kind]
    return words


def _mesh(job: Job, options: dict[str, Option]) -> list[object]:
    p = job.recipe.parallel
    words: list[object] = [
        "--tensor-model-parallel-size", p.tp, "--pipeline-model-parallel-size", p.pp,
        "--context-parallel-size", p.cp,
    ]  # fmt: skip
    words += ["--expert-model-parallel-size", p.ep] if p.ep > 1 else []
    words += ["--sequence-parallel"] if p.sequence_parallel and p.tp > 1 else []
    words += ["--num-virtual-stages-per-pipeline-rank", p.virtual_pp] if p.virtual_pp > 1 else []
    if p.dp_replicate > 1 and p.dp_shard > 1:
        words += ["--num-distributed-optimizer-instances", p.dp_replicate]
    if group := options["microbatch_group_size_per_vp_stage"]:
        words += ["--microbatch-group-size-per-virtual-pipeline-stage", group]
    words += ["--cp-comm-type", options["cp_comm_type"]] if p.cp > 1 else []
    return words


def _step(job: Job, left: dict[str, str]) -> list[object]:
    recipe = job.recipe
    kernels = {"flash": "flash", "cudnn": "fused", "eager": "unfused", "math": "unfused"}
    backend = kernels.get(recipe.attention, "auto")
    if backend == "auto":
        left["attention"] = f"{recipe.attention}: not one of Megatron's; it chooses"
    return [
        "--seq-length", recipe.sequence_length, "--micro-batch-size", recipe.micro_batch,
        "--global-batch-size", recipe.global_batch, "--train-iters", recipe.steps,
        "--seed", recipe.seed, "--attention-backend", backend,
    ]  # fmt: skip


def _precision(recipe: Recipe, options: dict[str, Option], left: dict[str, str]) -> list[object]:
    known: dict[str, list[object]] = {
        "bf16-mixed": ["--bf16"], "fp16-mixed": ["--fp16"], "fp32": [],
        "fp8-mixed": ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", options["fp8_recipe"]],
        "fp4-mixed": ["--bf16", "--fp4-format", "e2m1"],
    }  # fmt: skip
    words = list(known[recipe.precision])
    changed = [name for name in DTYPES if options[name] != "fp32"]
    if (masters := options["main_params_dtype"]) not in ("fp32", "fp16"):
        left["options.main_params_dtype"] = f"{masters}: Megatron's are fp32 or fp16"
        changed.remove("main_params_dtype")
    if changed:
        words.append("--use-precision-aware-optimizer")
    for name in changed:
        words += [_argument(name), options[name]]
    return words


def _recompute(job: Job, options: dict[str, Option], left: dict[str, str]) -> list[object]:
    recipe, layers = job.recipe, job.architecture.layers
    if not recipe.recompute_blocks:
        return []
    if recipe.recompute == "selective":
        modules = str(options["recompute_modules"]).split(",")
        return ["--recompute-granularity", "selective", "--recompute-modules", *modules]
    words: list[object] = ["--recompute-granularity", "full", "--recompute-method"]
    chunks = recipe.parallel.pp * recipe.parallel.virtual_pp
    each = recipe.recompute_blocks  # Megatron's own plans count those of each stage's chunk
    if each < -(-layers // chunks):
        return [*words, "block", "--recompute-num-layers", each]
    return [*words, "uniform", "--recompute-num-layers", options["recompute_num_layers"]]


def _schedule(recipe: Recipe, left: dict[str, str]) -> list[object]:
    made, steps = recipe.optimizer, recipe.steps
    style = STYLES.get(made.schedule)
    if style is None:
        left["optimizer.schedule"] = f"{made.schedule}: none of Megatron-LM's"
        return []
    words: list[object] = ["--lr-decay-style", style, "--lr-warmup-iters", made.warmup(steps)]
    if made.floor:
        words += ["--min-lr", made.floor * made.learning_rate]
    if made.schedule == "wsd":
        words += ["--lr-wsd-decay-iters", made.decay(steps), "--lr-wsd-decay-style", "linear"]
    return words


def _optimizer(
    recipe: Recipe, options: dict[str, Option], left: dict[str, str]
) -> list[object]:  # fmt: skip
    made = recipe.optimizer
    name = {"adamw": "adam", "sgd": "sgd"}[made.name]
    if made.implementation != "fused":
        left["optimizer.implementation"] = f"{made.implementation}: Megatron's are fused"
    words: list[object] = [
        "--optimizer", name, "--lr", made.learning_rate,
        *_schedule(recipe, left),
        "--weight-decay", made.weight_decay, "--clip-grad", made.clip_norm,
    ]  # fmt: skip
    if name == "sgd":
        words += ["--sgd-momentum", made.momentum]
    else:
        words += ["--adam-beta1", made.beta1, "--adam-beta2", made.beta2, "--adam-eps", made.eps]
    if options["transformer_impl"] == "legacy":
        left["options.transformer_impl"] = "legacy: Megatron-LM of before megatron-core"
    else:
        words += ["--transformer-impl", options["transformer_impl"]]
    words += [
        "--hidden-dropout", options["hidden_dropout"],
        "--attention-dropout", options["attention_dropout"],
        "--make-vocab-size-divisible-by", options["make_vocab_size_divisible_by"],
    ]  # fmt: skip
    fused = options[LOSS]
    if fused == "te":
        left[f"options.{LOSS}"] = "te: refused as unstable since; Megatron's own is set"
        fused = "native"
    if fused != "none":
        words += ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", fused]
    return words


def _switches(options: dict[str, Option]) -> list[object]:
    words: list[object] = []
    for name in SWITCHES:
        if options[name] and name not in SHAPED:
            words.append(_argument(name))
    if options["use_megatron_fsdp"]:
        words += ["--ckpt-format", "fsdp_dtensor"]  # it writes no other
    words += [off for name, off in OFF.items() if not options[name]]
    for name in NUMBERS:
        if options[name]:
            words += [_argument(name), options[name]]
    return words


def _argument(name: str) -> str:
    return "--" + name.replace("_", "-")


exports.register("megatron")(Megatron())
