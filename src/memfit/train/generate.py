"""What a trained model says: sampling from a run folder or a model folder."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memfit.errors import InvalidRequest
from memfit.train.export import FOLDER
from memfit.train.tokenizer import read_tokenizer


def generate(
    folder: Path,
    prompt: str,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """The continuation of a prompt, without the prompt; equal arguments give equal text.

    `temperature` 0 takes the likeliest token each time; `top_k` 0 draws from all tokens. Stops at
    the end of text, or where the model's positions end. Raises InvalidRequest: no model in the
    folder, an adapter whose base is gone, a prompt longer than the model's positions.
    """
    place = find_model_folder(folder)
    tokenizer = read_tokenizer(str(place))
    model = load_model(place)
    start = list(tokenizer.start) or ([] if tokenizer.end is None or prompt else [tokenizer.end])
    ids = start + (tokenizer.encode(prompt) if prompt else [])
    if not ids:
        raise InvalidRequest("an empty prompt, and the tokenizer has no token to start from")
    limit = int(getattr(model.config, "max_position_embeddings", 0)) or len(ids) + max_new_tokens
    if len(ids) >= limit:
        raise InvalidRequest(
            f"the prompt has {len(ids)} tokens and the model {limit} positions",
            hint="shorten the prompt",
        )
    chance = torch.Generator().manual_seed(seed)
    made: list[int] = []
    cache, new = None, torch.tensor([ids])
    device = next(model.parameters()).device
    with torch.no_grad():
        while len(made) < max_new_tokens and len(ids) + len(made) < limit:
            out = model(input_ids=new.to(device), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            token = _draw(out.logits[0, -1].float().cpu(), temperature, top_k, chance)
            if token == tokenizer.end:
                break
            made.append(token)
            new = torch.tensor([[token]])
    return tokenizer.decode(made)


def find_model_folder(folder: Path) -> Path:
    """The folder itself when it holds a model, or its `model/` when it is a run folder."""
    for place in (folder / FOLDER, folder):
        if (place / "config.json").exists() or (place / "adapter_config.json").exists():
            return place
    hint = "a run folder has one once its training has finished"
    if (folder / "run.json").exists():
        hint = "its training has not finished: start the same `memfit train` again"
    raise InvalidRequest(f"no model in `{folder}`", hint=hint)


def load_model(folder: Path) -> Any:
    """The model of a folder, adapter included, ready to generate.

    Raises InvalidRequest when it, or the base of its adapter, cannot be read.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    adapter = folder / "adapter_config.json"
    base: str | Path = folder
    if adapter.exists():
        base = json.loads(adapter.read_text()).get("base_model_name_or_path") or ""
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
        from peft import PeftModel

        with warnings.catch_warnings():  # peft calls what transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            model = PeftModel.from_pretrained(model, str(folder))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _draw(logits: Tensor, temperature: float, top_k: int, chance: torch.Generator) -> int:
    """One token from (vocab,) logits."""
    if temperature <= 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        least = torch.topk(logits, top_k).values[-1]
        logits = logits.masked_fill(logits < least, float("-inf"))
    weights = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(weights, 1, generator=chance))
