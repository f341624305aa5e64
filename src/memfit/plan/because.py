"""Why an entry of the predicted ledger is as large as it is, in numbers."""

from __future__ import annotations

from memfit.ledger import Kind, Phase
from memfit.model import Model
from memfit.recipe import Recipe


def explain(kind: Kind, owner: str, nbytes: int, phase: Phase, model: Model, recipe: Recipe) -> str:
    return f"{kind} of {owner}"
