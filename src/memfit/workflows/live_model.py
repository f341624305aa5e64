"""A model that is in memory already, or its config, as the keys of a request.

Nothing of Hugging Face's is imported: what is read are attributes that its models and configs have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memfit.adapters import find_adapter
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.records.recipe import Recipe

DTYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
STATE_IT = "plan its base: `memfit.plan_model(model.config, method=…)`"
Keys = dict[str, Any]


def read_live(thing: Any) -> Keys:
    """The keys of a request that a model or a config of Hugging Face's states.

    Of a config the model alone; of a module also the method (`full`, `freeze`, or that of peft's
    adapter) and the dtype that its weights are stored in. Raises InvalidRequest.
    """
    config = getattr(_base_of(thing), "config", thing)
    if not hasattr(config, "to_json_string") or not getattr(config, "model_type", ""):
        raise InvalidRequest(
            f"a `{type(thing).__name__}` is neither a Hugging Face model nor a config",
            hint="give a `PreTrainedModel`, peft's model around one, or a `PreTrainedConfig`",
        )
    content = json.loads(config.to_json_string(use_diff=False))  # numbers as keys become texts
    quantisation = content.pop("quantization_config", None)
    name = content.pop("_name_or_path", "") or config.model_type
    keys: Keys = {"model": {"name": str(name), **content}}
    if quantisation:
        keys["base_format"] = _read_coding(quantisation)
    if hasattr(thing, "named_parameters"):
        keys |= _read_module(thing, quantised=bool(quantisation))
    return keys


def check_parameters(thing: Any, recipe: Recipe) -> None:
    """Raise InvalidRequest where a module trains another number of parameters than the recipe."""
    if not hasattr(thing, "named_parameters"):
        return
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    trained = sum(p.numel() for p in thing.parameters() if p.requires_grad)
    if trained != model.trainable_parameters:
        raise InvalidRequest(
            f"the module trains {trained:,} parameters, and `method: {recipe.method}` of"
            f" `{recipe.model.name}` trains {model.trainable_parameters:,}",
            hint="the module was changed after it was loaded, or a word says another method;"
            " memfit plans the class's own modules with adapters of peft's",
        )


def _base_of(thing: Any) -> Any:
    inner = getattr(thing, "get_base_model", None)
    return inner() if callable(inner) else thing


def _read_module(module: Any, *, quantised: bool) -> Keys:
    adapters: Mapping[str, Any] = getattr(module, "peft_config", None) or {}
    stored = _stored_dtype(module)
    if adapters:
        keys = _read_adapter(module, adapters)
        return keys if quantised or not stored else {**keys, "base_format": stored}
    names = {name: p.requires_grad for name, p in module.named_parameters()}
    trained = [name for name, trains in names.items() if trains]
    if not trained:  # loaded to be given an adapter
        return {}
    if len(trained) < len(names):
        return {"method": "freeze", "freeze": {"patterns": trained}}
    return {"method": "full"} | ({"precision": "bf16"} if stored == "bf16" else {})


def _stored_dtype(module: Any) -> str:
    """The dtype of most frozen weights, or of all; "" for one that memfit has no word for."""
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        if parameter.requires_grad and getattr(module, "peft_config", None):
            continue
        sizes[str(parameter.dtype)] = sizes.get(str(parameter.dtype), 0) + parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype], default="")
    return DTYPES.get(most, "")


def _read_adapter(module: Any, adapters: Mapping[str, Any]) -> Keys:
    if len(adapters) > 1:
        raise InvalidRequest(
            f"the module has {len(adapters)} adapters: {', '.join(adapters)}",
            hint="`memfit.plan_model` reads one; leave one on it",
        )
    (config,) = adapters.values()
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise InvalidRequest(
            f"peft's adapter is of type `{kind}`, and memfit describes `LORA`", hint=STATE_IT
        )
    names = {
        name.rpartition(".lora_A.")[0].rpartition(".")[2]
        for name, _ in module.named_parameters()
        if ".lora_A." in name
    }
    lora = {
        "rank": config.r, "alpha": config.lora_alpha, "dropout": config.lora_dropout,
        "targets": sorted(names),
        "scaling": "rank-stabilised" if config.use_rslora else "plain",
    }  # fmt: skip
    return {"method": "dora" if config.use_dora else "lora", "lora": lora}


def _read_coding(config: Mapping[str, Any]) -> str:
    if config.get("load_in_8bit"):
        return "int8"
    if config.get("load_in_4bit"):
        return str(config.get("bnb_4bit_quant_type", "fp4"))
    kind = config.get("quant_method", "unknown")
    raise InvalidRequest(
        f"its weights are quantised by `{kind}`, which is not described",
        hint="described: bitsandbytes' 4 and 8 bits; else plan the model that it was made of",
    )
