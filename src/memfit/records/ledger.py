"""Bytes: kind x phase x owner x because. One type for predicted, certified and measured.

A ledger holds, for each instant (phase), what is alive at that phase's own peak. A peak is the
maximum over instants; entries of different phases are never added.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from memfit.records import Record


class Kind(StrEnum):
    """What the bytes are, in torch's own words."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    KV_CACHE = "kv_cache"  # keys, values and states of rows in flight
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    TEMPORARY = "temporary"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    INPUT = "input"
    WORKSPACE = "workspace"
    FRAGMENTATION = "fragmentation"
    CONTEXT = "context"


class Phase(StrEnum):
    """Named instants of a run, in the order in which they first happen."""

    LOAD = "load"
    PREFILL = "prefill"  # of reinforcement learning: prompts are read
    DECODE = "decode"  # and answers sampled
    REWARD = "reward"  # a score of each answer, where an adapter of the base makes it
    SCORE = "score"  # log-probabilities under the policy that sampled
    REFERENCE = "reference"  # and under the reference
    VALUES = "values"  # a value of each token, where one is learned
    FIRST_STEP = "first_step"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    ACCUMULATE = "accumulate"
    OPTIMIZER_STEP = "optimizer_step"
    EVALUATE = "evaluate"
    SAVE = "save"
    GENERATE = "generate"  # a process of its own, after training


# of reinforcement learning, before the update of each iteration
ROLLOUT = (
    Phase.PREFILL, Phase.DECODE, Phase.REWARD, Phase.SCORE, Phase.REFERENCE, Phase.VALUES,
)  # fmt: skip


class Entry(Record, frozen=True, kw_only=True):
    """Bytes of one kind, alive at the peak of one phase, and why."""

    kind: Kind
    phase: Phase
    owner: str  # a component: embedding, blocks, head, optimizer, batch, …
    nbytes: int
    because: str


class Ledger(Record, frozen=True, kw_only=True):
    """All entries of one source (a prediction, a certificate or a measurement)."""

    entries: tuple[Entry, ...]

    def at(self, phase: Phase) -> tuple[Entry, ...]:
        """What is alive at that phase's peak."""
        return tuple(e for e in self.entries if e.phase == phase)

    def total(self, phase: Phase) -> int:
        """Bytes at that phase's peak; 0 for a phase the ledger does not hold."""
        return sum(e.nbytes for e in self.entries if e.phase == phase)

    def live(self, phase: Phase) -> int:
        """Of them, those that hold a tensor."""
        return sum(e.nbytes for e in self.at(phase) if e.kind != Kind.FRAGMENTATION)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases held, in the order of `Phase`."""
        held = {e.phase for e in self.entries}
        return tuple(p for p in Phase if p in held)

    @property
    def peak_phase(self) -> Phase:
        """The phase whose peak is the largest; the earliest one when two are equal."""
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """Bytes at the largest instant."""
        return self.total(self.peak_phase)

    def by_kind(self, phase: Phase) -> dict[Kind, int]:
        """Bytes by kind at that phase's peak, in the order of `Kind`, zeros left out."""
        return sum_by_kind(self.at(phase))


def sum_by_kind(entries: Iterable[Entry]) -> dict[Kind, int]:
    """Bytes by kind, in the order of `Kind`, zeros left out."""
    sums = dict.fromkeys(Kind, 0)
    for entry in entries:
        sums[entry.kind] += entry.nbytes
    return {kind: n for kind, n in sums.items() if n}
