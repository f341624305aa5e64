"""Blocks compiled one by one: `compile: blocks`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block's forward; alike blocks share one compilation, as their code is the same.

    `fullgraph`: a block that cannot be compiled as a whole is an error and not a slower step.
    What a block keeps is `train/model/partition.py`'s to say.
    """
    with _disable_current_modes(), warnings.catch_warnings():  # no module's constants are fake
        warnings.simplefilter("ignore", DeprecationWarning)  # inductor's own imports
        from memfit.train.model.partition import PARTITION
    options: dict[str, Any] = {"custom_partitioner_fn": PARTITION}
    for block in blocks:
        compiled = torch.compile(block.forward, fullgraph=True, options=options)
        block.forward = cast(nn.Module, compiled)
