"""Versions of torch that certificates were tried with."""

from __future__ import annotations

import re

# whose code decides what a step holds
STEP_LIBRARIES = (
    "memfit", "torch", "transformers", "peft", "torchao", "bitsandbytes", "safetensors",
    "accelerate",
)  # fmt: skip
OLDEST_TORCH, NEWEST_TORCH = "2.11", "2.13"  # tried; the self-check judges a newer one


def release(text: str) -> tuple[int, ...]:
    """(major, minor) of a version such as `2.13.0+cpu`."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
