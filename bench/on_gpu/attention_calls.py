"""Which fused attention runs: its operators, counted by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class AttentionCalls(TorchDispatchMode):
    """Counts the operators of attention that are dispatched; nothing else is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(operator)
        if "attention" in name or "attn" in name:
            self.seen[name] += 1
        return operator(*args, **(kwargs or {}))
