"""The optimizer's states on the host of one GPU, by torchao's CPUOffloadOptimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memfit.core.libraries import quiet_import
from memfit.optimizers.shared.groups import group_parameters
from memfit.optimizers.shared.offloaded import SMALLEST
from memfit.records.recipe import Optimizer


class _States(Mapping[Tensor, dict[str, Any]]):
    """The state of each weight, wherever it is."""

    def __init__(self, inner: Any, weights: Iterable[Tensor]) -> None:
        self._inner, self._weights = inner, tuple(weights)

    def __getitem__(self, weight: Tensor) -> dict[str, Any]:
        on_host = self._inner.param_d2h_map.get(weight)
        if on_host is None:
            found: dict[str, Any] = self._inner.d_opt.state[weight]
        else:
            found = self._inner.optim_dict[weight].state[on_host]
        return found

    def __iter__(self) -> Iterator[Tensor]:
        return (weight for weight in self._weights if self[weight])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Forget all, as before the first step."""
        for weight in self._weights:
            self[weight].clear()


class Offloaded(torch.optim.Optimizer):
    """AdamW on the host, as memfit's step, loop and checkpoint use an optimizer."""

    def __init__(self, named: Mapping[str, nn.Parameter], settings: Optimizer) -> None:
        with quiet_import():
            from torchao.optim import CPUOffloadOptimizer
        weights = list(named.values())
        super().__init__(
            weights, {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
        )
        group_parameters(self, {p: name for name, p in named.items()}, settings)
        groups = [
            {name: group[name] for name in ("params", "weight_decay")}
            for group in self.param_groups
        ]
        for weight in weights:  # a rehearsal's optimizer is gone, its hooks are not
            if hooks := weight._post_accumulate_grad_hooks:
                hooks.clear()
        self.inner = CPUOffloadOptimizer(
            groups, torch.optim.AdamW, minimal_size=SMALLEST, lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2), eps=settings.eps, fused=True,
        )  # fmt: skip
        self.state = _States(self.inner, weights)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update on the host what backward has sent there, and wait until the weights are back."""
        del closure
        for group in self.inner.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the device's gradients go; the host's are written over."""
        self.inner.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over weights and states that a checkpoint has put in place."""
        for weight, on_host in self.inner.param_d2h_map.items():
            on_host.copy_(weight.detach())
            held = self.inner.optim_dict[weight].state[on_host]
            held.update({k: v.to(on_host.device) for k, v in held.items()})
