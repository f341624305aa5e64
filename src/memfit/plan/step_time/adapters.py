"""What a frozen base and the adapters beside it change of a block's launches and bytes.

The constants of adapters are fitted on published rows that adapt every projection of a block
(Qwen, torchtune, NeMo Automodel), where the usual recipe adapts two of seven. What of them holds
is by how many projections have an adapter, and how wide these are.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from memfit.adapters.shared.peft_layers import base_name
from memfit.adapters.shared.projections import matches
from memfit.plan.step_time.arrays import change
from memfit.plan.step_time.work import Layout
from memfit.records.model import Model
from memfit.records.recipe import Recipe

PROJECTIONS = 7  # of a Llama block: the fitted rows adapt them all
# Operations of memfit's own step in one Llama block and micro-batch (bf16-mixed, lean), as
# tests/plan/step_time/test_adapter_times.py counts them: trained whole, and as a frozen base
# without an adapter, which makes no weight's gradient, casts none and adds none up.
WHOLE, FROZEN = 159, 99
SPARED = (1 - FROZEN / WHOLE) / PROJECTIONS  # of a block's launches, by one frozen matrix

BIAS = 0.5  # launches of a bias's gradient over a matrix's: added up, cast, and no product


class Matrix(NamedTuple):
    """A matrix of a model's blocks."""

    module: str
    width: int  # its rows and columns added up; 0 of experts', all of a layer in one
    launches: float  # of its gradient, over those of a matrix without a bias


@lru_cache(maxsize=64)
def list_matrices(model: Model) -> tuple[Matrix, ...]:
    """Those of the base's blocks, whether or not adapters stand beside them already."""
    own = (w for w in model.weights if w.part == "block" and not w.of_value)
    blocks = [w for w in own if ".lora_" not in w.name]
    biased = {w.name.rpartition(".")[0] for w in blocks if w.name.endswith(".bias")}
    found = []
    for w in blocks:
        if len(w.shape) < 2 or w.name.endswith("_bias"):
            continue
        module = w.name.rpartition(".")[0]
        width = sum(w.shape) if len(w.shape) == 2 else 0
        found.append(
            Matrix(base_name(w.name).rpartition(".")[0], width, 1 + BIAS * (module in biased))
        )
    return tuple(found)


def with_adapters(
    layout: Layout, recipe: Recipe, matrices: tuple[Matrix, ...], layers: int
) -> Layout:
    """The layout of a step whose base is frozen, as far as the recipe's targets are known.

    Targets that name no module of the model (Megatron's join several) leave what was fitted.
    """
    if recipe.method == "full":
        return layout
    targets = recipe.lora.targets if recipe.adapted else ()
    beside = _share_out(matrices, targets)
    if recipe.adapted and not beside.matrices:
        return layout
    return change(
        layout,
        adapters=beside.matrices / layers / PROJECTIONS,
        adapted=beside.width,
        spared=SPARED * beside.alone / layers,
    )


class Beside(NamedTuple):
    """The matrices that have an adapter, and what the others are."""

    matrices: int
    width: float  # of all matrices' width
    alone: float  # launches of the others' gradients


@lru_cache(maxsize=64)  # a search asks for each of its candidates
def _share_out(matrices: tuple[Matrix, ...], targets: tuple[str, ...]) -> Beside:
    beside = [m for m in matrices if matches(m.module, targets)]
    return Beside(
        matrices=len(beside),
        width=sum(m.width for m in beside) / max(sum(m.width for m in matrices), 1),
        alone=sum(m.launches for m in matrices if not matches(m.module, targets)),
    )
