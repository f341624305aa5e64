"""An adapter written into its base: one folder that transformers loads without peft.

Weights go from the base's safetensors to new ones, one at a time; no more than one file's worth of
them is in memory. The mathematics are peft's (`get_delta_weight`, `DoraLinearVariant.merge_safe`),
in fp32 and rounded once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from memfit.adapters.shared.peft_layers import MAGNITUDE, PREFIX, STORED_TRANSPOSED
from memfit.adapters.shared.quantised_base import is_projection
from memfit.adapters.shared.stored import CONFIG
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.core.system.reading import read_json_table
from memfit.families import read_model
from memfit.families.weight_files.names import find_parts
from memfit.records.recipe import Recipe
from memfit.records.results import Merged
from memfit.train.checkpoint.files import flush
from memfit.train.model.quantised import QuantisedLinear
from memfit.train.model.weights import (
    ADAPTER,
    DTYPES,
    INDEX,
    SINGLE,
    names_in,
    open_file,
    tensor_files,
)
from memfit.train.run.generate import find_model_folder, find_recipe

FILE_BYTES = 4 * 1024**3  # of one file of the result; what is in memory at most
# What a peft configuration may ask for that changes the mathematics, and is not described here.
OTHER = (
    "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "target_parameters",
    "layer_replication", "use_qalora", "arrow_config", "alora_invocation_tokens",
    "trainable_token_indices",
)  # fmt: skip
BESIDE = ("*.json", "*.jinja", "*.txt", "tokenizer.model")  # what a model's folder has, no weights


class Change(NamedTuple):
    """What an adapter does to one weight."""

    down: Tensor  # (rank, in)
    up: Tensor  # (out, rank)
    magnitude: Tensor | None  # (out)
    factor: float
    turned: bool  # whether the weight is stored (in, out)
    module: str  # of the weight, as the adapter names it

    def apply(self, weight: Tensor) -> Tensor:
        """The merged weight in fp32."""
        added = (self.up.float() @ self.down.float()) * self.factor
        total = weight.float() + (added.t() if self.turned else added)
        if self.magnitude is None:
            return total
        across = 0 if self.turned else 1
        norms = torch.linalg.vector_norm(total, dim=across, keepdim=True)
        ratio: Tensor = self.magnitude.float().reshape(norms.shape) / norms
        return ratio * total


class Squares:
    """Sums of squares over all merged weights."""

    def __init__(self) -> None:
        self.change = self.lost = self.weight = self.other = 0.0

    def add(self, exact: Tensor, rounded: Tensor, weight: Tensor, stored: Tensor | None) -> None:
        """One weight: merged, as it is written, the base's, and what training stored of that."""
        wide = weight.float()
        self.change += _square(exact - wide)
        self.lost += _square(rounded.float() - exact)
        self.weight += _square(wide)
        if stored is not None:
            self.other += _square(stored.float() - wide)


