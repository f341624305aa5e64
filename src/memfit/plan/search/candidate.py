"""One recipe that a search weighs, and what is predicted of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache

import msgspec
from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.allocator.heap import BELOW, Held, keeps_freed
from memfit.plan.frameworks import NO_SLACK, Slack
from memfit.plan.memory.host_memory import find_host_excess, shards_on_host
from memfit.plan.memory.predicted_memory import (
    predict_memory,
    predict_peak,
    predict_rollout,
    predict_stages,
    waiting_on_host,
    with_blocks,
    without_shape,
)
from memfit.plan.memory.process import describe_process, find_process
from memfit.plan.memory.tape import (
    Replayed,
    has_tape,
    hold_run,
    replay_other_orders,
    replay_run,
)
from memfit.plan.memory.verdict import (
    REPLAY,
    SAMPLED,
    SLACK,
    Needed,
    describe_memory,
    doubt_sampled,
    find_needed,
    find_streams,
    widen,
)
from memfit.plan.request.problem import Problem
from memfit.plan.search.estimate import Estimate, count_least
from memfit.plan.simulate.recompute import RecomputedBlocks
from memfit.plan.step_time.predicted_time import Totals, relative_seconds, sum_up
from memfit.records.ledger import Ledger
from memfit.records.model import Model
from memfit.records.recipe import Optimizer, Parallel, Recipe
from memfit.records.results import Memory

COMPILED = (
    "; compiled blocks are predicted as lean blocks, which keep the same: `memfit certify` asks the"
    " compiler"
)
# Reserved bytes over the closed form's peak, beyond which no replay was seen: the ends between
# which a run has to be replayed (bench/results/plan_vs_certificate.json).
LEAST, MOST = 0.97, 1.2
LONG = 250_000  # events of a run: of one whose blocks have no loops there are 20,000 to 100,000
NEAR = 0.02  # by which the ratio of a near candidate was seen to differ, and more


class Ratio:
    """What the last replay of a near candidate had beside the peak of the closed form."""

    def __init__(self, assumed: float | None = None) -> None:
        # what is always there, by what it depends on beside method and precision
        self.least: dict[tuple[Optimizer, Parallel, str], int] = {}
        self.value = assumed or SLACK.typical  # reserved bytes, over the peak
        self.blocks = 0  # bytes of blocks, above the peak
        # between which that of another candidate may lie
        self.ends = (LEAST, MOST) if assumed is None else (assumed, assumed)
        self.refuted: set[Recipe] = set()  # what did not fit by its own replay

    @contextmanager
    def at(self, value: float) -> Iterator[None]:
        """Within, this ratio stands for the last replay's."""
        own, self.value = self.value, value
        try:
            yield
        finally:
            self.value = own


