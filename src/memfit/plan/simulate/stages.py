"""One rank's stages in a simulated step: its pieces in the order of torch's schedule, and the
buffers that it receives into.

As train/distributed/pipeline.py runs torch/distributed/pipelining (2.13): every micro-batch has a
buffer for what its stage receives and one for the gradient, all of them for the whole step; what a
stage sends
on is there until that micro-batch's backward is over, and the gradient that it sent back until the
next one is there (1F1B's variable) or at once (the interleaved schedule's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from memfit import meta
from memfit.families.shared.forward import Embedded, Forward, Weights, positions, rotation
from memfit.meta import Meter, Tensor
from memfit.parallelism.pipeline import blocks_of, stages_of
from memfit.plan.simulate.fsdp_units import Units
from memfit.plan.simulate.program import Program
from memfit.plan.simulate.setting import Inputs, Mark, Setting, Stages
from memfit.plan.step_time.pipeline.orders import Piece, Schedule, find_schedule, orders
from memfit.records.ledger import Kind
from memfit.records.recipe import Recipe

OWNER = "pipeline"  # of the buffers
BEYOND = 2  # micro-batches simulated after those in flight: all later ones are like the last


def held_blocks(recipe: Recipe, layers: int, rank: int) -> list[range]:
    """The blocks of each stage of a rank."""
    parallel = recipe.parallel
    return [blocks_of(layers, parallel.stages, s) for s in stages_of(parallel, rank)]


def find_stages(recipe: Recipe, rank: int, blocks: Sequence[int]) -> Stages:
    """blocks: of each of the rank's stages, as simulated."""
    schedule, place = find_schedule(recipe), recipe.parallel.stage_place(rank)
    if schedule.kind == "1f1b":
        few = min(schedule.micro_batches, schedule.ranks - place + BEYOND)
        schedule = replace(schedule, micro_batches=few)
    return Stages(
        order=_order(schedule, place),
        ranks=recipe.parallel.pp,
        count=recipe.parallel.stages,
        micro_batches=recipe.accumulation,
        blocks=tuple(blocks),
        dtype=recipe.compute_dtype,
    )


def fullest_places(recipe: Recipe, layers: int) -> list[int]:
    """The places along pp among which the fullest is, whatever the shapes.

    The first has the embedding, the last the head; those between run the same operators. Of these
    an earlier one has more micro-batches in flight, so that one with no more blocks, recomputed or
    not, than an earlier one holds less. Ranks of several stages are all named.
    """
    parallel = recipe.parallel
    if parallel.virtual_pp > 1:
        return list(range(parallel.pp))
    full, part = recipe.recompute_blocks, recipe.recompute_blocks + recipe.selective_blocks
    seen: list[tuple[int, ...]] = []
    found = [0]
    for place in range(1, parallel.pp - 1):
        held = blocks_of(layers, parallel.pp, place)
        has = len(held), sum(i >= full for i in held), sum(i >= part for i in held)
        if not any(all(a <= b for a, b in zip(has, other, strict=True)) for other in seen):
            seen.append(has)
            found.append(place)
    return [*found, parallel.pp - 1]


def _order(schedule: Schedule, place: int) -> tuple[Piece, ...]:
    return orders(schedule)[place]


class _Flight(NamedTuple):
    """A micro-batch between its forward through a stage and its backward."""

    entered: Tensor | None  # what was received; None of tokens
    left: Tensor  # what is sent on, or the loss
    boundaries: list[int]


class Simulation(Protocol):
    """What a rank's stages need of the simulation that they are run in."""

    setting: Setting
    meter: Meter
    units: Units | None
    program: Program
    outside: Weights
    marks: list[Mark]

    def mark(self, name: str, owner: str) -> None:
        """Begin a segment."""

    def make_batch(self) -> Inputs:
        """The tensors of a micro-batch."""

    def make_forward(self, inputs: Inputs) -> tuple[Forward, Tensor]:
        """What its forward needs to know, and its labels."""

    def run_blocks(
        self,
        forward: Forward,
        boundaries: list[int],
        blocks: slice,
        entered: Tensor | None,
        last: bool,
    ) -> Tensor:
        """A stage's blocks, and the final norm behind the last stage's."""

    def score_blocks(
        self,
        forward: Forward,
        labels: Tensor,
        blocks: slice,
        entered: Tensor | None,
        last: bool,
        base: bool,
    ) -> Tensor:
        """The same without a gradient; behind the last stage's the rows' log-probabilities."""

    def judge_pairs(self, forward: Forward, inputs: Inputs, hidden: Tensor) -> Tensor:
        """The loss of answers whose reference, if any, is there."""

    def end_stages(self) -> None:
        """What a step of stages still makes when the schedule is over."""

    def product_begins(self) -> None:
        """Note the backward's first product."""

    def watch(self, boundaries: list[int], offset: int) -> Callable[[int], None]:
        """What a backward calls when it has passed a node."""

    def pass_all(self, boundaries: list[int], offset: int) -> None:
        """Begin the segments of the blocks that a backward has not begun."""


