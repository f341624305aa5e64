"""The final model as a folder that transformers, or peft, loads."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from memfit.adapters.shared.peft_layers import POLICY, PREFIX, VALUE, stored_name
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.core.libraries import quiet_import
from memfit.families import family_of
from memfit.families.weight_files.names import Part, file_parts
from memfit.parallelism.whole import gather
from memfit.records import read_json, write_json
from memfit.records.model import SCORE, VALUE_MODEL
from memfit.train.checkpoint.files import Manifest, describe_files, find_change, on_host
from memfit.train.data.tokenizer import Tokenizer
from memfit.train.distributed.pipeline import name_all, receive
from memfit.train.distributed.ranks import Ranks
from memfit.train.model.hugging_face import base_model, parts, stored_buffers
from memfit.train.model.weights import ADAPTER, INDEX, SINGLE, find_file
from memfit.train.step.build import Built

with quiet_import():
    from transformers import AutoConfig

FOLDER = "model"
VALUE_FOLDER = "value"  # of PPO with adapters: the value's with its head, as a reward model's
WRITTEN = "{}.json"  # of the run folder: size and SHA-256 of the folder's files


def save_model(run: Path, built: Built, tokenizer: Tokenizer, ranks: Ranks | None = None) -> Path:
    """Write `run`/model: config, weights and tokenizer, or the adapter in peft's format.

    Appears whole or not at all. ranks: all take part, one weight is whole at a time, and the first
    writes. Raises RunFailed when it cannot be written.
    """
    if built.recipe.values and built.recipe.adapted:
        _put(run, VALUE_FOLDER, lambda folder: _save_adapter(folder, built, VALUE), tokenizer)
    target = run / FOLDER
    if ranks is not None and ranks.rank:
        for _ in gather_files(built, keep=False):
            pass
        ranks.wait()
        return target

    def write(folder: Path) -> None:
        if built.recipe.adapted:
            _save_adapter(folder, built)
        else:
            _save_whole(folder, built, tokenizer)
        if ranks is not None:
            ranks.wait()

    _put(run, FOLDER, write, tokenizer)
    return target


def _put(run: Path, name: str, write: Callable[[Path], None], tokenizer: Tokenizer) -> None:
    """A folder of a run that appears whole or not at all."""
    target, temporary = run / name, run / f".{name}-unfinished"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        tokenizer.save(temporary)
        files = describe_files(temporary)
        write_json(run / WRITTEN.format(name), {"schema": 1, "files": files})
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


def check_model(run: Path) -> None:
    """Raise InvalidRequest where the model of a finished run is no longer as it was written."""
    for name in (FOLDER, VALUE_FOLDER):
        listed, folder = run / WRITTEN.format(name), run / name
        if not listed.exists():  # of a version that did not list them, or without a value
            continue
        try:
            change = find_change(folder, read_json(listed, Manifest).files)
        except InvalidRequest as error:
            change = error.message
        if change:
            raise InvalidRequest(
                f"the run is finished, and `{folder}` is not as it was written: {change}",
                hint=f"remove `{run / FOLDER}`: the same command writes it again from the"
                " checkpoint",
            )


def gather_files(built: Built, *, keep: bool) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each file of a model's weights with its tensors in host memory, from the shards of all ranks.

    Every rank gathers every weight, one at a time and in the same order; keep: whether this is the
    one that writes them. Files are of a few gigabytes, as Hugging Face splits them, so that no more
    is ever in one rank's memory. An adapter is one file, by its parameters' own names.
    """
    held, family = _held(base_model(built.model)), family_of(built.recipe.model).name
    file_of: dict[str, str] = {}
    if built.recipe.adapted:
        held = {n: p for n, p in built.model.named_parameters() if p.requires_grad}
    held = name_all(built.model, built.recipe, held)
    if not built.recipe.adapted:
        file_of = _split(held, family)
    left = Counter(file_of.values())
    waiting: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, shard in held.items():
        with torch.no_grad():
            tensor = receive(built.model, built.recipe, name, gather(shard))
        if not keep:
            del tensor  # or it would be there while the next one is gathered
            continue
        parts = file_parts(name, tuple(tensor.shape), family) if file_of else [Part(name, ())]
        for part in parts:
            file = file_of.get(part.name, ADAPTER)
            waiting[file][part.name] = tensor[part.place].detach().to("cpu", copy=True)
            left[file] -= 1
            if not left[file]:
                yield file, waiting.pop(file)
        del tensor
    if file_of:
        return
    yield ADAPTER, waiting.pop(ADAPTER, {})


