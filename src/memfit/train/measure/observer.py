"""What watches a run of the trainer's own code: it learns of phases and of what tensors are."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from memfit.records.ledger import Phase


class Observer(Protocol):
    """`LiveBytes` is one; so is whoever watches an iteration of reinforcement learning."""

    def enter(self, phase: Phase) -> None:
        """A phase begins."""

    def register_batch(self, *tensors: Tensor | None) -> None:
        """These tensors are of a batch."""

    def register_cache(self, *tensors: Tensor) -> None:
        """These tensors hold keys, values and states of rows in flight."""


class _Nobody:
    def enter(self, phase: Phase) -> None:
        pass

    def register_batch(self, *tensors: Tensor | None) -> None:
        pass

    def register_cache(self, *tensors: Tensor) -> None:
        pass


NOBODY: Observer = _Nobody()
