"""Reward models' adapters, made and stored by transformers and peft."""

import json
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification

from memfit.records.reinforcement import RewardAdapter, RewardSettings

TARGETS = {
    "llama": ("k_proj", "o_proj"), "qwen3": ("q_proj", "v_proj"), "gpt_neox": ("query_key_value",),
    "gemma3_text": ("q_proj", "down_proj"), "qwen3_moe": ("k_proj", "v_proj"),
    "deepseek_v3": ("o_proj",),
}  # fmt: skip


def classifier(config, *, labels=1, seed=0):
    """Of a base's configuration, or of the folder that it lies in."""
    torch.manual_seed(seed)
    if isinstance(config, dict):
        made = AutoConfig.for_model(**config, num_labels=labels)
        return AutoModelForSequenceClassification.from_config(made)
    return AutoModelForSequenceClassification.from_pretrained(config, num_labels=labels)


def write_adapter(folder: Path, config, *, labels=1, seed=1, rank=4, targets=(), **more) -> Path:
    """An adapter with a score head, all of its matrices random; config: of the base, or where."""
    kind = config["model_type"] if isinstance(config, dict) else _kind_of(config)
    targets = targets or TARGETS[kind]
    base = classifier(config, labels=labels, seed=seed)
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=False,
        task_type=TaskType.SEQ_CLS, **more,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(base, lora).save_pretrained(folder)
    return folder


def read_adapter(folder: Path, base):
    """The same, as transformers and peft load it on the base of that folder."""
    plain = classifier(str(base))
    plain.config.pad_token_id = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(plain, str(folder)).eval()


def reward_of(folder, *, rank=4, targets=TARGETS["llama"], funcs=(), **more) -> RewardSettings:
    """Of a recipe that is judged by the adapter in a folder."""
    adapter = RewardAdapter(rank=rank, alpha=2.0 * rank, targets=tuple(sorted(targets)))
    return RewardSettings(funcs=(f"adapter:{folder}", *funcs), adapter=adapter, **more)


def change_config(folder: Path, **keys) -> None:
    """Write other values into an adapter's configuration."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def _kind_of(folder) -> str:
    return str(json.loads((Path(folder) / "config.json").read_text())["model_type"])
