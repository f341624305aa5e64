"""Updates with sampled answers, and log-probabilities of their tokens without a gradient."""

from __future__ import annotations

from typing import Protocol

from memfit import meta
from memfit.families.shared.forward import (
    Forward,
    Weights,
    row_scores,
    token_log_probs,
    token_values,
)
from memfit.meta import Tensor
from memfit.meta.losses.policy import FIGURES, policy_loss
from memfit.meta.losses.values import value_loss
from memfit.plan.simulate.setting import Setting
from memfit.records.model import REWARD_SCORE

REWARD_HEAD = REWARD_SCORE.removesuffix(".weight")


class Simulated(Protocol):
    """What of a simulation this reads and calls."""

    setting: Setting
    outside: Weights

    def mark(self, name: str, owner: str) -> None:
        """Begin a segment."""

    def find_hidden(self, forward: Forward, boundaries: list[int]) -> Tensor:
        """(batch, tokens, hidden) of the model that is trained."""

    def find_valued(self, forward: Forward, boundaries: list[int]) -> Tensor:
        """The same of the base with the value's adapter."""

    def find_judged(self, forward: Forward) -> Tensor:
        """The same with the adapter of a reward model."""

    def find_reference(self, forward: Forward) -> tuple[Weights, Tensor]:
        """The base's own weights outside of its blocks, and what its blocks make."""


def reinforce(
    simulation: Simulated, forward: Forward, labels: Tensor, boundaries: list[int]
) -> tuple[Tensor, Tensor]:
    """As train/step/step.py: the loss, and figures of the log that outlive the micro-batch."""
    setting = simulation.setting
    hidden = simulation.find_hidden(forward, boundaries)
    simulation.mark("loss", "loss")
    scored = token_log_probs(
        forward, simulation.outside, hidden, labels, setting.loss.chunk, heated=_is_heated(setting)
    )
    del hidden
    loss, sums = policy_loss(scored.log_probs)
    product = meta.empty(forward.meter, scored.entropy.shape, "float32")
    entropy = meta.empty(forward.meter, (), "float32")
    del product
    figures = meta.empty(forward.meter, (FIGURES + 1,), "float32")
    del sums, entropy, scored
    return loss, figures


def learn_values(
    simulation: Simulated, forward: Forward, boundaries: list[int]
) -> tuple[Tensor, Tensor]:
    """The same of a micro-batch whose values are learned."""
    hidden = simulation.find_valued(forward, boundaries)
    simulation.mark("loss", "loss")
    values = token_values(forward, simulation.outside, hidden)
    del hidden
    return value_loss(values)


def score_tokens(simulation: Simulated, forward: Forward, labels: Tensor, *, of: str) -> None:
    """A forward that keeps nothing; of: the `policy`, the `reference`, the `value` or the
    `reward`."""
    setting = simulation.setting
    if of == "reward":
        hidden = simulation.find_judged(forward)
        simulation.mark("loss", "loss")
        row_scores(forward, simulation.outside, hidden, labels, REWARD_HEAD)
        return
    if of == "value":
        hidden = simulation.find_valued(forward, [])
        simulation.mark("loss", "loss")
        token_values(forward, simulation.outside, hidden)
        return
    outside, made = simulation.outside, []  # a list, as only what is called next names its content
    if of == "reference":
        outside, hidden = simulation.find_reference(forward)
        made.append(hidden)
        del hidden
    else:
        made.append(simulation.find_hidden(forward, []))
    simulation.mark("loss", "loss")
    heated = _is_heated(setting)
    token_log_probs(forward, outside, made.pop(), labels, setting.loss.chunk, heated=heated)


def _is_heated(setting: Setting) -> bool:
    return setting.loss.answers is not None and setting.loss.answers.heated
