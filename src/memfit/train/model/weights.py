"""Filling an empty model: from safetensors, or at random from the recipe's seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memfit.adapters import find_adapter
from memfit.adapters.shared.apply import replace_parameters
from memfit.adapters.shared.peft_layers import add_score_head, stored_name
from memfit.adapters.shared.stored import WEIGHTS, stored_names
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import read_json_table
from memfit.families import read_model
from memfit.families.weight_files.names import BLOCKS, SCALES, Part, file_parts, find_parts
from memfit.parallelism.whole import is_sharded, local_part, own_part, whole
from memfit.records.model import SCORE
from memfit.records.recipe import Recipe
from memfit.train.distributed.pipeline import present
from memfit.train.model.hugging_face import (
    bare_model,
    base_model,
    parts,
    score_head,
    stored_buffers,
)
from memfit.train.model.quantised import Quantised, quantised_modules

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = WEIGHTS  # peft's


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip  # of a file's header; integers are not weights
# what codes of 4 bits mean: a sign, two bits of exponent and one of mantissa (E2M1)
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
UNKNOWN = torch.float32  # the widest that weights are published in


class Weights(Protocol):
    """Where a parameter's values come from, one tensor at a time."""

    def parts(self, name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        """The tensors of the source that make up a parameter."""

    def holds(self, name: str) -> bool:
        """Whether the source has a tensor of that very name."""

    def read(self, part: Part, box: tuple[slice, ...] | None = None) -> Tensor:
        """One of them, in host memory, as the file stores it; box: of each dimension, only that."""


def fill_weights(
    model: nn.Module, recipe: Recipe, weights: Weights | None = None,
    judge: Weights | None = None,
) -> None:  # fmt: skip
    """Give every parameter its value; adapters start as peft's do, changing nothing.

    `random` is Hugging Face's own initialisation; equal seeds give equal base weights whatever
    the method. `pretrained` reads the folder or hub id `recipe.model.source`, tensor by tensor,
    casting to the stored dtype. weights: what to read in place of that source; judge: and in place
    of the folder of a reward model's adapter.
    Raises InvalidRequest: no weights file, a truncated one, a missing tensor, a wrong shape.
    """
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=list(gpus)):
        torch.manual_seed(recipe.seed)
        if recipe.weights == "random":
            _fill_random(recipe, *split_base(model, recipe))
        else:
            prefix = base_model(model).base_model_prefix
            copy_base(model, recipe, weights or FileWeights(recipe.model.source, prefix))
        find_adapter(recipe).reset(model, recipe)
        if recipe.scored_by_adapter:
            _fill_judge(model, recipe, judge)


def _fill_judge(model: nn.Module, recipe: Recipe, source: Weights | None) -> None:
    """The adapter and the head of a reward model, from peft's file."""
    own = dict(model.named_parameters())
    names = stored_names(find_adapter(recipe).adapt(read_model(recipe.model), recipe))
    source = source or FileWeights(recipe.reward.adapter_folder, "", ADAPTER)
    copy_weights({stored: own[name] for name, (stored, _) in names.items()}, source)


def split_base(
    model: nn.Module, recipe: Recipe
) -> tuple[dict[str, nn.Parameter], dict[str, Quantised]]:
    """The base's plain parameters, and its quantised weights, by Hugging Face's names."""
    quantised = quantised_modules(model)
    own = {id(p) for module in quantised.values() for p in module.stored().values()}
    base = find_adapter(recipe).base_parameters(model)
    return {name: p for name, p in base.items() if id(p) not in own}, quantised


def copy_base(model: nn.Module, recipe: Recipe, source: Weights) -> None:
    """Fill the base and its stored buffers; of what is quantised one dense weight is alive at a
    time.
    """
    base, quantised = split_base(model, recipe)
    if SCORE in base and not source.holds(SCORE):  # a language model has none
        del base[SCORE]
        head = score_head(model)
        with whole(head):
            base_model(model)._init_weights(head)
    copy_weights({**base, **stored_buffers(model)}, source)
    for name, module in quantised.items():
        dense = module.empty_dense()
        copy_weights({name: dense}, source)
        module.store(dense)
        del dense


