"""What a search chooses and says, whatever the framework: a recipe with its predictions, a plan.

An `Explorer` finds the recipe; which one does depends on how the framework's bytes are known
(`plan.search.search.find_explorer`). Everything after that is the same for every framework.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from memfit import __version__
from memfit.plan.budget.cost import describe_cost
from memfit.plan.memory.host_memory import describe_host, describe_rollouts, rollouts_on_host
from memfit.plan.request.assumed import describe_assumed
from memfit.plan.request.problem import Problem
from memfit.plan.step_time.communication.traffic import describe_traffic
from memfit.plan.step_time.predicted_time import (
    Totals,
    assume_lengths,
    describe_time,
    predict_timeline,
    relative_seconds,
)
from memfit.records.hardware import Device
from memfit.records.ledger import Ledger
from memfit.records.model import Model
from memfit.records.recipe import Recipe
from memfit.records.results import Considered, Memory, Plan


class Choice(NamedTuple):
    """One recipe with everything that is predicted of it."""

    recipe: Recipe
    model: Model  # with what an adapter adds, where the framework's file describes that
    totals: Totals
    memory: Memory
    ledger: Ledger
    on_host: int  # bytes of all hosts
    assumptions: tuple[str, ...] = ()  # of this recipe alone
    is_long: bool = False  # its replay takes seconds: its levers are planned by its ratio

    def seconds(self, device: Device) -> float:
        """Of a step, to compare it with others; on nominal rates where the device has none."""
        return relative_seconds(self.totals, self.recipe, device)


class Found(NamedTuple):
    """A plan without levers, and what it chose."""

    plan: Plan
    choice: Choice


class Rough(NamedTuple):
    """About what the plan of a request comes to."""

    recipe: Recipe
    peak_allocated: int
    needs: int  # bytes of the device
    seconds: float
    fits: bool


class Explorer(ABC):
    """Decides every `auto` of a request for one kind of framework."""

    @abstractmethod
    def find_best(self, problem: Problem) -> Found:
        """The fastest that fits; where nothing does, the nearest miss and its verdict.

        Raises DoesNotFit where what fits would exceed `limits.time` or `limits.cost`, and
        InvalidRequest where the request leaves no candidate.
        """

    @abstractmethod
    def find_fitting(self, problem: Problem) -> Found | None:
        """As `find_best`; None where nothing fits."""

    def find_roughly(self, problem: Problem, ratio: float) -> Rough:
        """About what `find_best` finds; ratio: of reserved to allocated bytes, for any replay."""
        del ratio
        plan, choice = self.find_best(problem)
        memory, seconds = plan.memory, choice.seconds(problem.device)
        peak = memory.peak_allocated or 0
        return Rough(
            choice.recipe, peak, memory.needed or peak, seconds, fits=memory.verdict == "fits"
        )

    @abstractmethod
    def predict(self, problem: Problem, *, levers: bool) -> Plan:
        """The plan of the one configuration that a request states, without a search.

        levers: with what each knob turned would save or cost, where single knobs are described.
        """


def assemble(
    problem: Problem, choice: Choice, considered: tuple[Considered, ...] = (),
    levers: tuple[Considered, ...] = (),
) -> Plan:  # fmt: skip
    """The plan of a choice: its predictions, its cost, and what it takes for granted."""
    recipe, device, totals = choice.recipe, problem.device, choice.totals
    timeline = predict_timeline(totals, recipe, device)
    time = describe_time(totals, recipe, device, timeline)
    return Plan(
        recipe_digest=recipe.digest,
        request=problem.request,
        recipe=recipe,
        memory=choice.memory,
        time=time,
        cost=describe_cost(time, device, problem.request),
        ledger=choice.ledger,
        timeline=timeline,
        considered=considered,
        levers=levers,
        assumptions=(
            *problem.assumptions, *describe_assumed(problem.request, recipe),
            *problem.framework.describe_open(recipe), *choice.assumptions,
            *describe_host(recipe, choice.on_host, problem.request.limits),
            *assume_lengths(totals, recipe, device), *describe_rollouts(recipe),
        ),
        versions={"memfit": __version__},
        traffic=describe_traffic(totals, recipe),
        host={**({"offloaded": choice.on_host} if choice.on_host else {}),
              **rollouts_on_host(recipe)},
    )  # fmt: skip
