"""What peft makes of a model beside its adapters: trained copies of whole modules.

Source: peft 0.21 (utils/other.py: _set_trainable, ModulesToSaveWrapper; tuners/tuners_utils.py:
cast_adapter_dtype, which casts adapters and no copies), trl 1.16 (trainer/sft_trainer.py: of a
quantised base all that is trained is bf16), LLaMA-Factory 0.9.5 (model/adapter.py:
cast_trainable_params_to_fp32). The module itself stays, frozen, and is read only where the adapter
is switched off. A tied head or embedding that is copied is tied no more.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from memfit.base_formats import find_base_format
from memfit.core.errors import InvalidRequest, MemoryUnknown
from memfit.families.shared.forward import COPY, ORIGINAL
from memfit.plan.frameworks import Job, Knob
from memfit.plan.simulate.blocks import WRAPPER
from memfit.records.model import Model, Weight
from memfit.records.recipe import Recipe

HEAD = "lm_head"
WIDE = "fp32"
APART = {
    "modules_to_save": Knob(
        default="", means="modules copied and trained whole beside the adapters, comma-separated"
    ),
}
COPIES = {
    "copies_dtype": Knob(
        default="base", means="dtype of `modules_to_save`: peft copies them as they are stored",
        values=("base", WIDE),
    ),
}  # fmt: skip


def saved_modules(recipe: Recipe) -> tuple[str, ...]:
    """The ends of modules' names that a recipe asks to be copied."""
    names = str(recipe.options.get("modules_to_save", "")).split(",")
    return tuple(name.strip() for name in names if name.strip())


def copies_wide(recipe: Recipe) -> bool:
    """Whether copies are stored in fp32 whatever their originals are."""
    return recipe.options.get("copies_dtype") == WIDE


def refuse_apart(job: Job) -> None:
    """Raise MemoryUnknown for weights of GPTQ and InvalidRequest for copies that cannot be.

    Copies whose bytes are not described raise MemoryUnknown, too.
    """
    recipe = job.recipe
    if unknown := find_base_format(recipe.base_format).unknown:
        raise MemoryUnknown(unknown)
    names = saved_modules(recipe)
    if not names:
        return
    option = f"`options.modules_to_save: {','.join(names)}`"
    if recipe.method != "lora":
        raise InvalidRequest(
            f"{option} with `method: {recipe.method}`: copies stand beside adapters",
            hint="`method: lora`",
        )
    _check_names(job.model, names)
    p = recipe.parallel
    if p.dp_shard > 1 and (recipe.framework != "deepspeed" or p.zero == 3):
        raise MemoryUnknown(
            f"{option} with weights that ranks share (`parallel.dp_shard: {p.dp_shard}`) is not"
            " described"
        )
    narrow = recipe.base_format != "fp32" and not recipe.autocast
    if copies_wide(recipe) and narrow and recipe.precision != "fp32":
        raise InvalidRequest(
            f"`options.copies_dtype: {WIDE}` with `precision: {recipe.precision}`: without autocast"
            " products read one dtype alone",
            hint="`precision: bf16-mixed`, or `options.copies_dtype: base`",
        )
    if recipe.framework == "trl" and recipe.options.get("prepare_kbit"):
        raise MemoryUnknown(
            f"{option} of TRL before 0.24 (`options.prepare_kbit`) is not described"
        )


def _check_names(model: Model, names: tuple[str, ...]) -> None:
    """Raise InvalidRequest for names of no module, and MemoryUnknown for blocks' projections."""
    modules = {w.name.rpartition(".")[0]: w for w in model.weights}
    tied = model.architecture.tied_embeddings
    known = sorted({m.rpartition(".")[2] for m, w in modules.items() if w.layer < 0} | {HEAD})
    for name in names:
        found = [w for module, w in modules.items() if module.endswith(name)]
        if not found and not (tied and HEAD.endswith(name)):
            raise InvalidRequest(
                f"`options.modules_to_save: {name}` is no module of `{model.name}`",
                hint=f"outside its blocks: {', '.join(known)}",
            )
        if any(w.layer >= 0 and len(w.shape) > 1 for w in found):
            raise MemoryUnknown(
                f"a trained copy of `{name}`, products of the blocks"
                " (`options.modules_to_save`), is not described"
            )


def copied(model: Model, recipe: Recipe, dtype: str) -> Model:
    """The model with what `modules_to_save` adds; model: as peft's adapters leave it, frozen.

    dtype: of the copies; "" is as each original is stored.
    """
    names = saved_modules(recipe)
    if not names:
        return model
    return replace(model, weights=tuple(_rows(model, names, dtype)))


def _rows(model: Model, names: tuple[str, ...], dtype: str) -> Iterator[Weight]:
    """Each module's own rows, frozen, and its copy's behind them."""
    for w in model.weights:
        module, _, leaf = w.name.rpartition(".")
        if w.trainable or not module.endswith(names):
            yield w
            continue
        yield replace(w, name=f"{module}{ORIGINAL}{leaf}")
        yield _copy(w, module, leaf, dtype)
    tied = model.architecture.tied_embeddings
    if tied and HEAD.endswith(names):
        shared = next(w for w in model.weights if w.part == "embedding")
        yield replace(_copy(shared, WRAPPER + HEAD, "weight", dtype), part="head")


def _copy(w: Weight, module: str, leaf: str, dtype: str) -> Weight:
    name = f"{module}{COPY}{leaf}"
    return replace(w, name=name, dtype=dtype or w.dtype, trainable=True)
