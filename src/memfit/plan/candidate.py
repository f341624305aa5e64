"""One recipe that a search weighs, and what is predicted of it."""

from __future__ import annotations

from functools import cached_property, lru_cache

import msgspec

from memfit.adapters import find_adapter
from memfit.ledger import Ledger
from memfit.model import Model
from memfit.plan.again import Again
from memfit.plan.estimate import Estimate
from memfit.plan.memory import predict_memory, predict_peak, without_shape
from memfit.plan.problem import Problem
from memfit.plan.time import Totals, relative_seconds, sum_up
from memfit.plan.verdict import Beside, describe_memory, find_beside, held
from memfit.recipe import Recipe
from memfit.results import Memory

COMPILED = (
    "; compiled blocks are predicted as lean blocks, which keep the same: `memfit certify` asks the"
    " compiler"
)


class Candidate:
    """One recipe and what is predicted of it, computed when first asked."""

    def __init__(
        self,
        problem: Problem,
        recipe: Recipe,
        model: Model,
        totals: Totals,
        estimate: Estimate | None = None,
    ) -> None:
        self.problem, self.recipe, self.estimate = problem, recipe, estimate
        self.model, self.totals = model, totals

    @classmethod
    def of(cls, problem: Problem, recipe: Recipe) -> Candidate:
        """With the model as its method stores it: dtypes, trainable flags, extra rows."""
        return cls(problem, recipe, *_adapted(problem.model, without_shape(recipe)))

    def but(self, **changes: object) -> Candidate:
        """The same method and precision with some of the exact knobs changed."""
        recipe = msgspec.structs.replace(self.recipe, **changes)
        estimate = self.estimate
        if estimate is not None and "optimizer" in changes:
            # gradients that go within backward are another simulation than the estimate's
            within = recipe.optimizer.in_backward
            estimate = None if within else estimate.with_optimizer(recipe)
        if "parallel" in changes:
            estimate = None
        if recipe.offload != "none":  # another simulation again
            estimate = None
        return Candidate(self.problem, recipe, self.model, self.totals, estimate)

    @cached_property
    def ledger(self) -> Ledger:
        """Predicted bytes, instant by instant."""
        return predict_memory(self.model, self.recipe, self.problem.device)

    @cached_property
    def memory(self) -> Memory:
        """Predicted memory and its verdict."""
        usable, because = self.problem.usable, self.problem.usable_because
        if self.recipe.compile == "blocks":
            because += COMPILED
        return describe_memory(self.ledger, self.problem.device, usable, because, self.beside)

    @cached_property
    def beside(self) -> Beside:
        """What its mesh needs of the device beside the peak."""
        return find_beside(self.model, self.recipe, self.problem.device)

    @cached_property
    def seconds(self) -> float:
        """Predicted step time, for ranking."""
        return relative_seconds(self.totals, self.recipe, self.problem.device)

    @property
    def fits(self) -> bool:
        """Whether the prediction fits (with an unknown limit everything does)."""
        usable = self.problem.usable
        return usable is None or held(self.peak, self.problem.device, self.beside) <= usable

    @cached_property
    def peak(self) -> int:
        """The predicted peak, without its reasons."""
        known: Memory | None = self.__dict__.get("memory")
        if known is not None and known.peak_allocated is not None:
            return known.peak_allocated
        return predict_peak(self.model, self.recipe, self.problem.device)

    @property
    def exact(self) -> bool:
        """Whether `about` is the prediction itself."""
        return self.estimate is None or "peak" in self.__dict__

    @property
    def about(self) -> int:
        """The peak: the prediction where it was made, else the estimate, within a few per cent."""
        return self.peak if self.exact else self._estimated

    @cached_property
    def _estimated(self) -> int:
        assert self.estimate is not None
        r = self.recipe
        return self.estimate.peak(r.micro_batch, Again.of(r), r.loss_chunk)

    @property
    def needs(self) -> int:
        """`about` as it is held against the usable line."""
        return held(self.about, self.problem.device, self.beside)

    @property
    def likely(self) -> bool:
        """Whether it fits by `about`."""
        return self.problem.usable is None or self.needs <= self.problem.usable


@lru_cache(maxsize=64)
def _adapted(model: Model, recipe: Recipe) -> tuple[Model, Totals]:
    """The model as its method stores it, and its sums."""
    adapted = find_adapter(recipe).adapt(model, recipe)
    return adapted, sum_up(adapted)
