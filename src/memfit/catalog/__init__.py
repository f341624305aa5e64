"""Devices, their prices and models as rows with units, source and date.

`devices.toml`, `prices.toml` and `models.toml` are the source of truth, read and edited by people;
a quantity is text with its unit. To add a device or a model is to add a row. Users add devices and
prices in files of their own (`memfit.catalog.own`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec

from memfit.catalog import device_rows, published_names
from memfit.catalog.model_details import architecture_fields
from memfit.catalog.toml_rows import Rows
from memfit.core.errors import InvalidRequest, UnknownName
from memfit.families import find_described, find_family
from memfit.records import Record, from_data
from memfit.records.hardware import Device
from memfit.records.model import Architecture, ModelReference

_FOLDER = Path(__file__).parent
_MODELS = Rows(_FOLDER / "models.toml", "model", ("name", "hub", "aliases"))


class CatalogModel(Record, frozen=True, kw_only=True):
    """One published model: its sizes, its exact parameter count and its publisher's statements."""

    id: str
    name: str  # as the publisher writes it
    hub: str  # hub id of the weights
    aliases: tuple[str, ...]
    label: str  # the publisher's family: Llama 3.1, Qwen3 MoE, …
    model_type: str  # Hugging Face's; the name of memfit's family file where there is one
    parameters: int  # exact; tied weights once
    active_parameters: int | None = None  # for one token, of a mixture of experts
    transformers_parameters: int  # what transformers 5.23.0 counted on the meta device
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int  # rows of the embedding, not the tokenizer's length
    max_sequence: int
    tied_embeddings: bool
    # what else the family's file needs, or facts of a family without one
    details: dict[str, int | float | bool | str | tuple[str, ...]] = msgspec.field(
        default_factory=dict
    )
    published: str  # the publisher's figure, such as `8B`
    published_active: str = ""
    published_source: str
    source: str  # of the sizes
    unverified: tuple[str, ...]
    notes: str = ""
    checked: str  # date of the row, YYYY-MM-DD

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of the key-value cache for one token of one sequence, of all layers.

        2 x layers x kv_heads x head_dim; latent attention keeps its compressed vector instead
        (DeepSeek-V2, 2405.04434 section 2.1.4). A sliding window would keep fewer.
        """
        if "kv_lora_rank" in self.details:
            latent = self.details["kv_lora_rank"], self.details["qk_rope_head_dim"]
            return self.layers * sum(n for n in latent if isinstance(n, int))
        return 2 * self.layers * self.kv_heads * self.head_dim

    def architecture(self) -> Architecture:
        """The model in memfit's words; UnknownName for a family without a file."""
        find_described(self.model_type, of=self.id)
        sizes = {
            name: getattr(self, name)
            for name in (
                "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab",
                "max_sequence", "tied_embeddings",
            )
        }  # fmt: skip
        fields = {"family": self.model_type, **sizes, **architecture_fields(self.details)}
        return from_data(fields, Architecture, source=f"row `{self.id}` of models.toml")

    def reference(self) -> ModelReference:
        """What a request needs of the row; UnknownName for a family without a file.

        Raises InvalidRequest for a family that is only counted.

        The config states every size; rotary base and norm epsilon are the defaults of Hugging
        Face's class, so pretrained weights are loaded with the config.json beside them.
        """
        family = find_family(self.model_type, of=self.id)
        config = family.config(self.architecture())
        return ModelReference(name=self.id, source=self.hub, config=config)


def find_device(name: str) -> Device:
    """A device by id, driver name or alias (case does not matter); the user's own rows as well.

    Of a short name such as `A100` the most usual row is taken (`describe_device` says so).

    Raises UnknownName with the nearest names; InvalidRequest when the name means several rows, or
    for a file of the user's that cannot be read.
    """
    return device_rows.find(name)


def describe_device(name: str) -> str:
    """Which row is taken for a name that several devices have; "" for a name of one row."""
    return device_rows.describe(name)


def devices() -> tuple[Device, ...]:
    """Every device, in the file's order, and the user's own after them."""
    return device_rows.every()


def find_model(name: str) -> CatalogModel:
    """A model by id, name or hub id (case does not matter), or by the start of one id only.

    Also a published model that has the sizes of a row, a mirror's, and a row in words: `llama 8b`.
    Raises UnknownName with the nearest names; InvalidRequest when the name means several rows, or a
    model whose weights are quantised for inference.
    """
    return _model(_name(name).row)


