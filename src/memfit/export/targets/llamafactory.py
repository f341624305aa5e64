"""LLaMA-Factory's YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, final

from memfit.base_formats import is_quantised
from memfit.core.errors import InvalidRequest
from memfit.export.data import (
    PLACEHOLDER,
    read_notes,
    refuse_patterns,
    refuse_shapes,
    write_conversations,
)
from memfit.export.files import File
from memfit.export.hugging_face import (
    FSDP_AXES,
    MODEL_SAYS,
    NOT_QUANTISED,
    TRAINER_SAYS,
    check_eight_bits,
    doubles_scales,
    drops_dropout,
    find_attention,
    find_bits,
    recomputes,
    reenters,
    write_adapter_kind,
    write_liger,
    write_optimizer,
    write_precision,
    write_steps,
)
from memfit.export.needs import find_needs
from memfit.export.target import Draft, Job, exports, refuse_loss
from memfit.export.targets.accelerate import NAME as LAUNCH
from memfit.export.targets.accelerate import (
    Launches,
    become_sharded,
    launch,
    shards,
    uses_deepspeed,
    write_deepspeed,
    write_launch,
)
from memfit.plan.frameworks.hugging_face.peft import WIDE, copies_wide, saved_modules
from memfit.records.recipe import ADAPTED, Recipe

NAME = "llamafactory.yaml"
HAS = ("peft", "accelerate")  # that come with LLaMA-Factory
ENDINGS = ("jsonl", "json", "parquet", "txt")
CHAT = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
# what an entry of dataset_info.json says of its records, by their shape
COLUMNS: dict[str, dict[str, Any]] = {
    "text": {"columns": {"prompt": "text"}},
    "messages": {
        "formatting": "sharegpt", "columns": {"messages": "messages"},
        "tags": {**CHAT, "assistant_tag": "assistant", "system_tag": "system"},
    },
    "conversations": {"formatting": "sharegpt", "columns": {"messages": "conversations"}},
    "alpaca": {
        "columns": {"prompt": "instruction", "query": "input", "response": "output"},
    },
    "answers": {"columns": {"prompt": "prompt", "response": "completion"}},
    "pairs": {
        "ranking": True,
        "columns": {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"},
    },
}  # fmt: skip
STAGES = {"pretrain": "pt", "sft": "sft", "dpo": "dpo"}
KERNELS = {"sdpa": "sdpa", "flash_attention_2": "fa2", "eager": "disabled"}


@final
class LlamaFactory(Launches):
    """`llamafactory-cli train llamafactory.yaml`."""

    name = "llamafactory"
    title = "LLaMA-Factory"
    version = "0.9.5"
    frameworks = ("hf-trainer", "deepspeed")  # which LLaMA-Factory builds on
    loads = True
    reads_back = True
    says: ClassVar = (
        TRAINER_SAYS | MODEL_SAYS
        | {"objective", "offload", "options.compares", "options.copies_dtype"}
    )  # fmt: skip
    axes: ClassVar = FSDP_AXES

    def draft(self, job: Job) -> Draft:
        """See `Target.draft`."""
        check_eight_bits(job.recipe, self.name)
        values, left, becomes = write_arguments(job)
        files, start = [], f"llamafactory-cli train {NAME}"
        if uses_deepspeed(job):
            files.append(write_deepspeed(job, left))
            values["deepspeed"] = files[0].name
            start = f"{_torchrun(job)} {start}"
        elif job.world > 1:
            config, more = write_launch(job)
            left |= more
            becomes |= become_sharded(job)
            files.append(File(name=LAUNCH, data=config, checked=True))
            start = f"{launch(job)} src/train.py {NAME}"
        elif job.recipe.offload != "none":
            left["offload"] = f"{job.recipe.offload}: of FSDP or DeepSpeed"
        files.insert(0, File(name=NAME, data=values, checked=True))
        files += _describe_data(job)
        kernel = "flash_attention_2" if values.get("flash_attn") == "fa2" else ""
        needs = find_needs(job.recipe, attention=kernel, optim=values["optim"], has=HAS)
        return Draft(
            files=tuple(files), left=left, start=start, becomes=becomes, needs=needs,
            notes=read_notes(job.data, job.recipe.objective),
        )  # fmt: skip


def _name_data(job: Job) -> dict[str, Any]:
    """Names of `dataset_info.json`, which lies beside the file; LLaMA-Factory is started there."""
    data = job.data
    if data.named == PLACEHOLDER:
        return {"dataset": data.named}
    named = {"dataset": ",".join(_entries(job)), "dataset_dir": "."}
    if not data.weighted:
        return named
    for one in data.weighted:  # an entry each, as a probability is an entry's
        if len(one.files) != 1:
            found = f"{len(one.files)} files" if one.files else "not of this machine"
            raise InvalidRequest(
                f"`{one.named}` is {found}, and LLaMA-Factory gives each file a probability",
                hint="join its files, and name the one",
            )
    # until each was shown whole, as an epoch of memfit's
    shares = ",".join(f"{one.share:.6g}" for one in data.weighted)
    return {**named, "mix_strategy": "interleave_over", "interleave_probs": shares}


def _describe_data(job: Job) -> list[File]:
    """What `dataset` names: where it is and what its columns are."""
    if job.data.named == PLACEHOLDER:
        return []
    return [File(name="dataset_info.json", data=_entries(job))]


def _entries(job: Job) -> dict[str, Any]:
    """An entry a file: LLaMA-Factory takes a folder for files of one kind, and no list of them."""
    data, recipe = job.data, job.recipe
    known = ("text",) if recipe.objective == "pretrain" else tuple(COLUMNS)
    refuse_shapes(data, known, recipe.objective, "llamafactory")
    refuse_patterns(data, "llamafactory")
    usual = {"pretrain": "text", "dpo": "pairs"}.get(recipe.objective, "messages")
    if not data.here:
        return {"data": {"hf_hub_url": data.named, **COLUMNS[usual]}}
    found: dict[str, Any] = {}
    for part in data.parts:
        if part.nested:
            raise InvalidRequest(
                f"`{part.files[0]}` has answers that are lists of messages, and LLaMA-Factory"
                " compares texts",
                hint="`--to trl` or `--to axolotl` read them",
            )
        for file in part.files:
            if Path(file).suffix[1:] not in ENDINGS:
                raise InvalidRequest(
                    f"`{file}`: LLaMA-Factory reads {', '.join(ENDINGS)} by their endings",
                    hint="rename the file",
                )
            columns = COLUMNS[part.shape or usual]
            if part.shape == "alpaca" and "input" not in part.keys:
                columns = {"columns": {"prompt": "instruction", "response": "output"}}
            if part.shape == "pairs" and "prompt" not in part.keys:
                columns = {**columns, "columns": {"chosen": "chosen", "rejected": "rejected"}}
            found[f"data_{len(found) + 1}"] = {"file_name": file, **columns}
    return found


def _torchrun(job: Job) -> str:
    """What its launcher takes from the environment; without a port each machine picks its own."""
    words = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={job.per_node}"
    if job.nodes > 1:
        words += f' NNODES={job.nodes} NODE_RANK="$RANK" MASTER_ADDR="$MASTER_ADDR"'
        words += " MASTER_PORT=29500"
    return words


def write_arguments(job: Job) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """The file's keys, what they cannot say, and what then happens."""
    recipe = job.recipe
    optimizer, left, becomes = write_optimizer(job)
    attention, kernel, instead = find_attention(job, multiple=recipe.objective != "pretrain")
    recompute, blocks, all_blocks = recomputes(job)
    precision = write_precision(recipe)
    dropped, without = drops_dropout(recipe)
    liger, unsaid, plain = write_liger(recipe, "enable_liger_kernel", loss=True)
    left |= kernel | blocks | dropped | unsaid
    becomes |= all_blocks | instead | without | plain
    if recipe.precision == "bf16":
        precision["pure_bf16"] = True
    loaded = {"bf16-mixed": "bf16", "bf16": "bf16", "fp16-mixed": "fp16"}.get(recipe.precision)
    if recipe.method in ADAPTED and loaded is None:
        why = "frozen weights are of the checkpoint's dtype where neither `bf16` nor `fp16` is set"
        left["precision"] = f"{recipe.precision}: {why}"
        becomes["precision"] = "bf16-mixed" if "bf16" in job.device.flops else "fp16-mixed"
    elif recipe.method in ADAPTED and recipe.base_format in ("fp32", "bf16", "fp16"):
        becomes["base_format"] = loaded
        if recipe.base_format != becomes["base_format"]:
            left["base_format"] = f"{recipe.base_format}: weights are of the computed dtype"
    values: dict[str, Any] = {
        "model_name_or_path": job.weights,
        **_name_kernel(attention),
        "stage": STAGES[recipe.objective],
        **_pairs(recipe, left, becomes),
        "do_train": True,
        **_method(recipe, left, becomes),
        "disable_gradient_checkpointing": not recompute or shards(job),
        "use_reentrant_gc": reenters(job, left, sharded=shards(job)),
        **_name_data(job),
        **write_conversations(
            job.plan.request.task,
            "llamafactory",
            learns={"all": {"train_on_prompt": True}, "last-answer": {"mask_history": True}},
        ),  # without `template` it takes the tokenizer's own
        "cutoff_len": recipe.sequence_length,
        "packing": recipe.packing,
        "neat_packing": recipe.packing and recipe.objective == "sft",
        **write_steps(job),
        **optimizer,
        **precision,
        **liger,
        "output_dir": "outputs",
        "report_to": "none",
    }
    if recipe.compares:
        becomes["options.compares"] = "llamafactory"
        if (whose := recipe.options.get("compares", "llamafactory")) != "llamafactory":
            left["options.compares"] = f"{whose}: LLaMA-Factory compares pairs itself"
    return values, left, becomes


