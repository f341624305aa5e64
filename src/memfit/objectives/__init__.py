"""What a run learns from, one objective a file: which rows it takes, and its loss of them.

Planner, tracer and trainer read the same declaration of an objective: whether rows come in
pairs, whether a reference is run beside the policy, whether log-probabilities are means, and
whether answers are sampled while it trains. The
loss of an objective of pairs is a pure function of both answers' rewards, which returns its own
slope: the step differentiates nothing there, and holds the same bytes whatever the loss is. The
package imports nothing but `memfit.core`, so that the records of a recipe can ask it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from memfit.core.errors import InvalidRequest, did_you_mean
from memfit.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


class Knobs(Protocol):
    """What a loss of pairs is set by: `preference` of a request and of a recipe."""

    @property
    def loss_type(self) -> str:
        """Which of the objective's losses; "" is its usual one."""

    @property
    def beta(self) -> float:
        """What a log-probability is multiplied by to be a reward."""

    @property
    def label_smoothing(self) -> float:
        """Share of the pairs taken to be the wrong way round."""

    @property
    def gamma(self) -> float:
        """By how much the preferred answer's reward is to exceed the other one."""

    @property
    def tau(self) -> float:
        """DiscoPOP's temperature."""

    @property
    def desirable(self) -> float:
        """What the losses of desirable answers are multiplied by, where answers are rated."""

    @property
    def undesirable(self) -> float:
        """And those of the others."""

    @property
    def cross_entropy(self) -> float:
        """What the preferred answers' cross-entropy is multiplied by, where there is one."""

    @property
    def center(self) -> float:
        """Weight of the square of both scores' sum, which keeps scores around 0."""


class Losses(NamedTuple):
    """Of each pair, (pairs,): the loss, and its slope by the reward of each answer."""

    values: Tensor
    by_chosen: Tensor
    by_rejected: Tensor


class PairLoss(Protocol):
    """The loss of pairs by the rewards of their answers: pure, elementwise, any float dtype."""

    def __call__(self, chosen: Tensor, rejected: Tensor, knobs: Knobs) -> Losses:
        """chosen, rejected: (pairs,) rewards, beta times a log-probability, or a ratio's."""


class RatedLosses(NamedTuple):
    """Of each answer, (rows,): the loss, and its slope by the answer's reward."""

    values: Tensor
    by_reward: Tensor


class RatedLoss(Protocol):
    """The loss of single answers that are desirable or not."""

    def __call__(
        self, rewards: Tensor, baseline: Tensor | None, desirable: Tensor, knobs: Knobs
    ) -> RatedLosses:
        """rewards (rows,); baseline (), None where the loss has none; desirable (rows,) bool."""


class LossType(NamedTuple):
    """One loss of an objective that compares answers."""

    loss: Any  # a PairLoss, or a RatedLoss where answers are rated
    source: str  # the paper, and the equation
    averages: bool = False  # rewards are of means over an answer's tokens, not of sums
    smooths: bool = False  # `label_smoothing` is a part of it
    needs_smoothing: bool = False  # and has to be above 0
    mismatches: bool = False  # answers to other prompts are scored, too: the mean is its baseline


Learned = Literal["", "answers", "conversations"]  # of which a cross-entropy is added to the pairs'


class Sampled(NamedTuple):
    """What TRL 1.16 takes where a request for sampled answers does not say."""

    num_generations: int  # answers to each prompt
    beta: float  # weight of the KL divergence from the reference
    temperature: float = 1.0  # that answers are sampled at
    # by `policy.loss_type`, where the two answers to a prompt are compared; else each has an
    # advantage of its own
    pair_losses: Mapping[str, LossType] = MappingProxyType({})


