"""What methods that train small matrices beside a frozen base share: peft's names and layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import sqrt
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from memfit.adapters.shared.apply import apply_rows, store_rows
from memfit.adapters.shared.projections import check_targets, matches
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import quiet_import
from memfit.parallelism.whole import whole
from memfit.records.model import REWARD_SCORE, SCORE, Model, Weight
from memfit.records.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

PREFIX = "base_model.model."  # peft wraps the model twice
MAGNITUDE = ".lora_magnitude_vector"
POLICY, VALUE, REWARD = "default", "value", "reward"  # peft's names of adapters
DOWN = tuple(f".lora_A.{name}.weight" for name in (POLICY, VALUE))
STORED_TRANSPOSED = ("gpt2",)  # families whose blocks hold Conv1D: weights are (in, out)


def adapt(model: Model, recipe: Recipe, *, magnitudes: bool = False) -> Model:
    """See `Adapter.adapt`; rows carry peft's names, in the order of its modules.

    magnitudes: each target has a length a row of its weight, too.
    """
    targets = recipe.lora.targets
    check_targets(model, targets)
    reward = recipe.reward.adapter
    check_reward_targets(model, recipe)
    rows: list[Weight] = []
    modules = [row.name.rpartition(".")[0] for row in model.weights]
    for index, (row, module) in enumerate(zip(model.weights, modules, strict=True)):
        if row.name == SCORE:  # trained whole, as peft's SEQ_CLS has it
            rows.append(replace(row, name=PREFIX + row.name, trainable=True))
            continue
        trained, judged = matches(module, targets), matches(module, reward.targets)
        matched = trained or judged
        leaf = row.name.rpartition(".")[2]
        name = f"{module}.base_layer.{leaf}" if matched else row.name
        rows.append(replace(row, name=PREFIX + name, trainable=False))
        is_last_of_module = module not in modules[index + 1 : index + 2]
        if matched and is_last_of_module:
            weight = row if leaf == "weight" else model.weights[index - 1]
            names = (POLICY, VALUE) if recipe.values else (POLICY,)
            ranks = dict.fromkeys(names, recipe.lora.rank) if trained else {}
            ranks |= {REWARD: reward.rank} if judged else {}
            rows += _added(weight, module, model, ranks, magnitudes)
    width = model.architecture.head_input
    if recipe.values:
        rows.append(Weight(name=PREFIX + SCORE, shape=(1, width), part="head"))
    if recipe.scored_by_adapter:
        name = PREFIX + REWARD_SCORE
        rows.append(Weight(name=name, shape=(1, width), part="head", trainable=False))
    stored = store_rows(rows, recipe.trainable_dtype, recipe.frozen_dtype)
    return replace(model, weights=stored)


def apply(module: nn.Module, recipe: Recipe, rows: Model, *, magnitudes: bool = False) -> nn.Module:
    """See `Adapter.apply`; rows: what `adapt` made."""
    with quiet_import():
        from peft import LoraConfig, get_peft_model

    lora = recipe.lora
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.scaling == "rank-stabilised",
        use_dora=magnitudes,
        target_modules=list(lora.targets),
        fan_in_fan_out=rows.architecture.family in STORED_TRANSPOSED,
        # of a score head none: peft's SEQ_CLS would hold the head twice
        task_type=None if recipe.scores else "CAUSAL_LM",
    )
    if recipe.values:
        add_score_head(module, rows.architecture.head_input)
    if recipe.scored_by_adapter:
        add_score_head(module, rows.architecture.head_input, REWARD_SCORE)
    # peft would store adapters of a 16-bit base in fp32 whatever the recipe says.
    with warnings.catch_warnings():  # peft calls what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = get_peft_model(
            cast(Any, module), config, autocast_adapter_dtype=False, low_cpu_mem_usage=True
        )
        if recipe.values:
            own = LoraConfig(**{**config.to_dict(), "task_type": None})
            wrapped.add_adapter(VALUE, own, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
        if recipe.scored_by_adapter:
            judge = recipe.reward.adapter
            own = LoraConfig(
                r=judge.rank, lora_alpha=judge.alpha, target_modules=list(judge.targets),
                use_rslora=judge.scaling == "rank-stabilised", task_type=None,
                fan_in_fan_out=config.fan_in_fan_out, inference_mode=True,
            )  # fmt: skip
            wrapped.add_adapter(REWARD, own, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
    for layer in wrapped.modules():
        if hasattr(layer, "cast_input_dtype_enabled"):
            layer.cast_input_dtype_enabled = False  # autocast casts; a second copy is waste
    return apply_rows(wrapped, rows)


def check_reward_targets(model: Model, recipe: Recipe) -> None:
    """Raise InvalidRequest where the reward's adapter has a target that the model has not."""
    if recipe.scored_by_adapter:
        targets = recipe.reward.adapter.targets
        check_targets(model, targets, "reward.adapter.targets")
        heads = [w.name.removesuffix(".weight") for w in model.weights if w.part == "head"]
        if wrong := [head for head in heads if matches(head, targets)]:
            raise InvalidRequest(
                f"`reward.adapter.targets`: `{wrong[0]}` is the language model's head, in whose"
                " place a reward model has a score",
                hint="name projections of blocks",
            )


