"""Which model a request names: a row of the catalogue, a folder, a config.json, or a hub id."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from memfit import catalog
from memfit.core.errors import InvalidRequest, UnknownName, did_you_mean, shorten_name
from memfit.core.system.reading import is_folder, read_json_table
from memfit.core.units import MIB
from memfit.families import text_part
from memfit.objectives import find_objective
from memfit.records.model import ModelReference

T = TypeVar("T")
MOST_CONFIG = 4 * MIB  # bytes of a config.json; the largest published has some hundred kilobytes
HUB_SECONDS = 3.0  # for a config.json of some kilobytes; a plan is not kept waiting longer


def find_reference(model: str | dict[str, Any]) -> ModelReference:
    """A catalogue name, a folder with config.json, a config.json, its content, or a hub id.

    A hub id may also be its page's address.
    """
    if isinstance(model, dict):
        return ModelReference(
            name=model.get("name", "model"), source="", config=_config(model, "request")
        )
    model = catalog.strip_address(model)
    path = expand(model)
    if is_folder(path) or path.name == "config.json":
        return _read_folder(path.parent if path.name == "config.json" else path)
    try:
        return _find_row(model)
    except UnknownName:
        if model.startswith((".", "/", "~")):
            raise InvalidRequest(
                f"there is no folder `{shorten_name(model)}`",
                hint="a model's folder holds config.json; `memfit models` lists names",
            ) from None
        if model.count("/") != 1:
            raise
    return _read_hub(model)


def with_head(reference: ModelReference, objective: str) -> ModelReference:
    """The model that an objective trains: with a score of a row in place of its own head, if so."""
    if not find_objective(objective).scores:
        return reference
    return msgspec.structs.replace(reference, head="score")


def expand(model: str) -> Path:
    """The name as a path; `~name` of nobody's home is no path."""
    try:
        return Path(model).expanduser()
    except RuntimeError:
        return Path(model)


@lru_cache(maxsize=1024)
def _find_row(name: str) -> ModelReference:
    return catalog.find_model_reference(name)


def _config(config: dict[str, Any], source: str) -> dict[str, Any]:
    if "model_type" not in config:
        hint = "a config.json of Hugging Face's names its `model_type`, for example `llama`"
        raise InvalidRequest(f"no `model_type` in {source}", hint=hint)
    return {k: v for k, v in text_part(config).items() if k != "name"}


def _read_folder(folder: Path) -> ModelReference:
    file = folder / "config.json"
    config = read_json_table(
        file, hint="a model folder holds config.json beside its safetensors", most=MOST_CONFIG
    )
    return ModelReference(
        name=folder.resolve().name, source=str(folder.resolve()), config=_config(config, str(file))
    )


def find_published(reference: ModelReference) -> ModelReference:
    """The reference with the config.json that its weights came with."""
    if is_folder(Path(reference.source)):
        return reference  # it was read from there
    config = _read_hub(reference.source).config
    return msgspec.structs.replace(reference, config=config)


def _near(name: str) -> str:
    """Rows of the catalogue that may have a published model's shape, in words: one whose name it
    begins with (`-instruct`, `-base`), or of a similar name and the same size; "" for none."""
    known = {alias.lower(): row.id for row in catalog.models() for alias in (row.id, *row.aliases)}
    begun = [alias for alias in known if name.startswith(f"{alias}-")]
    if begun:
        return f"`{known[max(begun, key=len)]}`"
    sizes = set(re.findall(r"\d+(?:\.\d+)?[bm]\b", name))
    alike = [row.id for row in catalog.models() if sizes <= set(row.id.split("-"))]
    return did_you_mean(name, alike)


def _within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns; TimeoutError where it takes longer, and is left to itself."""
    import logging
    import threading

    talker = logging.getLogger("huggingface_hub")  # which tells of each attempt
    level = talker.level
    talker.setLevel(logging.ERROR)
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not thread.is_alive():
        talker.setLevel(level)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]


@lru_cache(maxsize=256)  # each change to a file asks again
def _read_hub(name: str) -> ModelReference:
    """config.json of a hub id, from the local cache or the hub."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        known = [row.id for row in catalog.models()]
        see = "`memfit models` lists them; reading a hub id needs `pip install huggingface_hub`"
        raise UnknownName("model", name, known, see=see) from None
    try:
        file = _within(HUB_SECONDS, lambda: hf_hub_download(name, "config.json"))
    except Exception as error:  # the library's error types differ between its versions
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        near = _near(name.rpartition("/")[2].lower())
        raise InvalidRequest(
            f"`{name}` is not in the catalogue, and its config.json could not be read: {first}",
            hint=(f"of the same shape may be {near}; else " if near else "")
            + "check the name, or pass a folder that holds config.json; see `memfit models`",
        ) from None
    config = read_json_table(Path(file), most=MOST_CONFIG)
    return ModelReference(name=name, source=name, config=_config(config, file))