class Objective:
    """What a run learns from."""

    def __init__(
        self,
        name: str,
        *,
        about: str,
        refers: bool = False,
        rated: bool = False,
        learns: Learned = "",
        weight: float | None = None,
        loss_types: Mapping[str, LossType] | None = None,
        refused: Mapping[str, str] | None = None,
        sampled: Sampled | None = None,
        scores: bool = False,
        values: bool = False,
    ) -> None:
        """refused: losses that others have under this objective, and why memfit's step has not.

        rated: answers are desirable or not, each by itself; else those that are compared are pairs.
        learns: of which tokens of the preferred rows a cross-entropy is added to the pairs' loss;
        weight: the only one that the objective has of it; None where any will do.
        sampled: of an objective whose answers are sampled while it trains.
        scores: a reward is what a score head makes of a row's last token, and no log-probability.
        values: what a row will earn is learned at each token, too, beside the policy.
        """
        self.name, self.about, self.refers, self.rated = name, about, refers, rated
        self.learns, self.weight, self.sampled, self.scores = learns, weight, sampled, scores
        self.values = values
        self.loss_types = dict(loss_types or {})
        self.refused = dict(refused or {})

    @property
    def pairs(self) -> bool:
        """Whether rows come in pairs, the preferred answer first."""
        return self.compares and not self.rated

    @property
    def compares(self) -> bool:
        """Whether a row is one answer, whose log-probability or score is what is learned from."""
        return bool(self.loss_types)

    @property
    def samples(self) -> bool:
        """Whether answers are sampled while it trains, and judged by reward functions."""
        return self.sampled is not None

    @property
    def least_rows(self) -> int:
        """Rows of the smallest micro-batch, of which every micro-batch has a multiple."""
        return 2 if self.pairs or self.pairs_samples else 1

    @property
    def pairs_samples(self) -> bool:
        """Whether the two sampled answers to a prompt are a pair that is compared."""
        return self.sampled is not None and bool(self.sampled.pair_losses)

    @property
    def usual_loss(self) -> str:
        """The `preference.loss_type` that is used where none is stated; "" without pairs."""
        return next(iter(self.loss_types), "")

    def find_loss(self, loss_type: str) -> LossType:
        """The loss of that name, "" the usual one; raises InvalidRequest where there is none."""
        name = loss_type or self.usual_loss
        if name in self.loss_types:
            return self.loss_types[name]
        if name in self.refused:
            raise InvalidRequest(
                f"`preference.loss_type: {name}` under `objective: {self.name}`:"
                f" {self.refused[name]}",
                hint=f"use one of {', '.join(self.loss_types)}",
            )
        near = did_you_mean(name, self.loss_types)
        raise InvalidRequest(
            f"`preference.loss_type: {name}` is not a loss of `objective: {self.name}`, which has"
            f" {', '.join(self.loss_types)}",
            hint=f"did you mean {near}?" if near else f"use `loss_type: {self.usual_loss}`",
        )

    def check(self, knobs: Knobs) -> None:
        """Raise InvalidRequest for settings that the loss does not have."""
        found, name = self.find_loss(knobs.loss_type), knobs.loss_type or self.usual_loss
        if knobs.label_smoothing and not found.smooths:
            smoothed = [n for n, t in self.loss_types.items() if t.smooths]
            raise InvalidRequest(
                f"`preference.label_smoothing: {knobs.label_smoothing:g}` with `loss_type: {name}`,"
                " which has none",
                hint=f"use 0, or one of {', '.join(smoothed)}",
            )
        if found.needs_smoothing and not knobs.label_smoothing:
            raise InvalidRequest(
                f"`preference.loss_type: {name}` with `label_smoothing: 0`, whose logarithm it"
                " takes",
                hint="use a number above 0, such as 0.001",
            )
        self._check_cross_entropy(knobs.cross_entropy)
        self._check_scores(knobs)
        for name in ("desirable", "undesirable"):
            weight = getattr(knobs, name)
            if weight and not self.rated:
                raise InvalidRequest(
                    f"`preference.{name}: {weight:g}` under `objective: {self.name}`, whose answers"
                    " are pairs",
                    hint="it is of `objective: kto`; leave it on `auto`",
                )

    def _check_scores(self, knobs: Knobs) -> None:
        if knobs.center and not self.scores:
            raise InvalidRequest(
                f"`preference.center: {knobs.center:g}` under `objective: {self.name}`, which has"
                " no scores",
                hint="it is of `objective: reward`",
            )
        if self.scores and knobs.beta != 1.0:
            raise InvalidRequest(
                f"`preference.beta: {knobs.beta:g}` under `objective: {self.name}`, whose scores"
                " are rewards as they are",
                hint="leave `preference.beta` on `auto`",
            )

    def _check_cross_entropy(self, weight: float) -> None:
        if weight and not self.learns:
            raise InvalidRequest(
                f"`preference.cross_entropy: {weight:g}` under `objective: {self.name}`, which"
                " learns from the comparison alone",
                hint="`objective: cpo` and `orpo` have one; or leave it on `auto`",
            )
        if self.weight is not None and weight != self.weight:
            raise InvalidRequest(
                f"`preference.cross_entropy: {weight:g}` under `objective: {self.name}`, whose own"
                f" is {self.weight:g}",
                hint="`preference.beta` is the weight of the odds ratio beside it",
            )


objectives: Registry[Objective] = Registry("objective", "memfit.objectives")
find_objective = objectives.find