def add_score_head(module: nn.Module, width: int, name: str = SCORE) -> None:
    """A head of one number beside the language model's own, as classes of sequence classification
    have it."""
    from torch import nn

    head = nn.Linear(width, 1, bias=False, device="meta")
    module.add_module(name.partition(".")[0], head)


def base_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """See `Adapter.base_parameters`."""
    return {
        base_name(name): parameter
        for name, parameter in module.named_parameters()
        if ".lora_" not in name and name != PREFIX + REWARD_SCORE
    }


def layers(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """peft's layers, each with the name of each of its adapters."""
    with quiet_import():
        from peft.tuners.lora import LoraLayer

    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            for name in layer.lora_A:
                yield layer, name


def reset(
    module: nn.Module, rows: Model, also: Callable[[Any, str], None] = lambda *_: None
) -> None:
    """A random A and a zero B of each layer; then whatever else starts with them.

    rows: what `adapt` made. Of layers that other stages hold an A is drawn and forgotten, so that
    those after them are drawn as in one process.
    """
    import torch

    held = {row_name: found for row_name, *found in _held(module)}
    drawn_rows = [row for end in DOWN for row in rows.weights if row.name.endswith(end)]
    for row in drawn_rows:
        if row.name not in held:
            like = next(module.parameters())
            drawn = torch.empty(row.shape, dtype=getattr(torch, row.dtype), device=like.device)
            torch.nn.init.kaiming_uniform_(drawn, a=sqrt(5))  # as peft's reset
            del drawn
            continue
        layer, name = held[row.name]
        with whole(layer.lora_A), whole(layer.lora_B):
            layer.reset_lora_parameters(name, init_lora_weights=True)
        also(layer, name)


def _held(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """peft's layers by the names of their A."""
    names = {part: prefix for prefix, part in module.named_modules()}
    for layer, name in layers(module):
        yield f"{names[layer]}.lora_A.{name}.weight", layer, name


@contextmanager
def switched_to(module: nn.Module, adapter: str) -> Iterator[None]:
    """Another adapter of the base runs meanwhile, in place of the policy's.

    peft's own `set_adapter` freezes those that do not run, whose gradients wait for the update.
    """
    found = list({id(layer): layer for layer, _ in layers(module)}.values())
    before = [layer._active_adapter for layer in found]
    try:
        for layer in found:
            layer._active_adapter = [adapter]
        yield
    finally:
        for layer, name in zip(found, before, strict=True):
            layer._active_adapter = name


def base_name(name: str) -> str:
    """What the base model calls a parameter of peft's module."""
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def stored_name(name: str) -> str:
    """A parameter's name in peft's file, which leaves the adapter's own name out."""
    if name.endswith(f"{MAGNITUDE}.default.weight"):
        return name.removesuffix(".default.weight")
    return name.replace(".default.", ".")


def _added(
    weight: Weight, module: str, model: Model, ranks: Mapping[str, int], magnitudes: bool
) -> Iterator[Weight]:
    """The rows of A (rank, in) and B (out, rank), and of the magnitudes (out), of each adapter.

    ranks: of each adapter's name.
    """
    rows, columns = weight.shape
    if model.architecture.family in STORED_TRANSPOSED and weight.part == "block":
        rows, columns = columns, rows
    owners = (".lora_A", ".lora_B", *([MAGNITUDE] if magnitudes else []))
    for owner in owners:
        for adapter, rank in ranks.items():
            shapes = {".lora_A": (rank, columns), ".lora_B": (rows, rank), MAGNITUDE: (rows,)}
            name = f"{PREFIX}{module}{owner}.{adapter}.weight"
            trains = adapter != REWARD
            yield replace(weight, name=name, shape=shapes[owner], trainable=trains)


@contextmanager
def switched_off(module: nn.Module) -> Iterator[None]:
    """See `Adapter.switched_off`.

    peft's own `disable_adapter` freezes the adapters' weights, too, and thaws them after it.
    What runs here makes no gradient.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found = [
        part for part in module.modules()
        if isinstance(part, BaseTunerLayer | AuxiliaryTrainingWrapper)
    ]  # fmt: skip
    before = [part._disable_adapters for part in found]
    try:
        for part in found:
            part._disable_adapters = True
        yield
    finally:
        for part, off in zip(found, before, strict=True):
            part._disable_adapters = off