def find_model_reference(name: str) -> ModelReference:
    """What a request needs of a model by name: the row's sizes, and where its own weights are.

    Raises as `find_model` and `CatalogModel.reference` do.
    """
    named = _name(name)
    row = _model(named.row)
    made = row.reference()
    if named.max_sequence:
        own = msgspec.structs.replace(row.architecture(), max_sequence=named.max_sequence)
        made = msgspec.structs.replace(made, config=find_family(own.family, of=row.id).config(own))
    if not named.hub:
        return made
    shown = name.strip() if "/" in name else named.hub
    return msgspec.structs.replace(made, name=shown, source=named.hub)


def describe_model(name: str) -> str:
    """Which row is taken for a name that is no row's own, in words; "" for a row's own name."""
    name = strip_address(name)
    named = _name(name)
    if not named.hub and _begins(name) == named.row:
        return ""
    if named.quantised:
        return (
            f"`{name}`: sizes of `{named.row}`, whose weights memfit quantises itself"
            " (`method: qlora`)"
        )
    if named.hub:
        return f"`{name}`: the sizes of `{named.row}` of the catalogue, which are the same"
    others = [each.row for each in _in_words(name) if each.row != named.row]
    verb = "has" if len(others) == 1 else "have"
    alike = f"; {' and '.join(others)} {verb} the same sizes" if others else ""
    earlier = published_names.find_earlier(name, _MODELS.ids)
    older = f"; earlier, with other sizes: {', '.join(earlier)}" if earlier else ""
    return f"`{name}` is taken as `{named.row}`{alike}{older}"


def strip_address(name: str) -> str:
    """The hub id of a page's address; any other name as it is."""
    return published_names.strip_address(name)


@cache
def _name(name: str) -> published_names.Named:
    """The row that a name means, and where the weights of that very name are."""
    if own := _MODELS.find_own(name):
        return published_names.Named(own, "")
    if found := published_names.find_published(name, _MODELS.names()):
        return found if found.hub else found._replace(hub=_model(found.row).hub)
    if rows := _in_words(name):
        shapes = {msgspec.structs.replace(_model(n.row).architecture(), max_sequence=0)
                  for n in rows}  # fmt: skip
        if len(shapes) == 1:
            return rows[-1]
        raise _several(name, (each.row for each in rows))
    try:
        return published_names.Named(_MODELS.find(name), "")
    except UnknownName:
        if why := published_names.find_stored(name):
            raise _refuse_stored(name, why) from None
        if family := published_names.find_unsupported(name):
            raise InvalidRequest(
                f"`{name}` is of the family `{family}`, whose blocks memfit does not describe yet",
                hint="docs/lacking.md lists such families by demand; `memfit models` lists what is"
                " planned",
            ) from None
        if published_names.reads_more_than_text(name):
            raise InvalidRequest(
                f"`{name}` reads more than text, and memfit plans text models alone",
                hint="docs/lacking.md says what is missing; `memfit models` lists what is planned",
            ) from None
        if len(rows_begun := published_names.find_begun(name, _MODELS.ids)) > 1:  # `llama3`
            raise _several(name, rows_begun) from None
        raise


def _several(name: str, rows: Iterable[str]) -> InvalidRequest:
    shown = ", ".join(f"`{row}`" for row in dict.fromkeys(rows))
    return InvalidRequest(f"`{name}` names several models", hint=f"say which: {shown}")


def _begins(name: str) -> str:
    """The row that a name is, or that alone begins or ends with it; "" for none."""
    try:
        return _MODELS.find(name)
    except (UnknownName, InvalidRequest):
        return ""


def _in_words(name: str) -> tuple[published_names.Named, ...]:
    return published_names.find_in_words(name, _MODELS.ids)


def _refuse_stored(name: str, why: str) -> InvalidRequest:
    bare = published_names.strip_stored(name)
    try:
        row = _name(bare).row if bare != name else ""
    except (UnknownName, InvalidRequest):
        row = ""
    if not row:
        hint = "name the model that it was made from"
    else:
        hint = f"name the model that it was made from, `{row}`; `method: qlora` trains over 4 bits"
    return InvalidRequest(f"`{name}` cannot be trained: {why}", hint=hint)


@cache
def models() -> tuple[CatalogModel, ...]:
    """Every model, in the file's order."""
    return tuple(_model(key) for key in _MODELS.ids)


@cache
def _model(key: str) -> CatalogModel:
    return from_data(
        {"id": key, **_MODELS.row(key)}, CatalogModel, source=f"[{key}] of models.toml"
    )
