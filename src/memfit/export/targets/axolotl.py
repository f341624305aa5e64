"""axolotl's YAML."""

from __future__ import annotations

from typing import Any, ClassVar, final

from memfit.base_formats import is_quantised
from memfit.export.data import (
    load_with,
    read_notes,
    refuse_patterns,
    refuse_shapes,
    refuse_weights,
    write_conversations,
)
from memfit.export.files import File
from memfit.export.hugging_face import (
    FSDP_AXES,
    MODEL_SAYS,
    NOT_QUANTISED,
    TRAINER_SAYS,
    check_eight_bits,
    count_examples,
    doubles_scales,
    drops_dropout,
    find_attention,
    find_bits,
    recomputes,
    reenters,
    write_adapter_kind,
    write_optimizer,
    write_precision,
    write_zero,
)
from memfit.export.needs import find_needs
from memfit.export.target import Draft, Job, exports, refuse_loss
from memfit.export.targets.accelerate import (
    Launches,
    shards,
    uses_deepspeed,
    write_deepspeed,
)
from memfit.plan.frameworks.hugging_face.kernels import kernels_of
from memfit.plan.frameworks.hugging_face.peft import saved_modules
from memfit.records.recipe import ADAPTED, Recipe

NAME = "axolotl.yaml"
# which axolotl turns on by itself where none is named, and whose memory is not described
LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
# keys of a dataset, by the shape of its records
TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": "completion"},
    "messages": {"type": "chat_template"},
    "conversations": {
        "type": "chat_template", "field_messages": "conversations",
        "message_property_mappings": {"role": "from", "content": "value"},
    },
    "alpaca": {"type": "alpaca"},
    "answers": {
        "type": {
            "field_instruction": "prompt", "field_output": "completion",
            "format": "{instruction}", "no_input_format": "{instruction}",
        }
    },
}  # fmt: skip
LIGER = {
    "rope": "liger_rope", "rms_norm": "liger_rms_norm", "swiglu": "liger_glu_activation",
}  # fmt: skip
# that come with axolotl
HAS = ("peft", "bitsandbytes", "torchao", "accelerate", "liger-kernel")


@final
class Axolotl(Launches):
    """`axolotl train axolotl.yaml`."""

    name = "axolotl"
    title = "axolotl"
    version = "0.19"
    frameworks = ("hf-trainer", "deepspeed")  # which axolotl builds on
    loads = True
    reads_back = True
    says: ClassVar = (
        TRAINER_SAYS | MODEL_SAYS | {"objective", "offload", "parallel.tp", "parallel.cp"}
    )
    axes: ClassVar = FSDP_AXES | {"tp", "cp"}

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        check_eight_bits(job.recipe, self.name)
        values, left, becomes = write_config(job)
        files = [File(name=NAME, data=values, checked=True)]
        if uses_deepspeed(job):
            files.append(write_deepspeed(job, left))
        start = f"axolotl train {NAME}"
        if job.nodes > 1:
            start += (
                f" --launcher torchrun -- --nnodes {job.nodes} --nproc_per_node {job.per_node}"
                ' --rdzv_backend c10d --rdzv_endpoint "$MASTER_ADDR:29500"'
            )
        needs = find_needs(
            job.recipe, attention=values.get("attn_implementation", ""),
            optim=values["optimizer"], has=HAS,
        )  # fmt: skip
        return Draft(
            files=tuple(files), left=left, start=start, becomes=becomes, needs=needs,
            notes=read_notes(job.data, job.recipe.objective),
        )  # fmt: skip


