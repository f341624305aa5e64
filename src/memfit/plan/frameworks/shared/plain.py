"""The values that most frameworks' steps have: full training in bf16 over fp32 masters."""

from __future__ import annotations

PLAIN: dict[str, tuple[str, ...]] = {
    "precision": ("bf16-mixed",), "method": ("full",), "base_format": ("fp32",),
    "optimizer": ("adamw",), "implementation": ("fused",), "recompute": ("none", "full"),
    "attention": ("flash",), "loss": ("plain",), "compile": ("none",), "offload": ("none",),
}  # fmt: skip
UNPUBLISHED = "no published run says what it held"


def plain_values(**others: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Full training in bf16 over fp32 masters, but for the values that are named."""
    return PLAIN | others