def _name_kernel(attention: dict[str, Any]) -> dict[str, str]:
    kernel = attention.get("attn_implementation")
    return {"flash_attn": KERNELS[kernel]} if kernel else {}


def _pairs(recipe: Recipe, left: dict[str, str], becomes: dict[str, Any]) -> dict[str, Any]:
    if not recipe.compares:
        return {}
    refuse_loss(recipe, {"dpo": ("sigmoid",)}, "llamafactory")
    adapted = recipe.method in ADAPTED
    becomes["preference.reference"] = "adapter-off" if adapted else "second-model"
    if recipe.preference.reference == "precomputed":
        instead = "the adapter is off" if adapted else "it loads a second model"
        left["preference.reference"] = f"precomputed: LLaMA-Factory has none, {instead} instead"
    return {
        "pref_loss": "sigmoid",
        "pref_beta": recipe.preference.beta,
        "dpo_label_smoothing": recipe.preference.label_smoothing,
    }


def _method(recipe: Any, left: dict[str, str], becomes: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"finetuning_type": "lora" if recipe.method in ADAPTED else "full"}
    if recipe.method in ADAPTED:
        targets = list(recipe.lora.targets)
        values |= {
            "lora_rank": recipe.lora.rank,
            "lora_alpha": int(recipe.lora.alpha),
            "lora_dropout": recipe.lora.dropout,
            **write_adapter_kind(recipe),
            "lora_target": "all" if targets == ["all-linear"] else ",".join(targets),
            **_copies(recipe, left, becomes),
        }
        if recipe.lora.alpha != int(recipe.lora.alpha):
            left["lora.alpha"] = f"{recipe.lora.alpha}: a whole number here"
    bits = find_bits(recipe)
    if bits and recipe.method in ADAPTED:
        values["quantization_bit"] = bits
        values["quantization_method"] = "bnb"
        becomes["options.prepare_kbit"] = False
        if recipe.options.get("prepare_kbit"):
            left["options.prepare_kbit"] = "true: LLaMA-Factory casts nothing up"
    if bits == 4:
        values["quantization_type"] = recipe.base_format
        values["double_quantization"] = doubles_scales(recipe)
    if is_quantised(recipe.base_format) and not bits:
        left["base_format"] = f"{recipe.base_format}: {NOT_QUANTISED}"
    return values


def _copies(recipe: Recipe, left: dict[str, str], becomes: dict[str, Any]) -> dict[str, Any]:
    saved = saved_modules(recipe)
    if not saved:
        return {}
    if recipe.framework != "deepspeed" and recipe.precision.endswith("-mixed"):
        becomes["options.copies_dtype"] = WIDE
        if not copies_wide(recipe):
            left["options.copies_dtype"] = "base: LLaMA-Factory trains copies in fp32"
    return {"additional_target": ",".join(saved)}


exports.register("llamafactory")(LlamaFactory())