def write_config(job: Job) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The file's keys, what they cannot say, and what then happens."""
    recipe = job.recipe
    optimizer, left, becomes = write_optimizer(job)
    attention, kernel, instead = find_attention(job)
    recompute, blocks, all_blocks = recomputes(job)
    precision = write_precision(recipe)
    dropped, without = drops_dropout(recipe)
    left |= kernel | blocks | dropped
    becomes |= all_blocks | instead | without | _weights_as_computed(recipe, precision, left)
    if shards(job):
        becomes["options.fsdp_version"] = 2
    quantised = find_bits(recipe) > 0 and recipe.method in ADAPTED
    if quantised and recipe.framework != "deepspeed":
        becomes["options.prepare_kbit"] = False
        if recipe.options.get("prepare_kbit"):
            casts = "true: axolotl casts what is not quantised back to 16 bits"
            left["options.prepare_kbit"] = casts
    if recipe.compares and recipe.method == "full" and precision["bf16"] + precision["fp16"]:
        becomes["options.fp32_outputs"] = True  # autocast over weights of 16 bits
    values: dict[str, Any] = {
        "base_model": job.weights,
        **_adapter(recipe, left, becomes),
        **_data(job),
        **_conversations(job),
        "sequence_len": recipe.sequence_length,
        "sample_packing": recipe.packing,
        "pad_to_sequence_len": recipe.packing,
        "micro_batch_size": count_examples(recipe),
        "gradient_accumulation_steps": recipe.accumulation,
        **_length(job),
        "seed": recipe.seed,
        "optimizer": optimizer.pop("optim"),
        "lr_scheduler": optimizer.pop("lr_scheduler_type", None),
        **optimizer,
        **precision,
        "gradient_checkpointing": recompute,
        "gradient_checkpointing_kwargs": {"use_reentrant": reenters(job, left, sharded=False)},
        **attention,
        **_kernels(recipe),
        **_mesh(job, left),
        "output_dir": "outputs",
    }
    return values, left, becomes


def _length(job: Job) -> dict[str, Any]:
    """Steps, or passes over the data."""
    return {"max_steps": job.steps} if job.epochs is None else {"num_epochs": job.epochs}


def _kernels(recipe: Recipe) -> dict[str, Any]:
    """Liger's operations one by one, its loss, or cut cross-entropy: plugins."""
    operations = kernels_of(recipe)
    values: dict[str, Any] = {}
    plugins = []
    if operations or recipe.loss == "chunked":
        plugins.append("axolotl.integrations.liger.LigerPlugin")
        values = {LIGER[name]: True for name in operations}
        if recipe.loss == "chunked":
            values["liger_fused_linear_cross_entropy"] = True
    if recipe.loss == "fused":
        plugins.append("axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin")
        values["cut_cross_entropy"] = True
    return {"plugins": plugins, **values} if plugins else {}


def _conversations(job: Job) -> dict[str, Any]:
    key = "chat_template_jinja"
    values = write_conversations(
        job.plan.request.task, "axolotl", template=key, learns={"all": {"train_on_inputs": True}}
    )
    return {"chat_template": "jinja", **values} if key in values else values


def _data(job: Job) -> dict[str, Any]:
    """Rows of text, of chats, or of pairs as TRL's DPOTrainer reads them: axolotl's no type."""
    recipe, data = job.recipe, job.data
    refuse_weights(data, "axolotl")
    refuse_shapes(data, tuple(TYPES), recipe.objective, "axolotl")
    refuse_patterns(data, "axolotl")
    usual = "text" if recipe.objective == "pretrain" else "messages"
    found: list[dict[str, Any]] = [{"path": data.named, "shape": usual}]
    if data.here:
        found = [
            {"path": file, "ds_type": load_with(part), "shape": part.shape or usual}
            for part in data.parts for file in part.files
        ]  # fmt: skip
    refuse_loss(recipe, {"dpo": ("sigmoid",)}, "axolotl")
    if recipe.compares:
        return {
            "rl": "dpo",
            "rl_beta": recipe.preference.beta,
            "dpo_label_smoothing": recipe.preference.label_smoothing,
            "precompute_ref_log_probs": recipe.preference.reference == "precomputed",
            "datasets": [{**_without_shape(one), "split": "train"} for one in found],
        }
    return {"datasets": [{**_without_shape(one), **TYPES[one["shape"]]} for one in found]}


def _without_shape(one: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in one.items() if key != "shape"}


