"""bitsandbytes, whose kernels write and read codes of 8 and 4 bits."""

from __future__ import annotations

from functools import cache
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.core.libraries import install_extra, quiet_import


@cache
def bitsandbytes() -> Any:
    """The library, whose operators importing it registers; a second that others need not wait.

    Raises InvalidRequest where it is not installed.
    """
    try:
        with quiet_import():
            import bitsandbytes as library
    except ImportError:
        raise InvalidRequest(
            "a quantised base needs bitsandbytes, which is not installed",
            hint=f"{install_extra('train')}, or use `base_format: bf16`",
        ) from None
    return library


@cache
def scale_codes() -> tuple[float, ...]:
    """The 256 values that scales are quantised to: bitsandbytes' signed dynamic type."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch.device("cpu"):
        return tuple(bitsandbytes().functional.create_dynamic_map().tolist())
