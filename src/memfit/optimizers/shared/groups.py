"""Groups of parameters that one optimizer updates with settings of their own.

Two things set weights apart: whether they decay (`optimizer.decays`), and whether they learn at
`optimizer.lora_plus` times the rate (LoRA+, Hayou et al. 2402.12354). Planner, tracer and trainer
take the groups from here; torch updates them one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.records.model import TensorSpec, is_decayed, is_faster
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


def group_parameters(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str], settings: Optimizer
) -> None:
    """Divide the groups of a new optimizer; each keeps all other settings of the one it was in."""
    divided = []
    for group in optimizer.param_groups:
        places = {
            p: find_place(
                settings, decays=is_decayed(names[p]), faster=is_faster(names[p], p.dim())
            )
            for p in group["params"]
        }
        for place in sorted(set(places.values())):
            own = {**group, "params": [p for p, other in places.items() if other == place]}
            if place[0]:
                own["weight_decay"] = 0.0
            own[RATE] = settings.lora_plus if place[1] else 1.0
            divided.append(own)
    optimizer.param_groups = divided


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the learning rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(RATE, 1.0)


def check_groups(recipe: Recipe) -> None:
    """Raise InvalidRequest for a rate of matrices that the recipe has not, or of no optimizer."""
    settings = recipe.optimizer
    check_lora_plus(recipe.method, settings.lora_plus)
    if settings.lora_plus and recipe.offload == "optimizer":
        raise InvalidRequest(
            f"`optimizer.lora_plus: {settings.lora_plus:g}` with `offload: optimizer`: torchao's"
            " optimizer on the host has one rate for all weights",
            hint="use `offload: none`; adapters' states are small",
        )
