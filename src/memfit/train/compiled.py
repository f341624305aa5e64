"""Blocks compiled one by one: `compile: blocks`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile each block's forward; alike blocks share one compilation, as their code is the same.

    `fullgraph`: a block that cannot be compiled as a whole is an error and not a slower step.
    """
    for block in blocks:
        block.forward = cast(nn.Module, torch.compile(block.forward, fullgraph=True))