def _weights_as_computed(
    recipe: Recipe, precision: dict[str, Any], left: dict[str, str]
) -> dict[str, Any]:
    """`bf16: true` loads weights in bfloat16 too (utils/config, torch_dtype), with autocast."""
    if recipe.method in ADAPTED:
        if recipe.base_format in ("fp32", "bf16", "fp16"):
            loaded = {"bf16-mixed": "bf16", "bf16": "bf16", "fp16-mixed": "fp16"}
            if recipe.base_format != loaded.get(recipe.precision, "fp32"):
                left["base_format"] = f"{recipe.base_format}: weights are of the computed dtype"
                return {"base_format": loaded.get(recipe.precision, "fp32")}
        if recipe.precision == "bf16":
            precision["bf16"] = True
            left["precision"] = "bf16: adapters are fp32 here, under autocast"
            return {"precision": "bf16-mixed"}
        return {}
    if recipe.precision == "bf16":
        precision["bf16"] = True
    if recipe.parallel.dp_shard > 1 and recipe.framework != "deepspeed":
        return _weights_in_fp32(recipe, left)
    if recipe.precision in ("bf16-mixed", "fp16-mixed") and recipe.framework != "deepspeed":
        left["precision"] = f"{recipe.precision}: weights are loaded in 16 bits, not in fp32"
        return {"precision": recipe.precision.removesuffix("-mixed")}
    return {}


def _weights_in_fp32(recipe: Recipe, left: dict[str, str]) -> dict[str, Any]:
    """accelerate's FSDP2 makes fp32 of what is trained in 16 bits under autocast."""
    if recipe.precision != "bf16":
        return {}
    left["precision"] = "bf16: accelerate's FSDP2 stores in fp32 what is trained"
    return {"precision": "bf16-mixed"}


def _adapter(
    recipe: Recipe, left: dict[str, str], becomes: dict[str, Any]
) -> dict[str, Any]:  # fmt: skip
    values: dict[str, Any] = {}
    bits = find_bits(recipe)
    if bits == 4 and recipe.method in ADAPTED:
        values["load_in_4bit"] = True
        if recipe.base_format != "nf4":
            left["base_format"] = f"{recipe.base_format}: axolotl's 4 bits are nf4"
            becomes["base_format"] = "nf4"
        becomes["options.double_quantisation"] = True
        if not doubles_scales(recipe):
            left["options.double_quantisation"] = "false: axolotl quantises the scales, too"
    elif bits == 8:
        values["load_in_8bit"] = True
    if recipe.method in ADAPTED:
        targets = list(recipe.lora.targets)
        values |= {
            "adapter": "qlora" if bits == 4 else "lora",
            "lora_r": recipe.lora.rank,
            "lora_alpha": int(recipe.lora.alpha),
            "lora_dropout": recipe.lora.dropout,
            **write_adapter_kind(recipe, "peft_"),
            **dict.fromkeys(LORA_KERNELS, False),
        }
        if recipe.lora.alpha != int(recipe.lora.alpha):
            left["lora.alpha"] = f"{recipe.lora.alpha}: a whole number here"
        if saved := saved_modules(recipe):
            values["lora_modules_to_save"] = list(saved)
        if targets == ["all-linear"]:
            values["lora_target_linear"] = True
        else:
            values["lora_target_modules"] = targets
        if is_quantised(recipe.base_format) and not bits:
            left["base_format"] = f"{recipe.base_format}: {NOT_QUANTISED}"
    return values


def _mesh(job: Job, left: dict[str, str]) -> dict[str, Any]:
    recipe, p = job.recipe, job.recipe.parallel
    if recipe.framework == "deepspeed":
        return {"deepspeed": "deepspeed.json"}
    sharded = p.dp_shard > 1 or p.tp > 1 or p.cp > 1
    if recipe.offload != "none" and (recipe.offload != "parameters" or not sharded):
        left["offload"] = f"{recipe.offload}: FSDP offloads parameters with states, or nothing"
    if not sharded:
        return {}
    left |= write_zero(job)
    if p.zero == 3 and not p.reshard_after_forward:
        left["parallel.zero"] = "3 without resharding is FSDP's 2: weights stay after the forward"
    if recipe.options.get("fsdp_version") == 1:
        left["options.fsdp_version"] = "1: this file asks for 2, which accelerate keeps up"
    return {
        "fsdp_version": 2,
        "fsdp_config": {
            "reshard_after_forward": p.zero == 3 and p.reshard_after_forward,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "FULL_STATE_DICT",
            "offload_params": recipe.offload == "parameters",
            "cpu_ram_efficient_loading": not find_bits(recipe),
        },
        "dp_replicate_size": p.dp_replicate,
        "dp_shard_size": p.dp_shard,
        "tensor_parallel_size": p.tp,
        "context_parallel_size": p.cp,
    }


exports.register("axolotl")(Axolotl())