def run_stages(simulation: Simulation) -> list[list[Mark]]:
    """The marks of the buffers' birth, of each piece, and of the end."""
    made = _Run(simulation)
    found = [made.begin()]
    for piece in made.stages.order:
        found.append(made.forward(piece) if piece.pass_ == "F" else made.backward(piece))
    return [*found, made.end()]


class _Run:
    """One step of a rank's stages on a meter."""

    def __init__(self, simulation: Simulation) -> None:
        assert simulation.setting.stages is not None
        self.simulation = simulation
        self.stages: Stages = simulation.setting.stages
        self.batches = [simulation.make_batch() for _ in range(self.stages.simulated)]
        self.received: dict[tuple[int, int], Tensor] = {}  # by stage and micro-batch
        self.returned: dict[tuple[int, int], Tensor] = {}  # gradients
        self.others: list[Tensor] = []  # buffers of micro-batches that are not simulated
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.sent: Tensor | None = None
        self.losses: list[Tensor] = []
        self.scored: list[Tensor] = []  # of all micro-batches

    def _chunk(self, stage: int) -> int:
        return stage // self.stages.ranks

    def _is_last(self, stage: int) -> bool:
        return stage == self.stages.count - 1

    def begin(self) -> list[Mark]:
        """Buffers for all micro-batches, as torch allocates them when a schedule begins."""
        simulation, stages = self.simulation, self.stages
        simulation.marks = []
        mine = list(dict.fromkeys(piece.stage for piece in stages.order))
        self._score_before(mine)
        simulation.mark("buffers", OWNER)
        for stage in mine:
            if stage:
                self._buffers(self.received, stage)
        for stage in mine:
            if not self._is_last(stage) and not simulation.setting.evaluates:
                self._buffers(self.returned, stage)
        simulation.mark("end", "")
        return simulation.marks

    def _buffers(self, buffers: dict[tuple[int, int], Tensor], stage: int) -> None:
        for index in range(self.stages.simulated):
            buffers[stage, index] = self._buffer()
        more = self.stages.micro_batches - self.stages.simulated
        if more:
            with self.simulation.meter.standing_for(more):
                self.others.append(self._buffer())

    def _buffer(self) -> Tensor:
        simulation = self.simulation
        rows, tokens = self.batches[0].input_ids.shape
        sharding = simulation.setting.sharding
        assert sharding is not None
        shape = (rows, tokens // sharding.tp, simulation.setting.architecture.hidden)
        return meta.empty(simulation.meter, shape, self.stages.dtype, Kind.TEMPORARY)

    def _score_before(self, mine: Sequence[int]) -> None:
        """What all stages make of micro-batches before any learns; all do the same, and leave
        numbers of rows."""
        setting, meter = self.simulation.setting, self.simulation.meter
        if not (setting.loss.references or setting.loss.mismatches):
            return
        self.simulation.mark("embedding", "embedding")
        inputs = self.batches[0]
        results = [inputs.input_ids.shape[:1]] if setting.loss.references else []
        results += [()] if setting.loss.mismatches else []  # the baseline
        if others := self.stages.micro_batches - 1:
            with meter.standing_for(others):
                self.scored += [meta.empty(meter, shape, "float32") for shape in results]
        found: list[Tensor] = []
        for _ in range(setting.loss.references):  # of the rows, and of as many mismatched ones
            found.append(self._score(inputs, mine, base=True))
        if setting.loss.references:
            self.scored.append(found.pop(0))
        if setting.loss.mismatches:
            found.append(self._score(inputs, mine, base=False))
            self.scored.append(meta.empty(meter, (), "float32"))

    def _score(self, inputs: Inputs, mine: Sequence[int], *, base: bool) -> Tensor:
        """Log-probabilities of a micro-batch's rows, by a schedule of its own."""
        simulation, held = self.simulation, []
        found = meta.empty(simulation.meter, inputs.input_ids.shape[:1], "float32")
        for stage in mine:
            forward, labels = simulation.make_forward(inputs)
            forward = replace(forward, adapter_dropout=False)
            if simulation.units is not None:
                forward = simulation.units.begin(forward)
            entered = self._buffer() if stage else None
            chunk, last = self._chunk(stage), self._is_last(stage)
            start = sum(self.stages.blocks[:chunk])
            blocks = slice(start, start + self.stages.blocks[chunk])
            left = simulation.score_blocks(forward, labels, blocks, entered, last, base)
            if simulation.units is not None:
                simulation.units.end(left)
            held += [left] if entered is None else [entered, left]  # by the schedule
            del entered, left
        if simulation.units is not None:
            simulation.units.let_go()
        return found

    def forward(self, piece: Piece) -> list[Mark]:
        """A micro-batch through a stage."""
        simulation, stage = self.simulation, piece.stage
        meter, units = simulation.meter, simulation.units
        inputs = self.batches[piece.micro_batch]
        forward, labels = simulation.make_forward(inputs)
        simulation.marks = []
        simulation.mark("embedding", "embedding")
        boundaries: list[int] = []
        if units is not None:
            forward = units.begin(forward)
        entered = None
        if stage:
            entered = self.received[stage, piece.micro_batch]
            entered.requires_grad = not simulation.setting.evaluates
        chunk = self._chunk(stage)
        start = sum(self.stages.blocks[:chunk])
        blocks = slice(start, start + self.stages.blocks[chunk])
        with meter.with_autocast(False):
            left = simulation.run_blocks(forward, boundaries, blocks, entered, self._is_last(stage))
            if self._is_last(stage):
                simulation.mark("loss", "loss")
                if simulation.setting.loss.rows:
                    left = simulation.judge_pairs(forward, inputs, left)
                else:
                    left = simulation.program.loss(forward, simulation.outside, left, labels)
        if units is not None:
            units.end(left)
        if self._is_last(stage):
            self.losses.append(left)
        if not simulation.setting.evaluates or not self._is_last(stage):
            self.flights[stage, piece.micro_batch] = _Flight(entered, left, boundaries)
        del left
        simulation.mark("end", "")
        return simulation.marks

    def backward(self, piece: Piece) -> list[Mark]:
        """The gradients of a stage's weights, and of what it received."""
        simulation, stage = self.simulation, piece.stage
        meter = simulation.meter
        flight = self.flights.pop((stage, piece.micro_batch))
        simulation.marks = []
        simulation.mark("head", "loss" if self._is_last(stage) else "blocks")
        meter.on_product = simulation.product_begins
        offset = sum(self.stages.blocks[: self._chunk(stage)])
        with meter.with_autocast(False):
            meta.backward(
                flight.left,
                simulation.watch(flight.boundaries, offset),
                self.returned.get((stage, piece.micro_batch)),
            )
        simulation.pass_all(flight.boundaries, offset)
        if simulation.units is not None:
            simulation.units.finish(simulation.mark)
        gradient = None if flight.entered is None else flight.entered.grad
        if gradient is not None and flight.entered is not None:
            meter.kinds[gradient.storage.index] = Kind.TEMPORARY
            flight.entered.grad = None
        flight.left.grad_fn = None
        self.sent = gradient if len(self.stages.blocks) == 1 else None
        del gradient, flight
        simulation.mark("end", "")
        return simulation.marks

    def end(self) -> list[Mark]:
        """The schedule is over, and its buffers with it."""
        simulation = self.simulation
        simulation.marks = []
        simulation.mark("buffers", OWNER)
        while self.received:
            self.received.popitem()[1].accumulator = None  # the two know each other
        self.returned.clear()
        self.others.clear()
        self.flights.clear()
        self.sent = None
        self.scored.clear()
        simulation.end_stages()
        simulation.mark("end", "")
        return simulation.marks


def begin_stage(forward: Forward, entered: Tensor) -> Embedded:
    """What a stage makes that receives: as `Decoder.embed`, without token embeddings."""
    position_ids = positions(forward)
    cosines, sines = rotation(forward, entered.dtype, position_ids)
    return Embedded(entered, (cosines, sines, position_ids), (entered,))