class Candidate:
    """One recipe and its predictions, computed at their first use."""

    def __init__(
        self,
        problem: Problem,
        recipe: Recipe,
        model: Model,
        totals: Totals,
        estimate: Estimate | None = None,
        ratio: Ratio | None = None,
    ) -> None:
        self.problem, self.recipe, self.estimate = problem, recipe, estimate
        self.model, self.totals = model, totals
        self.ratio = ratio or Ratio(problem.assumed_ratio)

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
        return Candidate(self.problem, recipe, self.model, self.totals, estimate, self.ratio)

    @property
    def holds_less(self) -> bool:
        """Whether not all gradients, or not all states, are on the device at once."""
        return self.recipe.optimizer.in_backward or self.recipe.offload == "optimizer"

    def is_like(self, other: Candidate) -> bool:
        """Whether they differ in recompute alone, of the exact knobs."""

        def knobs(r: Recipe) -> tuple[object, ...]:
            return r.micro_batch, r.loss_chunk, r.optimizer, r.offload, r.parallel

        return knobs(self.recipe) == knobs(other.recipe)

    @cached_property
    def replayed(self) -> Replayed | None:
        """What the allocator reserves for the simulated run; None where it is not simulated."""
        if not self._has_tape or self._is_clear or self.problem.assumed_ratio is not None:
            return None
        timeless = replace(self.recipe, steps=0, seed=0)
        found = replay_run(self.model, timeless, self.problem.device)
        self.ratio.value = found.reserved / self.peak
        self.ratio.blocks = found.allocated - self.peak
        near = 0 if found.events > LONG else NEAR  # what is chosen is replayed itself anyway
        self.ratio.ends = self.ratio.value - near, self.ratio.value + near
        return found

    @property
    def is_long(self) -> bool:
        """Whether a replay takes seconds: of loops in blocks, such as linear attention's."""
        replayed = self.__dict__.get("replayed")
        return replayed is not None and replayed.events > LONG

    @cached_property
    def _has_tape(self) -> bool:
        return has_tape(self.recipe, self.problem.device)

    @property
    def _is_clear(self) -> bool:
        """Whether it fits, or does not, whatever a replay would say; only where that is enough."""
        usable = self.problem.usable
        if self.problem.exact or usable is None:
            return False
        if self._about(self.peak * LEAST) > usable:
            return True
        fits = self._about(self.peak * MOST) <= usable
        return fits and self._closed.against(tight=False) <= usable

    @property
    def _closed(self) -> Needed:
        """The band around the predicted peak, without a replay."""
        device, assumed = self.problem.device, self.problem.assumed_ratio
        if assumed is not None and self._has_tape:
            slack = Slack(
                low=assumed, typical=assumed, high=assumed * self._spread.high,
                source="another plan's replay",
            )  # fmt: skip
            return find_needed(slack, self.peak, device, self.recipe.parallel)
        streams = find_streams(self.model, self.recipe, device)
        return find_needed(SLACK, self.peak, device, self.recipe.parallel, streams)

    @cached_property
    def ledger(self) -> Ledger:
        """Predicted bytes, instant by instant; with the blocks of the replay where there is one."""
        ledger = predict_memory(self.model, self.recipe, self.problem.device)
        return ledger if self.replayed is None else with_blocks(ledger, self.replayed.phases)

    @cached_property
    def memory(self) -> Memory:
        """Predicted memory and its verdict."""
        usable, because = self.problem.usable, self.problem.usable_because
        if self.recipe.compile == "blocks":
            because += COMPILED
        device = self.problem.device
        if device.is_cpu:
            alone = self.recipe.parallel.world == 1
            return describe_process(
                self.ledger, device, usable, because, prepared=alone, held=self._held(None)
            )
        memory = describe_memory(self.ledger, device, usable, because, self.ranged)
        return doubt_sampled(self.recipe, device, memory, "replayed")

    @cached_property
    def needed(self) -> Needed:
        """The band of the device's bytes: of the replay, else around the predicted peak."""
        device, parallel, replayed = self.problem.device, self.recipe.parallel, self.replayed
        if device.is_cpu:
            return self._process(self.peak)
        if replayed is not None:
            slack = SAMPLED if self.recipe.samples else REPLAY
            return find_needed(slack, replayed.reserved, device, parallel)
        return self._closed

    @cached_property
    def ranged(self) -> Needed:
        """The same band with all that other orders of addresses reserve, which takes two replays
        more: of a plan, not of its levers. That of sampled answers was measured, orders included.
        """
        replayed, device = self.replayed, self.problem.device
        if replayed is None or device.is_cpu or self.recipe.samples or not self.problem.ranged:
            return self.needed
        timeless = replace(self.recipe, steps=0, seed=0)
        others = replay_other_orders(self.model, timeless, device)
        slack = widen(REPLAY, replayed.reserved, others)
        return find_needed(slack, replayed.reserved, device, self.recipe.parallel)

    @property
    def _spread(self) -> Slack:
        """What is added to reserved bytes that a near candidate's replay tells of."""
        return SAMPLED if self.recipe.samples else NO_SLACK

    @cached_property
    def seconds(self) -> float:
        """Predicted step time, for ranking."""
        return relative_seconds(self.totals, self.recipe, self.problem.device)

    @cached_property
    def fits(self) -> bool:
        """Whether the prediction fits, with its whole band unless the request takes less.

        With an unknown limit everything does. The run is replayed only where that can decide:
        what is chosen in the end has to be `proved`.
        """
        usable = self.problem.usable
        if not self.spares_host or self.recipe in self.ratio.refuted:
            return False
        if usable is None:
            return True
        if self.problem.device.is_cpu or "needed" in self.__dict__:
            return self._against() <= usable
        least, most = self.ratio.ends
        if self._is_over(least, usable):
            return False
        if self._has_tape and self._about(self.peak * most) <= usable:
            return True
        return self._against() <= usable

    def _is_over(self, share: float, usable: int) -> bool:
        """Whether this share of the peak is too much; the first stage that is decides."""
        if "peak" in self.__dict__:
            return self._about(self.peak * share) > usable
        if self._about(self.least * share) > usable:
            return True
        highest = 0
        for _, peak in predict_stages(self.model, self.recipe, self.problem.device):
            highest = max(highest, peak)
            if self._about(peak * share) > usable:
                return True
        self.__dict__["peak"] = highest
        return False

    @property
    def is_hopeless(self) -> bool:
        """Whether it does not fit by what is always there, which takes no prediction."""
        usable = self.problem.usable
        if usable is None or self.problem.device.is_cpu:
            return False
        return self._about(self.least * self.ratio.ends[0]) > usable

    @property
    def proved(self) -> bool:
        """Whether it fits by its own replay, not by that of a near candidate.

        What does not is left out from then on.
        """
        usable = self.problem.usable
        if not self.spares_host:
            return False
        if usable is None:
            return True
        if self._against() <= usable and self.ranged.against(tight=self._tight) <= usable:
            return True
        self.ratio.refuted.add(self.recipe)
        return False

    @cached_property
    def on_host(self) -> int:
        """Bytes that wait on all hosts."""
        return shards_on_host(self.recipe, self.model) + waiting_on_host(
            self.model, self.recipe, self.problem.device
        )

    @property
    def spares_host(self) -> bool:
        """Whether what is offloaded is within `limits.host_memory`."""
        limits = self.problem.request.limits
        if limits.host_bytes is None or self.recipe.offload == "none":
            return True
        return find_host_excess(self.recipe, self.on_host, limits) is None

    def _against(self) -> int:
        """What the prediction itself holds against the usable line."""
        return self.needed.against(tight=self._tight)

    def _about(self, reserved: float) -> int:
        """Return the same for these reserved bytes."""
        device, parallel = self.problem.device, self.recipe.parallel
        needed = find_needed(self._spread, round(reserved), device, parallel)
        return needed.against(tight=self._tight)

    def _process(self, peak: int) -> Needed:
        """The band of a run on a CPU."""
        alone = self.recipe.parallel.world == 1
        held = self._held(None if peak == self.__dict__.get("peak") else peak)
        return find_process(peak, self.problem.device, prepared=alone, held=held)

    def _held(self, peak: int | None) -> Held | None:
        """What a heap that keeps freed blocks comes to; about, for another peak than its own."""
        if not keeps_freed(self.recipe.allocator):
            return None
        if peak is not None:
            return Held(peak, 0, min(peak, BELOW) // 2)
        timeless = replace(self.recipe, steps=0, seed=0)
        return hold_run(self.model, timeless, self.problem.device)

    @cached_property
    def peak(self) -> int:
        """The peak of the closed form, without its reasons."""
        return predict_peak(self.model, self.recipe, self.problem.device)

    @property
    def least(self) -> int:
        """Bytes below which `peak` does not lie; counted once for all rows and recomputations."""
        r = self.recipe
        key = r.optimizer, r.parallel, r.offload
        if key not in self.ratio.least:
            self.ratio.least[key] = count_least(self.model, r, self.problem.device)
        return self.ratio.least[key]

    @property
    def exact(self) -> bool:
        """Whether `about` is the prediction itself."""
        return self.estimate is None or "peak" in self.__dict__

    @property
    def about(self) -> int:
        """The peak: the prediction where it was made, else the estimate, within a few per cent."""
        if (replayed := self.__dict__.get("replayed")) is not None:
            return int(replayed.allocated)
        return self._closed_form + self.ratio.blocks

    @property
    def _closed_form(self) -> int:
        return self.peak if self.exact else self._estimated

    @cached_property
    def _estimated(self) -> int:
        assert self.estimate is not None
        r = self.recipe
        update = self.estimate.peak(r.micro_batch, RecomputedBlocks.of(r), r.loss_chunk)
        return max(update, predict_rollout(self.model, r, self.problem.device))

    def may_fit(self, peak: int) -> bool:
        """Whether it would be `likely` with this peak."""
        usable = self.problem.usable
        return usable is None or self._show(peak, tight=self._tight) <= usable

    @property
    def _tight(self) -> bool:
        return self.problem.request.limits.tight

    def note_estimate(self, peak: int) -> None:
        """Take this for the estimate."""
        self.__dict__["_estimated"] = peak

    @property
    def needs(self) -> int:
        """The bytes of the device that `about` comes to, without a band."""
        return self._show(None, tight=True)

    @property
    def needs_at_least(self) -> int:
        """Never more than `needs`, and found without a prediction."""
        return self._show(self.least, tight=True) if self._is_dear else self.needs

    @property
    def _is_dear(self) -> bool:
        """Whether `about` asks for a prediction that is not made yet."""
        known = self.__dict__.keys() & {"peak", "needed"}
        return self.estimate is None and not known and not self.problem.device.is_cpu

    @property
    def likely(self) -> bool:
        """Whether it fits by `about`."""
        usable = self.problem.usable
        if not self.spares_host:
            return False
        if usable is None:
            return True
        if self._is_dear and self._show(self.least, tight=self._tight) > usable:
            return False
        return self.line <= usable

    @property
    def line(self) -> int:
        """Return what is compared with usable memory: the band; with `limits.tight` its middle."""
        return self._show(None, tight=self._tight)

    def _show(self, peak: int | None, *, tight: bool) -> int:
        """The bytes of the device that a peak comes to; None is its own."""
        device, parallel = self.problem.device, self.recipe.parallel
        if device.is_cpu:
            return self._process(self._closed_form if peak is None else peak).against(tight=tight)
        if (known := self.__dict__.get("needed")) is not None:
            return int(known.against(tight=tight))
        slack = replace(SLACK, typical=self.ratio.value, high=self.ratio.value)
        streams = 0 if self._has_tape else find_streams(self.model, self.recipe, device)
        base = self._closed_form if peak is None else peak
        return find_needed(slack, base, device, parallel, streams).against(tight=tight)


@lru_cache(maxsize=64)
def _adapted(model: Model, recipe: Recipe) -> tuple[Model, Totals]:
    """The model as its method stores it, and its sums."""
    adapted = find_adapter(recipe).adapt(model, recipe)
    return adapted, sum_up(adapted)
