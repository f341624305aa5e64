"""What a simulated step computes: memfit's own forward and loss, or another framework's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from memfit.families import find_family
from memfit.families.shared.forward import Embedded, Forward, Weights, loss_mean
from memfit.meta import Tensor
from memfit.records import Record


class Program(Protocol):
    """The forward of a step and its loss; hashable, since simulations are remembered."""

    def __hash__(self) -> int:
        """Of its content."""

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """What runs before the first block; weights: those outside the blocks."""

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """One block: (batch, tokens, hidden) -> the same."""

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """What the loss receives."""

    def loss(self, forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
        """The head and the loss: -> ()."""


class Comparing(Protocol):
    """What a step of pairs does behind the model's own code; hashable."""

    def __hash__(self) -> int:
        """Of its content."""

    def outputs(self, forward: Forward, weights: Weights, hidden: Tensor) -> list[Tensor]:
        """Of the head: (batch, tokens, vocab), or numbers of each token."""

    def returned(self, outputs: list[Tensor]) -> list[Tensor]:
        """What the model's call makes of them when its own variables are gone."""

    def compare(self, outputs: list[Tensor], refer: Callable[[], list[Tensor]] | None) -> Tensor:
        """The loss of pairs; refer: makes the reference's outputs, None where no model does."""


class OwnProgram(Record, frozen=True, kw_only=True):
    """memfit's step: the forward of Hugging Face's class, and train/step/loss.py."""

    family: str
    chunk: int  # tokens per chunk of the loss; 0 = plain

    def embed(self, forward: Forward, weights: Weights) -> Embedded:
        """See `Program.embed`."""
        return find_family(self.family).embed(forward, weights)

    def block(
        self, forward: Forward, weights: Weights, x: Tensor, shared: tuple[Tensor, ...]
    ) -> Tensor:
        """See `Program.block`."""
        return find_family(self.family).block(forward, weights, x, shared)

    def finish(self, forward: Forward, weights: Weights, x: Tensor) -> Tensor:
        """See `Program.finish`."""
        return find_family(self.family).finish(forward, weights, x)

    def loss(self, forward: Forward, weights: Weights, hidden: Tensor, labels: Tensor) -> Tensor:
        """See `Program.loss`."""
        return loss_mean(forward, weights, hidden, labels, self.chunk)
