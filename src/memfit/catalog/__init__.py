"""Devices, their prices and models as rows with units, source and date.

`devices.toml`, `prices.toml` and `models.toml` are the source of truth, read and edited by people;
a quantity is text with its unit. To add a device or a model is to add a row. Users add devices and
prices in files of their own (`memfit.catalog.own`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from memfit.catalog import device_rows
from memfit.catalog.model_details import architecture_fields
from memfit.catalog.toml_rows import Rows
from memfit.families import find_described, find_family
from memfit.records import Record, from_data
from memfit.records.hardware import Device
from memfit.records.model import Architecture, ModelReference

_FOLDER = Path(__file__).parent
_MODELS = Rows(_FOLDER / "models.toml", "model", ("name", "hub", "aliases"))


class CatalogModel(Record, frozen=True, kw_only=True):
    """One published model: its sizes, its exact parameter count and what its publisher said."""

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
        return from_data(fields, Architecture, where=f"row `{self.id}` of models.toml")

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

    Raises UnknownName with the nearest names; InvalidRequest when the name means several rows, or
    for a file of the user's that cannot be read.
    """
    return device_rows.find(name)


def devices() -> tuple[Device, ...]:
    """Every device, in the file's order, and the user's own after them."""
    return device_rows.every()


def find_model(name: str) -> CatalogModel:
    """A model by id, name or hub id (case does not matter), or by the start of one id only.

    Raises UnknownName with the nearest names; InvalidRequest when the name means several rows.
    """
    return _model(_MODELS.find(name))


@cache
def models() -> tuple[CatalogModel, ...]:
    """Every model, in the file's order."""
    return tuple(_model(key) for key in _MODELS.ids)


@cache
def _model(key: str) -> CatalogModel:
    return from_data({"id": key, **_MODELS.row(key)}, CatalogModel, where=f"[{key}] of models.toml")
