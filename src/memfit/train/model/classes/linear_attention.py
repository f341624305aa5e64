"""Linear attention by torch's own code, whatever packages are installed.

Hugging Face's module takes kernels of flash-linear-attention and causal-conv1d where it finds them.
They hold other tensors than torch's code does, which a plan describes and a certificate traces.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

FUNCTIONS = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn",
    "causal_conv1d_update",
)  # fmt: skip


def use_torchs_code(model: nn.Module) -> None:
    """Make the module of a model's class call the functions that are written over torch alone."""
    module: Any = sys.modules[type(model).__module__]
    for name in FUNCTIONS:
        setattr(module, name, inspect.unwrap(getattr(module, name)))
