"""Filling an empty model: from safetensors, or at random from the recipe's seed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from memfit.adapters import find_adapter
from memfit.adapters._apply import replace_parameters
from memfit.errors import InvalidRequest
from memfit.families import read_model
from memfit.recipe import Recipe
from memfit.train.hugging_face import bare_model, base_model

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_NAMES = {"lm_head.weight": "embed_out.weight"}  # what GPT-NeoX's files still call the head


def fill_weights(model: nn.Module, recipe: Recipe) -> None:
    """Give every parameter its value; adapters start as peft's do, changing nothing.

    `random` is Hugging Face's own initialisation; equal seeds give equal base weights whatever
    the method. `pretrained` reads the folder or hub id `recipe.model.source`, tensor by tensor,
    casting to the stored dtype.
    Raises InvalidRequest: no weights file, a truncated one, a missing tensor, a wrong shape.
    """
    adapter = find_adapter(recipe)
    base = adapter.base_parameters(model)
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=list(gpus)):
        torch.manual_seed(recipe.seed)
        if recipe.weights == "random":
            _fill_random(recipe, base)
        else:
            _fill_pretrained(recipe.model.source, base, base_model(model).base_model_prefix)
        adapter.reset(model)


def check_weights(recipe: Recipe) -> None:
    """Raise InvalidRequest for what `fill_weights` would, from the files' headers alone."""
    if recipe.weights != "pretrained":
        return
    source, rows = recipe.model.source, read_model(recipe.model).weights
    files, prefix = _tensor_files(source), rows[0].name.partition(".")[0]
    wanted: dict[Path, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for row in rows:
        stored = _stored_name(row.name, prefix, files, source)
        wanted[files[stored]].append((stored, row.shape))
    for file, tensors in wanted.items():
        with _open(file) as opened:
            for stored, shape in tensors:
                _check_shape(opened, stored, file, shape)


def _fill_random(recipe: Recipe, base: dict[str, nn.Parameter]) -> None:
    """Hugging Face's initialisation looks at names, which an adapter changes: so a bare twin that
    shares the parameters is initialised."""
    twin = bare_model(recipe)
    replace_parameters(twin, lambda name, _: base[name])
    twin.apply(twin._init_weights)  # children first: a GPT-2 block scales its projections last


def _fill_pretrained(source: str, base: dict[str, nn.Parameter], prefix: str) -> None:
    """Read each parameter under one of the names that files give it."""
    files = _tensor_files(source)
    wanted: dict[Path, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, parameter in base.items():
        stored = _stored_name(name, prefix, files, source)
        wanted[files[stored]].append((stored, parameter))
    for file, tensors in wanted.items():
        with _open(file) as opened:
            for stored, parameter in tensors:
                _copy(parameter, opened, stored, file)


def _names_on_disk(name: str, prefix: str) -> tuple[str, ...]:
    """Files of a bare backbone, such as GPT-2's on the hub, lack the prefix."""
    return name, name.removeprefix(f"{prefix}."), OTHER_NAMES.get(name, name)


def _stored_name(name: str, prefix: str, files: Mapping[str, Path], source: str) -> str:
    """The one of a parameter's names on disk that the files hold."""
    stored = next((n for n in _names_on_disk(name, prefix) if n in files), None)
    if stored is None:
        raise InvalidRequest(
            f"no tensor `{name}` in the weights of `{source}`",
            hint="the weights and config.json belong to different models",
        )
    return stored


def _check_shape(opened: Any, name: str, file: Path, want: tuple[int, ...]) -> None:
    have = tuple(opened.get_slice(name).get_shape())
    if have != want:
        raise InvalidRequest(
            f"`{name}` in `{file}` has shape {have}, the model needs {want}",
            hint="the weights and config.json belong to different models",
        )


def _copy(parameter: Tensor, opened: Any, name: str, file: Path) -> None:
    _check_shape(opened, name, file, tuple(parameter.shape))
    parameter.copy_(opened.get_tensor(name))


def _open(file: Path) -> Any:
    """A lazily read safetensors file; its header says how long it must be."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(
            f"cannot read the weights in `{file}`: {error}",
            hint="the file is truncated or not safetensors; download or copy it again",
        ) from None


def _tensor_files(source: str) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    if not source:
        raise InvalidRequest(
            "`weights: pretrained`, but the model was given by its config alone",
            hint="use `weights: random`, or name a folder or hub id with safetensors",
        )
    folder = Path(source)
    if folder.is_dir():
        return _files_of_folder(folder)
    return _files_of_hub(source)


def _files_of_folder(folder: Path) -> dict[str, Path]:
    index = folder / INDEX
    if index.exists():
        names = _weight_map(index)
        missing = sorted({f for f in names.values() if not (folder / f).exists()})
        if missing:
            raise InvalidRequest(
                f"`{index}` names `{missing[0]}`, which is not there",
                hint=f"copy all the files of the model into `{folder}`",
            )
        return {name: folder / file for name, file in names.items()}
    if not (folder / SINGLE).exists():
        raise InvalidRequest(
            f"no weights in `{folder}`: neither `{SINGLE}` nor `{INDEX}`",
            hint="memfit reads safetensors only; `weights: random` needs no file",
        )
    return _names_in(folder / SINGLE)


def _files_of_hub(name: str) -> dict[str, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        try:
            index = Path(hf_hub_download(name, INDEX))
        except LocalEntryNotFoundError:  # offline: not in the cache, which proves nothing
            return _names_in(Path(hf_hub_download(name, SINGLE)))
        except EntryNotFoundError:
            return _names_in(Path(hf_hub_download(name, SINGLE)))
        names = _weight_map(index)
        local = {file: Path(hf_hub_download(name, file)) for file in _unique(names.values())}
        return {tensor: local[file] for tensor, file in names.items()}
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise InvalidRequest(
            f"no weights at `{name}`: it is no folder, and the hub did not give them"
            f" ({type(error).__name__}: {str(error).splitlines()[0]})",
            hint="check the name and the network; `weights: random` needs no file",
        ) from None


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"cannot read `{index}`: {error}", hint="download or copy it again"
        ) from None
    return dict(names)


def _names_in(file: Path) -> dict[str, Path]:
    with _open(file) as opened:
        return dict.fromkeys(opened.keys(), file)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
