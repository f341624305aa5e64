"""What a trained model says: sampling from a run folder or a model folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from memfit.adapters.shared.peft_layers import stored_name
from memfit.adapters.shared.stored import CONFIG
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import quiet_import
from memfit.core.system.reading import read_json_table
from memfit.families import read_model
from memfit.records import read_json
from memfit.records.recipe import Attention, Parallel, Recipe
from memfit.records.reinforcement import RewardSettings
from memfit.records.results import Run
from memfit.train.checkpoint.export import FOLDER
from memfit.train.data.tokenizer import Tokenizer, read_tokenizer
from memfit.train.generation.products import quick_products
from memfit.train.generation.sampling import draw_numbers, has_stop_word, mark, sample
from memfit.train.generation.settings import Settings
from memfit.train.model.hugging_face import base_model, stored_buffers
from memfit.train.model.weights import (
    ADAPTER,
    SINGLE,
    FileWeights,
    Weights,
    copy_base,
    copy_weights,
)
from memfit.train.step.build import build_model

with quiet_import():
    from transformers.modeling_outputs import CausalLMOutputWithPast


def generate(
    folder: Path,
    prompt: str,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    *,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop_words: tuple[str, ...] = (),
    chat: bool = False,
) -> str:
    """The continuation of a prompt, without the prompt; equal arguments give equal text.

    chat: the prompt is a user's message, written by the chat template.

    `temperature` 0 takes the likeliest token each time; `top_k` 0 draws from all tokens. Stops at
    the end of text, behind a stop word, or where the model's positions end. Raises InvalidRequest:
    a setting out of range, no model in the folder, an adapter whose base is gone, no chat template,
    a prompt longer than the model's positions.
    """
    settings = Settings(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, repetition_penalty=repetition_penalty, stop_words=stop_words,
    )  # fmt: skip
    settings.check()
    place = find_model_folder(folder)
    tokenizer = read_tokenizer(str(place))
    model = load_model(place)
    ids = _read_prompt(tokenizer, prompt, chat)
    if not ids:
        raise InvalidRequest("an empty prompt, and the tokenizer has no token to start from")
    limit = int(getattr(model.config, "max_position_embeddings", 0)) or len(ids) + max_new_tokens
    if len(ids) >= limit:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens and the model {limit} positions",
            hint="shorten the prompt",
        )
    settings = replace(settings, max_new_tokens=min(max_new_tokens, limit - len(ids)), seed=seed)
    with quick_products(model):
        made = _answer(model, ids, settings, tokenizer)
    return tokenizer.decode(made)


def _read_prompt(tokenizer: Tokenizer, prompt: str, chat: bool) -> list[int]:
    if chat:
        return tokenizer.encode(tokenizer.ask([{"role": "user", "content": prompt}]))
    start = list(tokenizer.start) or ([] if tokenizer.end is None or prompt else [tokenizer.end])
    return start + (tokenizer.encode(prompt) if prompt else [])


def _answer(model: Any, ids: list[int], settings: Settings, tokenizer: Tokenizer) -> list[int]:
    """The tokens after a prompt's, without the one that ends a text."""
    numbers = draw_numbers(settings.seed, 0, 0, settings.max_new_tokens)
    made: list[int] = []
    seen: Tensor | None = None
    cache, new = None, torch.tensor([ids])
    for number in numbers:
        logits, cache = advance(model, new, cache)
        if seen is None and settings.repetition_penalty != 1.0:
            seen = torch.zeros(1, len(logits), dtype=torch.bool)
            mark(seen, 0, ids)
        drawn = torch.tensor([float(number)], dtype=torch.float64)
        token = int(sample(logits[None], drawn, settings, seen)[0])
        if token == tokenizer.end:
            break
        made.append(token)
        if seen is not None:
            seen[0, token] = True
        if has_stop_word(made, settings.stop_words, tokenizer.decode):
            break
        new = torch.tensor([[token]])
    return made