def _split(held: Mapping[str, Tensor], family: str) -> dict[str, str]:
    """The file of each tensor."""
    with _disable_current_modes():  # shapes alone
        shapes = {
            part.name: torch.empty(part.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in held.items()
            for part in file_parts(name, tuple(tensor.shape), family)
        }
        names = split_torch_state_dict_into_shards(shapes).filename_to_tensors
    return {name: file for file, group in names.items() for name in group}


def _save_whole(folder: Path, built: Built, tokenizer: Tokenizer) -> None:
    """A tied head is left out, as Hugging Face does; the config is the one the user gave."""
    model, family = base_model(built.model), family_of(built.recipe.model).name
    alone = built.recipe.parallel.world == 1
    _save_in_turn(folder, _split_files(model, family) if alone else gather_files(built, keep=True))
    config = AutoConfig.for_model(**built.recipe.model.config | {"model_type": family})
    config.architectures = [type(model).__name__]
    config.dtype = getattr(torch, built.recipe.trainable_dtype)
    config.eos_token_id = _join_ends(config.eos_token_id, tokenizer.end)
    if built.recipe.scores:  # the class finds a row's last token by what is no padding
        config.num_labels, config.pad_token_id = 1, tokenizer.padding
    config.save_pretrained(str(folder))
    if built.recipe.weights == "pretrained" and not built.recipe.scores:
        _save_generation(folder, built.recipe.model.source, tokenizer.end)


def _join_ends(stated: int | list[int] | None, end: int | None) -> int | list[int] | None:
    """The ids that end a text: those stated, and the one that training put behind documents."""
    if end is None or not isinstance(stated, list):
        return stated if end is None else end
    return stated if end in stated else [end, *stated]


def _save_generation(folder: Path, source: str, end: int | None) -> None:
    """The source's `generation_config.json`, where it has one: how its authors sample from it.

    A file that is no JSON object is left out: a trained model is not lost for it.
    """
    name = "generation_config.json"
    file = find_file(source, name)
    if file is None:
        return
    with suppress(ValueError):
        held = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(held, dict):
            held["eos_token_id"] = _join_ends(held.get("eos_token_id"), end)
            (folder / name).write_text(json.dumps(held, indent=2), encoding="utf-8")


def _split_files(model: nn.Module, family: str) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each file of the weights of one device, of a few gigabytes as Hugging Face splits them."""
    tensors = file_tensors(model, family)
    for file, names in split_torch_state_dict_into_shards(tensors).filename_to_tensors.items():
        yield file, {name: tensors[name] for name in names}


def _save_in_turn(folder: Path, files: Iterable[tuple[str, dict[str, Tensor]]]) -> None:
    places: dict[str, str] = {}
    size = 0
    for file, tensors in files:
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
        del tensors
    if set(places.values()) != {SINGLE}:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def _held(model: nn.Module) -> dict[str, Tensor]:
    """The policy's parameters and stored buffers, by Hugging Face's names."""
    named = {n: p for n, p in model.named_parameters() if not n.startswith(VALUE_MODEL)}
    if parts(model).head is not getattr(model, SCORE.partition(".")[0], None):
        named.pop(SCORE, None)  # a value's, which goes with it
    return {**named, **stored_buffers(model)}


def file_tensors(model: nn.Module, family: str) -> dict[str, torch.Tensor]:
    """Parameters and stored buffers on the host, named as in the family's published files."""
    return {
        part.name: tensor[part.place]
        for name, tensor in on_host(_held(model)).items()
        for part in file_parts(name, tuple(tensor.shape), family)
    }


def _save_adapter(folder: Path, built: Built, adapter: str = POLICY) -> None:
    model, scored = cast(Any, built.model), built.recipe.scores or adapter == VALUE
    for name, config in model.peft_config.items():
        config.base_model_name_or_path = built.recipe.model.source or None
        if built.recipe.scores or name == VALUE:
            config.task_type, config.modules_to_save = "SEQ_CLS", [SCORE.partition(".")[0]]
    state = None
    if built.recipe.parallel.world > 1:
        ((_, state),) = gather_files(built, keep=True)
    with warnings.catch_warnings():  # peft calls what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        model.save_pretrained(
            str(folder), state_dict=state, save_embedding_layers=False, selected_adapters=[adapter]
        )
    if adapter != POLICY:  # peft writes it into a folder of its name
        for file in (folder / adapter).iterdir():
            file.replace(folder / file.name)
        (folder / adapter).rmdir()
    if state is not None and built.recipe.parallel.pp > 1:  # peft keeps its own modules' alone
        named = {stored_name(name): tensor for name, tensor in state.items()}
        save_file(named, folder / ADAPTER, metadata={"format": "pt"})
    if scored:
        _add_score(folder / ADAPTER, built, state)


def _add_score(file: Path, built: Built, state: Mapping[str, Tensor] | None) -> None:
    """The score head is trained whole, beside the adapter, and stands in its file as peft has it.

    state: of many ranks, what they have gathered.
    """
    name = PREFIX + SCORE
    held = dict(built.model.named_parameters()) if state is None else state
    save_file(
        {**load_file(file), name: held[name].detach().to("cpu", copy=True)}, file,
        metadata={"format": "pt"},
    )  # fmt: skip
