"""Storing a torch module as the rows say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from memfit.records.model import Model, Weight

if TYPE_CHECKING:
    from torch import Tensor, nn


def apply_rows(module: nn.Module, model: Model) -> nn.Module:
    """Give every parameter its row's dtype and trainable flag; the tensors stay where they are.

    Raises ValueError (our bug) when the names of the module and of the rows differ.
    """
    import torch

    rows = {
        name: (spec.dtype, row.trainable)
        for row in model.weights
        for name, spec in row.stored.items()
    }
    names = [name for name, _ in module.named_parameters()]
    if set(names) != set(rows):
        strange = sorted(set(names) ^ set(rows))
        raise ValueError(f"the module and its declared rows differ in {strange[:5]}")

    def store(name: str, old: Tensor) -> Tensor:
        dtype, trainable = rows[name]
        new = torch.empty_like(old, dtype=getattr(torch, dtype))
        return torch.nn.Parameter(new, requires_grad=trainable)

    replace_parameters(module, store)
    return module


def replace_parameters(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every parameter by `make(name, old)`; tied ones stay tied.

    `Module.to` and `Module.to_empty` cannot swap fake tensors.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for prefix, child in module.named_modules():
        for name, old in child._parameters.items():
            if old is None:
                continue
            if id(old) not in made:  # the old one is kept alive so that its id stays its own
                full = f"{prefix}.{name}" if prefix else name
                made[id(old)] = (make(full, old), old)
            child._parameters[name] = made[id(old)][0]


def store_rows(rows: Iterable[Weight], trainable: str, frozen: str) -> tuple[Weight, ...]:
    """The rows with the storage dtype of what is trainable and of what is not."""
    from msgspec.structs import replace

    return tuple(replace(r, dtype=trainable if r.trainable else frozen) for r in rows)
