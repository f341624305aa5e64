"""A tiny step that shows whether this torch imitates the device, before anything is certified.

The patches of `fake_device` rest on torch's internals. If a version moved one of them, the trace
would still run and count other tensors; so the ones that would go unnoticed are looked at here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils._foreach_utils import _has_foreach_support
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.certify import NEWEST_TORCH, OLDEST_TORCH
from memfit.errors import NotCertified


class _Seen(TorchDispatchMode):
    """The names of the operators dispatched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


def check_imitation(kind: str) -> None:
    """Raise NotCertified unless fake tensors of this kind take the paths that real ones take.

    Call it inside `fake_device`.
    """
    weight = nn.Parameter(torch.empty(64, 64, device=kind))
    try:
        missing = [what for what, holds in _promises(kind, weight).items() if not holds]
    except Exception as error:
        missing = [f"{type(error).__name__}: {error}"]
    if missing:
        raise NotCertified(
            f"torch {torch.__version__} does not imitate a {kind} device: {', '.join(missing)}",
            hint=f"use a torch version that memfit supports ({OLDEST_TORCH} to {NEWEST_TORCH})",
        )


def _promises(kind: str, weight: nn.Parameter) -> dict[str, bool]:
    promises = {
        "foreach optimizers": _has_foreach_support([weight], weight.device),
        "nothing is computed": type(weight.data).__name__ == "FakeTensor",
    }
    with _Seen() as seen, torch.autocast(kind, torch.bfloat16, cache_enabled=False):
        product = torch.mm(weight, weight)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            heads = product.view(1, 4, 16, 64)
            mixed = scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        silu(mixed).float().sum().backward()  # type: ignore[no-untyped-call]
    promises["autocast"] = product.dtype is torch.bfloat16
    promises["silu's own backward"] = "silu_backward" in seen.names
    forward = "_scaled_dot_product_flash_attention"
    forward += "_for_cpu" if kind == "cpu" else ""
    promises["flash attention"] = {forward, f"{forward}_backward"} <= seen.names or (
        kind == "cpu" and forward in seen.names
    )
    return promises
