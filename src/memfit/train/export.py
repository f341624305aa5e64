"""The final model as a folder that transformers, or peft, loads."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from memfit.errors import RunFailed
from memfit.families import family_of
from memfit.libraries import quiet_import
from memfit.train.build import Built
from memfit.train.checkpoint import flush, on_host
from memfit.train.hugging_face import base_model, stored_buffers
from memfit.train.stored import file_parts
from memfit.train.tokenizer import Tokenizer

with quiet_import():
    from transformers import AutoConfig

FOLDER = "model"


def save_model(run: Path, built: Built, tokenizer: Tokenizer) -> Path:
    """Write `run`/model: config, weights and tokenizer, or the adapter in peft's format.

    Appears whole or not at all. Raises RunFailed when it cannot be written.
    """
    target = run / FOLDER
    temporary = run / f".{FOLDER}-unfinished"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        if built.recipe.adapted:
            _save_adapter(temporary, built)
        else:
            _save_whole(temporary, built, tokenizer)
        tokenizer.save(temporary)
        for path in temporary.iterdir():
            flush(path)
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RunFailed(
            f"could not save the model in `{target}`: {reason}",
            hint="free space there and start the same command again: it resumes",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _save_whole(folder: Path, built: Built, tokenizer: Tokenizer) -> None:
    """A tied head is left out, as Hugging Face does; the config is the one the user gave."""
    model, family = base_model(built.model), family_of(built.recipe.model).name
    save_file(
        file_tensors(model, family),
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = AutoConfig.for_model(**built.recipe.model.config | {"model_type": family})
    config.architectures = [type(model).__name__]
    config.dtype = getattr(torch, built.recipe.trainable_dtype)
    if tokenizer.end is not None:
        config.eos_token_id = tokenizer.end
    config.save_pretrained(str(folder))


def file_tensors(model: nn.Module, family: str) -> dict[str, torch.Tensor]:
    """Parameters and stored buffers on the host, named as in the family's published files."""
    held = {**dict(model.named_parameters()), **stored_buffers(model)}
    return {
        part.name: tensor[part.where]
        for name, tensor in on_host(held).items()
        for part in file_parts(name, tuple(tensor.shape), family)
    }


def _save_adapter(folder: Path, built: Built) -> None:
    model = cast(Any, built.model)
    for config in model.peft_config.values():
        config.base_model_name_or_path = built.recipe.model.source or None
    with warnings.catch_warnings():  # peft calls what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        model.save_pretrained(str(folder), save_embedding_layers=False)
