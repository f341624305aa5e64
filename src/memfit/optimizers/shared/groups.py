"""Groups of parameters that one optimizer updates with settings of their own.

Three things set weights apart: whether they decay (`optimizer.decays`), whether they learn at
`optimizer.lora_plus` times the rate (LoRA+, Hayou et al. 2402.12354), and in which layer they are
(`optimizer.layer_decay`). Planner, tracer and trainer
take the groups from here; torch updates them one after the other. Those of layers are made of
optimizers alone whose update holds nothing beside a group, so that no byte depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.records.model import Model, TensorSpec, is_decayed, is_faster
from memfit.records.objectives import check_lora_plus
from memfit.records.recipe import Optimizer, Recipe

if TYPE_CHECKING:
    import torch

RATE = "rate_factor"  # in a group of torch's optimizer: its learning rate over the schedule's
Place = tuple[bool, bool]  # of a parameter: whether it is spared of decay, and learns faster


def find_place(settings: Optimizer, *, decays: bool, faster: bool) -> Place:
    """The group of a parameter; groups are updated in this order."""
    spared = bool(settings.weight_decay) and settings.decays == "matrices" and not decays
    return spared, bool(settings.lora_plus) and faster


def split_specs(
    specs: Sequence[TensorSpec], settings: Optimizer
) -> list[tuple[list[TensorSpec], Optimizer]]:
    """The parameters of each group in their order, with the settings that the group has."""
    places = [find_place(settings, decays=s.decays, faster=s.faster) for s in specs]
    found = []
    for place in sorted(set(places)):
        own = [spec for spec, other in zip(specs, places, strict=True) if other == place]
        found.append((own, replace(settings, weight_decay=0.0) if place[0] else settings))
    return found


def in_order(specs: Iterable[TensorSpec], settings: Optimizer) -> list[TensorSpec]:
    """The same parameters, group after group."""
    return [spec for own, _ in split_specs(list(specs), settings) for spec in own]


def find_depths(model: Model) -> dict[str, int]:
    """How many layers below the head each weight is, as BEiT and timm count them for a rate that
    falls with the layer: the final norm and the head 0, the last block 1, the embedding the most.
    """
    layers = model.architecture.layers
    depths = {"block": layers, "embedding": layers + 1}
    return {w.name: max(0, depths.get(w.part, 0) - max(w.layer, 0)) for w in model.weights}


def group_parameters(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.nn.Parameter, str],
    settings: Optimizer,
    depths: Mapping[str, int] | None = None,
) -> None:
    """Divide the groups of a new optimizer; each keeps all other settings of the one it was in.

    depths: of each name, see `find_depths`; used where the rate falls with the layer.
    """
    divided = []
    for group in optimizer.param_groups:
        places = {
            p: (
                *find_place(
                    settings, decays=is_decayed(names[p]), faster=is_faster(names[p], p.dim())
                ),
                depths[names[p]] if depths and settings.layer_decay else 0,
            )
            for p in group["params"]
        }
        for place in sorted(set(places.values())):
            own = {**group, "params": [p for p, other in places.items() if other == place]}
            spared, faster, depth = place
            if spared:
                own["weight_decay"] = 0.0
            own[RATE] = settings.lora_plus if faster else 1.0
            own[RATE] *= settings.layer_decay**depth if depth else 1.0
            divided.append(own)
    optimizer.param_groups = divided


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE, 1.0)


def check_layer_decay(rate: float, name: str, implementation: str, offload: str) -> None:
    """Raise InvalidRequest for an update that would hold other bytes group by group."""
    if not rate or (implementation == "fused" and offload != "optimizer"):
        return
    what = f"`offload: {offload}`" if offload == "optimizer" else f"`{name}`, `{implementation}`"
    raise InvalidRequest(
        f"`optimizer.layer_decay: {rate:g}` with {what}: each layer's weights are a group of their"
        " own, and memfit predicts such updates of the fused kernels alone",
        hint="use `optimizer: {name: adamw, implementation: fused}` and `offload: none`",
    )


def check_groups(recipe: Recipe) -> None:
    """Raise InvalidRequest for a rate of matrices that the recipe has not, or of no optimizer."""
    settings = recipe.optimizer
    check_lora_plus(recipe.method, settings.lora_plus)
    check_layer_decay(settings.layer_decay, settings.name, settings.implementation, recipe.offload)
    if settings.lora_plus and recipe.offload == "optimizer":
        raise InvalidRequest(
            f"`optimizer.lora_plus: {settings.lora_plus:g}` with `offload: optimizer`: torchao's"
            " optimizer on the host has one rate for all weights",
            hint="use `offload: none`; adapters' states are small",
        )