def copy_weights(parameters: Mapping[str, Tensor], weights: Weights) -> None:
    """Put each parameter's values in place; one tensor of the source is alive at a time.

    A cast happens on the host where the device is another (aten/src/ATen/native/cuda/Copy.cu,
    copy_requires_temporaries), so a GPU holds nothing but its parameters.
    """
    with torch.no_grad():
        for name, parameter in parameters.items():
            for part in weights.parts(name, tuple(parameter.shape)):
                _put(parameter, part, weights)


def _put(parameter: Tensor, part: Part, weights: Weights) -> None:
    """Put one tensor of the source where it belongs; of a shard, the part that it holds."""
    if not is_sharded(parameter):
        parameter[part.place].copy_(weights.read(part))
        return
    box, local = own_part(parameter), local_part(parameter)
    if not part.place:
        local.copy_(weights.read(part, box))
        return
    first, *rest = part.place  # of the experts, one
    rows = box[0]
    assert isinstance(first, int)
    if rows.start <= first < rows.stop:
        local[(first - rows.start, *rest)].copy_(weights.read(part))


class FileWeights:
    """Safetensors of a folder or hub id, under any of the names that files give a parameter."""

    def __init__(self, source: str, prefix: str, single: str = SINGLE) -> None:
        self._source = source
        self._prefix = prefix
        self._files = tensor_files(source) if single == SINGLE else names_in(Path(source, single))
        self._opened: dict[Path, Any] = {}

    def parts(self, name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        """See `Weights`. Raises InvalidRequest: a missing tensor."""
        return _parts(name, shape, self._prefix, self._files, self._source)

    def holds(self, name: str) -> bool:
        """See `Weights`."""
        return name in self._files

    def read(self, part: Part, box: tuple[slice, ...] | None = None) -> Tensor:
        """See `Weights`. Raises InvalidRequest: a wrong shape, a broken file."""
        opened = self._open(part.name, part.shape)
        if part.packed:
            scales = part.name.removesuffix(BLOCKS) + SCALES
            others = self._open(scales, part.shape[:-1])
            (expert,) = part.place
            return unpack_expert(
                opened.get_tensor(part.name)[expert], others.get_tensor(scales)[expert]
            )
        if box is not None:
            some: Tensor = opened.get_slice(part.name)[box]
            return some
        tensor: Tensor = opened.get_tensor(part.name)
        return tensor

    def _open(self, name: str, shape: tuple[int, ...]) -> Any:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = open_file(file)  # mapped, not read
        _check_shape(self._opened[file], name, file, shape)
        return self._opened[file]


def unpack_expert(codes: Tensor, scales: Tensor) -> Tensor:
    """An expert in MXFP4: (columns, groups, 16) bytes and (columns, groups) exponents of two, 127
    more than they are -> (rows, columns) in bf16, which loses nothing."""
    pairs = torch.tensor(
        [(MXFP4[byte & 15], MXFP4[byte >> 4]) for byte in range(256)], dtype=torch.bfloat16
    )
    dense = nn.functional.embedding(codes.int(), pairs).view(*scales.shape, -1)
    dense.ldexp_((scales.int() - 127).unsqueeze(-1))
    return dense.view(codes.shape[0], -1).T


class EmptyWeights:
    """Host tensors with the shapes and dtypes of a source and no values: what a trace reads.

    `known` is false where the source's files are not on this machine; their dtype is then taken
    to be `UNKNOWN`, and their tensors to be those that the family's publisher stores.
    """

    def __init__(self, prefix: str, family: str, dtypes: Mapping[str, torch.dtype]) -> None:
        self._prefix = prefix
        self._family = family
        self._dtypes = dtypes
        self.known = bool(dtypes)

    @classmethod
    def of(cls, source: str, prefix: str, family: str) -> EmptyWeights:
        """Of a folder or hub id, as far as its files are on this machine."""
        return cls(prefix, family, _dtypes_here(source))

    @classmethod
    def like(cls, model: nn.Module, family: str) -> EmptyWeights:
        """Of a file that holds the model's own parameters in their own dtypes."""
        own = {stored_name(n): p for n, p in model.named_parameters()}
        stored = {
            part.name: p.dtype
            for n, p in own.items()
            for part in file_parts(n, tuple(p.shape), family)
        }
        return cls("", family, stored)

    def parts(self, name: str, shape: tuple[int, ...]) -> Sequence[Part]:
        """See `Weights`; of those alike, which are read one after the other, one stands for all."""
        found = find_parts(name, shape, self._prefix, self._dtypes.__contains__)
        parts = found or file_parts(name, shape, self._family)
        return list({(p.shape, self._dtypes.get(p.name)): p for p in parts}.values())

    def holds(self, name: str) -> bool:
        """See `Weights`."""
        return name in self._dtypes

    def read(self, part: Part, box: tuple[slice, ...] | None = None) -> Tensor:
        """See `Weights`."""
        if part.packed:
            codes = torch.empty(part.shape, dtype=torch.uint8)
            return unpack_expert(codes[0], torch.empty(part.shape[:-1], dtype=torch.uint8)[0])
        whole = torch.empty(part.shape, dtype=self._dtypes.get(part.name, UNKNOWN))
        return whole if box is None else whole[box]  # a view of the mapped file, as safetensors'


def _dtypes_here(source: str) -> dict[str, torch.dtype]:
    """Tensor name -> dtype, from the headers of files that are on this machine; else nothing."""
    try:
        files = _files_of_folder(Path(source)) if Path(source).is_dir() else _files_in_cache(source)
        opened = {file: open_file(file) for file in set(files.values())}
        return {
            name: DTYPES.get(opened[file].get_slice(name).get_dtype(), UNKNOWN)
            for name, file in files.items()
        }
    except (InvalidRequest, SafetensorError):
        return {}


def check_weights(recipe: Recipe) -> None:
    """Raise InvalidRequest for what `fill_weights` would, from the files' headers alone."""
    if recipe.weights != "pretrained":
        return
    source, rows = recipe.model.source, read_model(recipe.model).weights
    files, prefix = tensor_files(source), rows[0].name.partition(".")[0]
    wanted: dict[Path, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for row in rows:
        if row.name == SCORE and SCORE not in files:
            continue  # it starts from random numbers
        for part in _parts(row.name, row.shape, prefix, files, source):
            wanted[files[part.name]].append((part.name, part.shape))
    for file, tensors in wanted.items():
        with open_file(file) as opened:
            for stored, shape in tensors:
                _check_shape(opened, stored, file, shape)


def _fill_random(
    recipe: Recipe, base: dict[str, nn.Parameter], quantised: Mapping[str, Quantised]
) -> None:
    """Hugging Face's initialisation looks at names, which an adapter changes: so a bare twin that
    shares the parameters is initialised. A weight that is quantised is dense for its own turn.
    """
    with _disable_current_modes():  # a trace has no constants on the meta device
        twin = bare_model(recipe)
    for module in twin.modules():  # which the initialisation fills too
        for name, old in module._buffers.items():
            if old is not None:
                module._buffers[name] = torch.empty(old.shape, dtype=old.dtype, device="meta")
    if recipe.values:
        add_score_head(twin, read_model(recipe.model).architecture.head_input)
    replace_parameters(twin, lambda name, old: old if name in quantised else base.get(name, old))
    one = next(iter(base.values()))
    targets: dict[nn.Module, dict[str, Quantised]] = defaultdict(dict)
    for name, target in quantised.items():
        path, _, leaf = name.rpartition(".")
        targets[twin.get_submodule(path)][leaf] = target

    def fill(module: nn.Module) -> None:
        """Of several quantised weights one is dense at a time: no numbers are drawn for the others,
        which have no elements, so that each has those that it would have beside them."""
        own = targets.get(module, {})
        for leaf, target in own.items():
            nothing = torch.empty(0, dtype=target.dtype, device=target.weight.device)
            module._parameters.update((other, nn.Parameter(nothing, False)) for other in own)
            module._parameters[leaf] = nn.Parameter(target.empty_dense(), False)
            twin._init_weights(module)
            target.store(cast(Tensor, getattr(module, leaf)))
            module._parameters[leaf] = None
        if not own:
            twin._init_weights(module)

    blocks = set(parts(twin).blocks)

    def visit(module: nn.Module) -> None:
        """Children first: GPT-2's blocks scale projections last, so that a block is whole at a time
        where it is sharded."""
        if module in blocks:
            with whole(module), present(module, recipe, one):
                module.apply(fill)
            return
        for child in module.children():
            visit(child)
        with whole(module, children=False), present(module, recipe, one, children=False):
            fill(module)

    with torch.device("meta"):  # where its buffers are, which nobody needs
        visit(twin)


def _parts(
    name: str, shape: tuple[int, ...], prefix: str, files: Mapping[str, Path], source: str
) -> list[Part]:
    """The tensors of these files that make up a parameter."""
    parts = find_parts(name, shape, prefix, files.__contains__)
    if not parts:
        raise InvalidRequest(
            f"no tensor `{name}` in the weights of `{source}`",
            hint="the weights and config.json belong to different models",
        )
    return parts


def _check_shape(opened: Any, name: str, file: Path, want: tuple[int, ...]) -> None:
    have = tuple(opened.get_slice(name).get_shape())
    if have != want:
        raise InvalidRequest(
            f"`{name}` in `{file}` has shape {have}, the model needs {want}",
            hint="the weights and config.json belong to different models",
        )


def open_file(file: Path) -> Any:
    """A lazily read safetensors file; its header says how long it must be.

    Raises InvalidRequest where it cannot be read.
    """
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise InvalidRequest(
            f"cannot read the weights in `{file}`: {error}",
            hint="the file is truncated or not safetensors; download or copy it again",
        ) from None


def tensor_files(source: str) -> dict[str, Path]:
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


def find_file(source: str, name: str) -> Path | None:
    """A file that a folder or a hub id has beside its weights; None where it cannot be had."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    if Path(source).is_dir():
        file = Path(source) / name
        return file if file.is_file() else None
    with suppress(EntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        return Path(hf_hub_download(source, name))
    return None


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
    return names_in(folder / SINGLE)


def _files_of_hub(name: str) -> dict[str, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        try:
            index = Path(hf_hub_download(name, INDEX))
        except LocalEntryNotFoundError:  # offline: not in the cache, which proves nothing
            return names_in(Path(hf_hub_download(name, SINGLE)))
        except EntryNotFoundError:
            return names_in(Path(hf_hub_download(name, SINGLE)))
        names = _weight_map(index)
        local = {file: Path(hf_hub_download(name, file)) for file in _unique(names.values())}
        return {tensor: local[file] for tensor, file in names.items()}
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise InvalidRequest(
            f"no weights at `{name}`: it is no folder, and the hub did not give them"
            f" ({type(error).__name__}: {str(error).splitlines()[0]})",
            hint="check the name and the network; `weights: random` needs no file",
        ) from None


def _files_in_cache(name: str) -> dict[str, Path]:
    """The same for what the hub's cache holds; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        index, single = (try_to_load_from_cache(name, file) for file in (INDEX, SINGLE))
        if isinstance(index, str):
            places = {
                tensor: try_to_load_from_cache(name, file)
                for tensor, file in _weight_map(Path(index)).items()
            }
            return {t: Path(p) for t, p in places.items() if isinstance(p, str)}
    except HFValidationError:  # no hub id: a config, or a folder that is gone
        return {}
    return names_in(Path(single)) if isinstance(single, str) else {}


def _weight_map(index: Path) -> dict[str, str]:
    names = read_json_table(index, hint="download or copy it again").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise InvalidRequest(
            f"`{index}` has no `weight_map` from tensors to files", hint="download or copy it again"
        )
    return names


def names_in(file: Path) -> dict[str, Path]:
    """Tensor name -> this file."""
    with open_file(file) as opened:
        return dict.fromkeys(opened.keys(), file)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
