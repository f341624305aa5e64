"""Packages that exported files ask for beyond the tool itself, and how to install them."""

from __future__ import annotations

from memfit.base_formats import find_base_format
from memfit.records import Record
from memfit.records.recipe import ADAPTED, Recipe

INSTALL = {
    "flash-attn": "pip install flash-attn --no-build-isolation",
    "bitsandbytes": "pip install bitsandbytes",
    "torchao": "pip install torchao",
    "peft": "pip install peft",
    "deepspeed": "pip install deepspeed",
    "liger-kernel": "pip install liger-kernel",
    "cut-cross-entropy": "pip install cut-cross-entropy",
    "accelerate": "pip install accelerate",
    "transformer-engine": "pip install --no-build-isolation 'transformer-engine[pytorch]'",
}


class Need(Record, frozen=True, kw_only=True):
    """A package, what asks for it, and the command that installs it."""

    package: str
    why: str
    install: str

    @property
    def words(self) -> str:
        """In one line."""
        return f"{self.package} ({self.why}): {self.install}"


def need(package: str, why: str) -> Need:
    """One of `INSTALL`."""
    return Need(package=package, why=why, install=INSTALL[package])


def find_needs(
    recipe: Recipe, *, attention: str = "", optim: str = "", has: tuple[str, ...] = ()
) -> tuple[Need, ...]:
    """What a file of transformers' Trainer, or of one built on it, asks for.

    attention, optim: the values that the file has; has: packages that come with the tool.
    """
    found: dict[str, str] = {}
    if recipe.method in ADAPTED:
        found["peft"] = f"method: {recipe.method}"
    library = find_base_format(recipe.base_format).library
    if library in INSTALL and recipe.method in ADAPTED:
        found[library] = f"base_format: {recipe.base_format}"
    if optim in ("adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"):
        found.setdefault("bitsandbytes", optim)
    if optim in ("adamw_torch_8bit", "adamw_torch_4bit"):
        found["torchao"] = optim
    if attention == "flash_attention_2":
        found["flash-attn"] = "rows are packed, and their documents do not see each other"
    if recipe.framework == "deepspeed":
        found["deepspeed"] = "ZeRO"
    if recipe.options.get("liger") or recipe.loss == "chunked":
        found["liger-kernel"] = "its kernels, or its loss"
    if recipe.loss == "fused":
        found["cut-cross-entropy"] = "loss: fused"
    return tuple(need(name, why) for name, why in found.items() if name not in has)
