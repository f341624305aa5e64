"""PPO's value where weights are trained in place: a second copy of what is trained, and a head.

As the value model of TRL's `PPOTrainer` and the critic of verl it begins as the policy does, with
a fresh head of one number, and has gradients and optimizer states of its own. Its weights stand
under the policy's names within `value`, and run in the policy's modules: one model's activations
are there at a time. What is frozen is shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from memfit.adapters.shared.peft_layers import add_score_head
from memfit.records.model import SCORE, VALUE_MODEL, Model, Weight

if TYPE_CHECKING:
    from torch import nn


VALUE = VALUE_MODEL.rstrip(".")  # the module that holds it


def value_rows(rows: Sequence[Weight], width: int) -> tuple[Weight, ...]:
    """The value's own weights; rows: the policy's, whose head of the vocabulary it does not need.

    width: of what a head reads.
    """
    own = (w for w in rows if w.trainable and w.part != "head")
    copies = (replace(w, name=VALUE_MODEL + w.name) for w in own)
    return Weight(name=SCORE, shape=(1, width), part="head"), *copies


def add_value(module: nn.Module, model: Model) -> None:
    """Make room on the meta device; model: whose rows have the value's, see `value_rows`."""
    import torch

    add_score_head(module, model.architecture.head_input)
    for row in (w for w in model.weights if w.of_value):
        *path, leaf = row.name.split(".")
        owner = module
        for name in path:
            if name not in owner._modules:
                owner.add_module(name, torch.nn.Module())
            owner = owner.get_submodule(name)
        owner.register_parameter(leaf, torch.nn.Parameter(torch.empty(row.shape, device="meta")))


def fill_value(module: nn.Module) -> None:
    """Copy the policy's weights as they are now; the head has its own first numbers."""
    for own, value in _pairs(module):
        value.copy_(own)


@contextmanager
def running_value(module: nn.Module) -> Iterator[None]:
    """The value's weights run meanwhile, in place of the policy's."""
    values = {id(own): value for own, value in _pairs(module)}
    places = [
        (part, name, own)
        for part in module.modules()
        for name, own in part._parameters.items()
        if own is not None and id(own) in values
    ]
    for part, name, own in places:
        part._parameters[name] = values[id(own)]
    try:
        yield
    finally:
        for part, name, own in places:
            part._parameters[name] = own


def _pairs(module: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Each of the policy's weights that the value has one of its own for, and that one."""
    named = dict(module.named_parameters())
    return [
        (named[name.removeprefix(VALUE_MODEL)], value)
        for name, value in named.items()
        if name.startswith(VALUE_MODEL)
    ]
