"""A frozen copy of the trained weights, which runs in their place as the reference.

It is held as buffers that no checkpoint has: a run that goes on copies the starting weights a
second time, as it reads an adapter's base a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memfit.adapters.shared.apply import replace_parameters
from memfit.core.errors import InvalidRequest
from memfit.records.model import SCORE, VALUE_MODEL, Model, Weight

if TYPE_CHECKING:
    from torch import Tensor, nn

REFERENCE = "reference"  # the module that holds it


def hold_reference(module: nn.Module) -> None:
    """Make room for the copy, on the devices and in the dtypes of what is trained."""
    import torch

    holder = torch.nn.Module()
    for index, weight in enumerate(_trained(module).values()):
        holder.register_buffer(f"weight_{index}", torch.zeros_like(weight), persistent=False)
    module.add_module(REFERENCE, holder)


def fill_reference(module: nn.Module) -> None:
    """Copy what is trained as it is now."""
    trained = _trained(module)
    for name, copy in _copies(module).items():
        copy.copy_(trained[name])


@contextmanager
def running_reference(module: nn.Module) -> Iterator[None]:
    """The copy runs meanwhile, in place of the trained weights.

    Raises InvalidRequest where no copy is held.
    """
    copies, own = _copies(module), dict(module.named_parameters())
    replace_parameters(module, lambda name, old: copies.get(name, old))
    try:
        yield
    finally:
        replace_parameters(module, lambda name, old: own.get(name, old))


def copied_rows(model: Model) -> list[Weight]:
    """What there is a copy of: what is trained of the policy, without a value beside it."""
    return [w for w in model.weights if w.trainable and _is_of_policy(w.name)]


def _is_of_policy(name: str) -> bool:
    return not name.startswith(VALUE_MODEL) and name != SCORE


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    named = module.named_parameters()
    return {name: p for name, p in named if p.requires_grad and _is_of_policy(name)}


def _copies(module: nn.Module) -> dict[str, Tensor]:
    """By names of the trained weights."""
    holder = dict(module.named_children()).get(REFERENCE)
    if holder is None:
        raise InvalidRequest(
            "no copy of the starting weights is held that could be the reference",
            hint="use `method: lora`, whose base is the reference",
        )
    return dict(zip(_trained(module), holder.buffers(), strict=True))
