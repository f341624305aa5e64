"""LoRA (Hu et al. 2106.09685) through peft: two small matrices beside each target projection."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast, final

from msgspec.structs import replace

from memfit.adapters import Adapter, adapters
from memfit.adapters._apply import apply_rows, store_rows
from memfit.errors import InvalidRequest, did_you_mean
from memfit.families import read_model
from memfit.libraries import quiet_import
from memfit.model import Model, Weight
from memfit.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

PREFIX = "base_model.model."  # peft wraps the model twice
ROUTERS = (".mlp.gate.weight", ".mlp.router.weight")  # modules of their own kind, not Linear
JOINED = ("gate_proj", "up_proj", "down_proj")  # experts have them, joined with all others
STORED_TRANSPOSED = ("gpt2",)  # families whose blocks hold Conv1D: weights are (in, out)


@final
class Lora(Adapter):
    """The base is frozen; A (rank, in) and B (out, rank) of each target are trained."""

    def adapt(self, model: Model, recipe: Recipe) -> Model:
        """See `Adapter.adapt`; rows carry peft's names, in the order of its modules."""
        targets = recipe.lora.targets
        _check_targets(model, targets)
        rows: list[Weight] = []
        modules = [row.name.rpartition(".")[0] for row in model.weights]
        for index, (row, module) in enumerate(zip(model.weights, modules, strict=True)):
            matched = _matches(module, targets)
            leaf = row.name.rpartition(".")[2]
            name = f"{module}.base_layer.{leaf}" if matched else row.name
            rows.append(replace(row, name=PREFIX + name, trainable=False))
            is_last_of_module = module not in modules[index + 1 : index + 2]
            if matched and is_last_of_module:
                weight = row if leaf == "weight" else model.weights[index - 1]
                rows += _pair(weight, module, model, recipe.lora.rank)
        stored = store_rows(rows, recipe.trainable_dtype, recipe.frozen_dtype)
        return replace(model, weights=stored)

    def apply(self, module: nn.Module, recipe: Recipe) -> nn.Module:
        """See `Adapter.apply`."""
        with quiet_import():
            from peft import LoraConfig, get_peft_model

        lora, rows = recipe.lora, self.adapt(read_model(recipe.model), recipe)
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=list(lora.targets),
            fan_in_fan_out=rows.architecture.family in STORED_TRANSPOSED,
            task_type="CAUSAL_LM",
        )
        # peft would store adapters of a 16-bit base in fp32 whatever the recipe says.
        with warnings.catch_warnings():  # peft calls what transformers has renamed
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = get_peft_model(
                cast(Any, module), config, autocast_adapter_dtype=False, low_cpu_mem_usage=True
            )
        for layer in wrapped.modules():
            if hasattr(layer, "cast_input_dtype_enabled"):
                layer.cast_input_dtype_enabled = False  # autocast casts; a second copy is waste
        return apply_rows(wrapped, rows)

    def base_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """See `Adapter.base_parameters`."""
        return {
            name.removeprefix(PREFIX).replace(".base_layer.", "."): parameter
            for name, parameter in module.named_parameters()
            if ".lora_" not in name
        }

    def reset(self, module: nn.Module) -> None:
        """See `Adapter.reset`: a random A and a zero B."""
        with quiet_import():
            from peft.tuners.lora import LoraLayer

        for layer in module.modules():
            if isinstance(layer, LoraLayer):
                for name in layer.active_adapters:
                    layer.reset_lora_parameters(name, init_lora_weights=True)


def _matches(module: str, targets: tuple[str, ...]) -> bool:
    """As peft does: the whole name, or its last parts."""
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _pair(weight: Weight, module: str, model: Model, rank: int) -> list[Weight]:
    """The rows of A (rank, in) and B (out, rank)."""
    rows, columns = weight.shape
    if model.architecture.family in STORED_TRANSPOSED and weight.part == "block":
        rows, columns = columns, rows
    name = f"{PREFIX}{module}.lora_{{}}.default.weight"
    return [
        replace(weight, name=name.format("A"), shape=(rank, columns), trainable=True),
        replace(weight, name=name.format("B"), shape=(rows, rank), trainable=True),
    ]


def _check_targets(model: Model, targets: tuple[str, ...]) -> None:
    """Each target must name at least one projection, and nothing else."""
    matrices = [
        w
        for w in model.weights
        if len(w.shape) == 2 and w.part != "embedding" and not w.name.endswith(ROUTERS)
    ]
    projections = [w.name.rpartition(".")[0] for w in matrices]
    last_parts = sorted({p.rpartition(".")[2] for p in projections})
    known = f"projections of `{model.name}`: {', '.join(last_parts)}"
    if not targets:
        raise InvalidRequest("`lora.targets` is empty: nothing would be trained", hint=known)
    modules = {w.name.rpartition(".")[0] for w in model.weights}
    joined = [t for t in targets if t.rpartition(".")[2] in JOINED]
    if joined and model.architecture.experts.count:
        raise InvalidRequest(
            f"`lora.targets`: `{joined[0]}` of `{model.name}`, whose experts peft would adapt with"
            " it, all of a layer as one",
            hint="adapt the projections of attention: q_proj, k_proj, v_proj, o_proj",
        )
    for target in targets:
        hits = {m for m in modules if _matches(m, (target,))}
        if not hits or hits - set(projections):
            near = did_you_mean(target, last_parts)
            raise InvalidRequest(
                f"`lora.targets`: `{target}` matches no projection of `{model.name}`",
                hint=f"did you mean {near}? {known}" if near else known,
            )


adapters.register("lora")(Lora())