def advance(model: Any, new: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """(1, tokens) new ids after what the cache holds -> (vocab,) fp32 host logits, the cache.

    Logits are of the last position alone. A certificate traces this very function.
    """
    device = next(model.parameters()).device
    with torch.no_grad():
        out = model(
            input_ids=new.to(device), use_cache=True, logits_to_keep=1, **{cache_name(): cache}
        )
        return out.logits[0, -1].float().cpu(), getattr(out, cache_name())


def cache_name() -> str:
    """What transformers calls the key-value cache of a call: `cache` from 5.24 on."""
    new = "cache" in CausalLMOutputWithPast.__dataclass_fields__
    return "cache" if new else "past_key_values"


def find_model_folder(folder: Path) -> Path:
    """The folder itself when it holds a model, or its `model/` when it is a run folder."""
    for place in (folder / FOLDER, folder):
        if (place / "config.json").exists() or (place / CONFIG).exists():
            return place
    hint = "a run folder has one once its training has finished"
    if (folder / "run.json").exists():
        hint = "its training has not finished: start the same `memfit train` again"
    raise InvalidRequest(f"no model in `{folder}`", hint=hint)


def load_model(folder: Path) -> Any:
    """The model of a folder, adapter included, ready to generate.

    What memfit trained is built by the trainer's own `build_model`; any other folder by
    transformers and peft. Raises InvalidRequest when it, or the base of its adapter, cannot be
    read.
    """
    if (recipe := find_recipe(folder)) is None:
        return _load_foreign(folder)
    if recipe.scores:
        raise InvalidRequest(
            f"`{folder}` holds a reward model, which scores texts and writes none",
            hint="transformers loads it: AutoModelForSequenceClassification.from_pretrained",
        )
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_generator(recipe, kind)
    prefix = base_model(model).base_model_prefix
    base = FileWeights(recipe.model.source, prefix) if recipe.adapted else None
    trained = FileWeights(str(folder), prefix, SINGLE if base is None else ADAPTER)
    fill_generator(model, recipe, base, trained)
    return model


def find_recipe(folder: Path) -> Recipe | None:
    """The recipe that trained a `model` folder, as the run beside it says; None without a run."""
    run = folder.parent / "run.json"
    if folder.name != FOLDER or not run.exists():
        return None
    recipe = read_json(run, Run).recipe
    if recipe.adapted and not recipe.model.source:
        raise InvalidRequest(
            f"the adapter in `{folder}` was trained on random weights that nobody kept",
            hint="train LoRA on a folder or hub id with weights",
        )
    return recipe


def build_generator(recipe: Recipe, device: str) -> nn.Module:
    """The trained module, empty, in the dtypes that it was trained in, ready to generate.

    Where the device does not have the recipe's attention kernel, it uses another: the result
    differs by rounding. Raises InvalidRequest as `build_model` does.
    """
    kernel: Attention = recipe.attention
    if device == "cpu" and kernel != "math":
        kernel = "flash"
    elif kernel == "varlen":
        windowed = read_model(recipe.model).architecture.windowed(recipe.sequence_length)
        kernel = "efficient" if windowed else "flash"
    elif device == "cuda" and kernel == "flash" and recipe.compute_dtype == "float32":
        kernel = "efficient"
    alone = replace(  # one process, whatever the recipe's mesh is
        recipe, attention=kernel, recompute_blocks=0, selective_blocks=0, loss="plain",
        loss_chunk=0, compile="none", offload="none", parallel=Parallel(),
        # the policy alone answers, and nothing judges
        objective="sft" if recipe.values or recipe.copies_reference else recipe.objective,
        reward=RewardSettings(),
    )  # fmt: skip
    model = build_model(alone, device).eval()
    if recipe.autocast:
        plain, dtype = model.forward, getattr(torch, recipe.compute_dtype)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device, dtype, cache_enabled=False):
                return plain(*args, **kwargs)

        model.forward = forward
    return model


def fill_generator(
    model: nn.Module, recipe: Recipe, base: Weights | None, trained: Weights
) -> None:
    """Give every parameter what training left; the base of an adapter is where it was."""
    if base is None:
        copy_weights({**dict(model.named_parameters()), **stored_buffers(model)}, trained)
        return
    copy_base(model, recipe, base)
    own = {n: p for n, p in model.named_parameters() if ".lora_" in n}
    copy_weights({stored_name(n): p for n, p in own.items()}, trained)


def _load_foreign(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    adapter = folder / CONFIG
    base: str | Path = folder
    if adapter.exists():
        base = read_json_table(adapter).get("base_model_name_or_path") or ""
        if not base:
            raise InvalidRequest(
                f"the adapter in `{folder}` was trained on random weights that nobody kept",
                hint="train LoRA on a folder or hub id with weights",
            )
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(base)
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"cannot read the model in `{base}`: {str(error).splitlines()[0]}",
            hint=f"it is the base of the adapter in `{folder}`" if adapter.exists() else "",
        ) from None
    if adapter.exists():
        with quiet_import():
            from peft import PeftModel

        with warnings.catch_warnings():  # peft calls what transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            model = PeftModel.from_pretrained(model, str(folder))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
