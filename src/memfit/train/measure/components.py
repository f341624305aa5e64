"""Which component of the model a module's path belongs to, as ledgers name them."""

from __future__ import annotations

from torch import nn

from memfit.adapters.shared.reference_copy import REFERENCE
from memfit.adapters.shared.value_model import VALUE
from memfit.records.ledger import Phase
from memfit.train.model.hugging_face import parts

# Allocations outside every module, by what is then running.
OUTSIDE = {Phase.LOSS: "loss", Phase.OPTIMIZER_STEP: "optimizer"}


class Owners:
    """Path -> embedding, blocks, norm, head, rotary, or the path itself outside the model."""

    def __init__(self, prefixes: dict[str, str] | None = None) -> None:
        self._prefixes = prefixes or {}

    @classmethod
    def of(cls, model: nn.Module) -> Owners:
        """Read off the places of a causal language model; no owners for any other module."""
        if not hasattr(model, "get_output_embeddings") and not hasattr(model, "get_base_model"):
            return cls()
        places = parts(model)
        prefixes = {name: name for name in (REFERENCE, VALUE) if name in model._modules}
        for name, module in model.named_modules():
            if module is places.blocks:
                prefixes[name] = "blocks"
            elif module is places.head:
                prefixes[name] = "head"
            elif isinstance(module, nn.Embedding) or module in places.entry:
                prefixes[name] = "embedding"
        for name, module in model.named_modules():
            if any(name == p or name.startswith(f"{p}.") for p in prefixes):
                continue
            if any(True for _ in module.children()):
                continue
            has_weights = any(True for _ in module.parameters())
            prefixes[name] = "norm" if has_weights else "rotary"
        return cls(prefixes)

    def find(self, path: str) -> str:
        """The component of a module's or parameter's path."""
        for prefix, component in self._prefixes.items():
            if path == prefix or path.startswith(f"{prefix}."):
                return component
        return path if path in ("batch", "cache", *OUTSIDE.values()) else "model"