def merge(folder: Path, out: Path) -> Merged:
    """Write base plus adapter as the folder `out`, which appears whole or not at all.

    folder: a run folder, or a folder in peft's format. Dtypes and values are those of the base's
    files, also where training had them rounded or quantised: how far those were is in the result.
    Raises InvalidRequest (no adapter, one that this mathematics does not describe, a base that is
    not there or does not fit, an `out` that exists) and RunFailed (it cannot be written).
    """
    place = find_model_folder(folder)
    config = _read_config(place)
    if out.exists():
        raise InvalidRequest(f"`{out}` exists already", hint="name a folder that does not")
    source = str(config.get("base_model_name_or_path") or "")
    files = tensor_files(_check_source(source, place))
    changes = dict(_read_changes(place, config, files))
    recipe = find_recipe(place)
    temporary = out.parent / f".{out.name}-unfinished"
    shutil.rmtree(temporary, ignore_errors=True)
    squares = Squares()
    try:
        temporary.mkdir(parents=True)
        written = _write(temporary, files, changes, squares, recipe)
        _copy_beside(source, place, temporary)
        for path in temporary.iterdir():
            flush(path)
        os.rename(temporary, out)
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RunFailed(
            f"could not write the merged model in `{out}`: {reason}",
            hint="free space there and start the same command again",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Merged(
        folder=str(out), base=source, weights=len(changes), nbytes=written,
        dtypes=tuple(sorted({_dtype_in(files[n], n) for n in changes})),
        lost=(squares.lost / squares.change) ** 0.5 if squares.change else 0.0,
        base_differs=None if recipe is None else (squares.other / squares.weight) ** 0.5,
    )  # fmt: skip


def _read_config(place: Path) -> dict[str, Any]:
    path = place / CONFIG
    if not path.exists():
        raise InvalidRequest(
            f"`{place}` holds a whole model, not an adapter", hint="there is nothing to merge"
        )
    config: dict[str, Any] = read_json_table(path, hint="copy it again")
    if config.get("peft_type") != "LORA":
        raise InvalidRequest(
            f"`{path}` is of `peft_type: {config.get('peft_type')}`, and memfit merges LORA alone",
            hint="peft's `merge_and_unload` may merge it",
        )
    for key in OTHER:
        if config.get(key):
            raise InvalidRequest(
                f"`{path}` says `{key}: {config[key]}`, which memfit does not merge",
                hint="peft's `merge_and_unload` may merge it",
            )
    return config


def _check_source(source: str, place: Path) -> str:
    if not source:
        raise InvalidRequest(
            f"the adapter in `{place}` was trained on random weights that nobody kept",
            hint="train it on a folder or hub id with weights",
        )
    return source


def _read_changes(
    place: Path, config: dict[str, Any], files: dict[str, Path]
) -> Iterator[tuple[str, Change]]:
    """Names in the base's files, and what is done to them."""
    opened, names = open_file(place / ADAPTER), set(names_in(place / ADAPTER))
    source = str(config["base_model_name_or_path"])
    # peft itself takes `fan_in_fan_out` back where a weight is a Linear's
    transposed = bool(config.get("fan_in_fan_out")) and _model_type(source) in STORED_TRANSPOSED
    rank = config["r"]
    factor = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    for name in sorted(n for n in names if n.endswith(".lora_A.weight")):
        stem = name.removesuffix(".lora_A.weight")
        wanted = [name, f"{stem}.lora_B.weight"]
        wanted += [f"{stem}{MAGNITUDE}"] if config.get("use_dora") else []
        if missing := [n for n in wanted if n not in names]:
            raise InvalidRequest(
                f"`{place / ADAPTER}` lacks `{missing[0]}`", hint="copy the adapter again"
            )
        names -= set(wanted)
        tensors = [opened.get_tensor(n) for n in wanted]
        down, up, magnitude = (*tensors, None)[:3]
        module = stem.removeprefix(PREFIX)
        shape = (up.shape[0], down.shape[1])
        stored = _find(module, files, source)
        if (dtype := _dtype_in(files[stored], stored)) not in DTYPES:
            raise InvalidRequest(
                f"`{stored}` of the base is stored as {dtype}, to which nothing can be added",
                hint="merge into the 16-bit weights that the base was quantised from",
            )
        have = tuple(open_file(files[stored]).get_slice(stored).get_shape())
        turned = transposed and module != "lm_head"  # a Linear among GPT-2's Conv1D
        if have != (shape[::-1] if turned else shape):
            raise InvalidRequest(
                f"the adapter of `{stored}` is for a weight of {shape}, and the base's is {have}",
                hint=f"`{place}` belongs to another base",
            )
        yield stored, Change(down, up, magnitude, factor, turned, module)
    if names:
        raise InvalidRequest(
            f"`{place / ADAPTER}` holds `{min(names)}`, which memfit does not merge",
            hint="peft's `merge_and_unload` may merge it",
        )


def _find(module: str, files: dict[str, Path], source: str) -> str:
    prefix = module.partition(".")[0]
    parts = find_parts(f"{module}.weight", (), prefix, files.__contains__)
    if len(parts) != 1:
        raise InvalidRequest(
            f"the adapter is of `{module}`, and the weights of `{source}` have no such tensor",
            hint="the adapter belongs to another base",
        )
    return parts[0].name


def _write(
    folder: Path,
    files: dict[str, Path],
    changes: dict[str, Change],
    squares: Squares,
    recipe: Recipe | None,
) -> int:
    """All weights of the base, a file whenever enough of them wait; returns bytes in all."""
    waiting: dict[str, Tensor] = {}
    written: list[tuple[Path, list[str]]] = []
    total = 0

    def save() -> None:
        path = folder / f"part-{len(written)}.safetensors"
        save_file(waiting, path, metadata={"format": "pt"})
        written.append((path, list(waiting)))
        waiting.clear()

    for name in sorted(files):
        tensor: Tensor = open_file(files[name]).get_tensor(name)
        if (change := changes.get(name)) is not None:
            exact = change.apply(tensor)
            rounded = exact.to(tensor.dtype)
            stored = None if recipe is None else _as_trained(tensor, change.module, recipe)
            squares.add(exact, rounded, tensor, stored)
            tensor = rounded
        if waiting and sum(t.nbytes for t in waiting.values()) + tensor.nbytes > FILE_BYTES:
            save()
        waiting[name] = tensor
        total += tensor.nbytes
    save()
    _name_files(folder, written, total)
    return total


def _as_trained(weight: Tensor, module: str, recipe: Recipe) -> Tensor:
    """The base's weight as training stored it: rounded, or quantised and made dense."""
    rows = read_model(recipe.model).weights
    quantised = {row.name.rpartition(".")[0] for row in rows if is_projection(row)}
    if not recipe.coding or module not in quantised:
        return weight.to(getattr(torch, recipe.frozen_dtype))
    out, into = weight.shape
    layer = QuantisedLinear(torch.nn.Linear(into, out, bias=False, device="meta"), recipe)
    layer = layer.to_empty(device="cpu")
    layer.store(weight.to(layer.dtype))
    return layer.dense()


def _name_files(folder: Path, written: list[tuple[Path, list[str]]], total: int) -> None:
    """Hugging Face's names: one file, or numbered ones with an index."""
    if len(written) == 1:
        os.rename(written[0][0], folder / SINGLE)
        return
    places: dict[str, str] = {}
    for number, (path, names) in enumerate(written, start=1):
        own = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        os.rename(path, folder / own)
        places |= dict.fromkeys(names, own)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _copy_beside(source: str, place: Path, target: Path) -> None:
    """Config, tokenizer and templates: the base's, then the adapter's own over them."""
    base = Path(source)
    for folder in [*([base] if base.is_dir() else _cached(source)), place]:
        for pattern in BESIDE:
            for path in folder.glob(pattern):
                if path.name not in (CONFIG, INDEX):
                    shutil.copyfile(path, target / path.name)


def _model_type(source: str) -> str:
    from transformers import AutoConfig

    try:
        return str(AutoConfig.from_pretrained(source).model_type)
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"cannot read the configuration of `{source}`: {str(error).splitlines()[0]}",
            hint="it is the base of the adapter",
        ) from None


def _cached(source: str) -> list[Path]:
    """Where the hub's client keeps the base's configuration and tokenizer."""
    from huggingface_hub import snapshot_download

    return [Path(snapshot_download(source, allow_patterns=list(BESIDE)))]


def _dtype_in(file: Path, name: str) -> str:
    return str(open_file(file).get_slice(name).get_dtype())


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
