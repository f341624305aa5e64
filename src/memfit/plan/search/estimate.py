"""The peak of thousands of recipes from a handful of simulations, for the search.

What a segment adds and how far it rises is affine in the rows of a micro-batch (exactly what it
adds; the rise wherever the same instant stays the highest), so two simulations give every
micro-batch; a block's segments do not depend on how many blocks are recomputed; and of the loss
only its own segments depend on its chunk. The search ranks with this and checks what it chooses
with `predict_memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from msgspec.structs import replace

from memfit.meta.meter import block_size
from memfit.optimizers import find_optimizer
from memfit.optimizers.shared.groups import split_specs
from memfit.parallelism.shards import fullest_rank, local_model
from memfit.plan.memory.predicted_memory import describe, without_shape, worst_batch
from memfit.plan.simulate.blocks import AFTER_PRODUCT
from memfit.plan.simulate.closed_form import find_answers
from memfit.plan.simulate.recompute import RecomputedBlocks
from memfit.plan.simulate.segments import Passes, Segment
from memfit.plan.simulate.setting import Batch, Run, Setting
from memfit.records.hardware import Device
from memfit.records.model import Architecture, Model, TensorSpec, Weight
from memfit.records.recipe import Optimizer, Recipe

TREATED = ("recomputed", "selective", "kept")  # in the order in which blocks stand
CYCLES = 2  # simulated of each treatment: the second stands for all but the first
Line = tuple[float, float, float, float]  # net at 0 rows, a row's; rise at 0 rows, a row's


class Cycle(NamedTuple):
    """Neighbouring segments that repeat together: of a cycle of blocks, or one of no block."""

    name: str  # of its first segment
    segments: tuple[tuple[int | None, Line], ...]  # each with the simulated block that it is of


class Bodies:
    """Forward, loss and backward of a first micro-batch, then of a later one; of each its cycles.

    One object stands for what was drawn, so that it compares at once.
    """

    def __init__(self, lists: Sequence[list[Cycle]]) -> None:
        self.lists = lists


class Alike(NamedTuple):
    """A step whose blocks are treated alike, in bytes; of blocks that keep everything within one
    `saved` of what `Estimate.peak` says.

    The first block's inputs may need no gradient, and the simulated one is the first here alone.
    """

    peak: int
    saved: float  # the most that a block keeps, which is no less than recomputing it leaves out


def applies(model: Model) -> bool:
    """Whether all blocks of a kind have the same weights, and enough of them for every treatment.

    Kinds may differ in what they compute and in their weights (`Architecture.layer_kinds`).
    """
    layers, kind = model.architecture.layers, model.architecture.kind
    blocks: list[list[tuple[tuple[int, ...], str, bool]]] = [[] for _ in range(layers)]
    for w in model.weights:
        if w.layer >= 0:
            blocks[w.layer].append((w.shape, w.dtype, w.trainable))
    firsts = {kind(layer): blocks[layer] for layer in reversed(range(layers))}
    alike = all(rows == firsts[kind(layer)] for layer, rows in enumerate(blocks))
    return alike and layers >= len(TREATED) * CYCLES


def count_least(model: Model, recipe: Recipe, device: Device) -> int:
    """Bytes below which no prediction's peak lies, whatever the micro-batch: what is always there.

    Weights, states and gradients of the rank that is predicted first, as far as all of them are on
    the device at once.
    """
    if recipe.offload == "parameters":
        return 0
    rank = fullest_rank(model, recipe.parallel)[0] if recipe.parallel.world > 1 else 0
    local = local_model(model, recipe.parallel, rank)
    trained = [w for w in local.weights if w.trainable]
    total = sum(spec.nbytes for w in local.weights for spec in w.stored.values())
    if recipe.offload == "optimizer":
        return total
    optimizer = find_optimizer(recipe.optimizer)
    state = optimizer.state if device.is_cpu else optimizer.on_device
    total += sum(s.nbytes for w in trained for s in state(w.spec, recipe.optimizer))
    return total + (0 if recipe.optimizer.in_backward else sum(w.nbytes for w in trained))


def find_kinds(architecture: Architecture) -> tuple[str, ...]:
    """The distinct kinds of blocks, in the order in which they first stand."""
    return tuple(dict.fromkeys(map(architecture.kind, range(architecture.layers))))


class Lines:
    """Pairs of simulations of neighbouring numbers of rows, and the lines through them."""

    def __init__(self, model: Model, recipe: Recipe, device: Device) -> None:
        self.model, self.recipe, self.device = model, recipe, device
        self._loss: dict[int, Bodies] = {}
        self._alike: dict[str, Bodies] = {}
        self._distinct: list[tuple[Weight, int]] | None = None
        self.always: dict[Optimizer, int] = {}  # weights and state, bytes
        self.temporaries: dict[Optimizer, int] = {}  # of an update, bytes

    @cached_property
    def bodies(self) -> Bodies:
        """Forward, loss and backward of the first micro-batch, then of a later one."""
        return self._draw(self.model, 1, TREATED, loss="plain", loss_chunk=0)

    def distinct(self, local: Model) -> list[tuple[Weight, int]]:
        """The weights that differ in more than where they stand, and how often each is there.

        local: as the fullest rank holds the model, the same for all that share these lines.
        """
        if self._distinct is None:
            known: dict[tuple[TensorSpec, bool, str], tuple[Weight, int]] = {}
            for w in local.weights:
                key = (w.spec, w.trainable, w.coding)
                known[key] = known.get(key, (w, 0))[0], known.get(key, (w, 0))[1] + 1
            self._distinct = list(known.values())
        return self._distinct

    def alike(self, way: str) -> Bodies:
        """The same of blocks that are treated one way alone, which takes a third of the time."""
        if way not in self._alike:
            self._alike[way] = self._draw(self.model, 1, (way,), loss="plain", loss_chunk=0)
        return self._alike[way]

    def loss(self, chunk: int) -> Bodies:
        """The same of a model with one block: only its loss and its head's backward are used.

        The line begins where there are two chunks: a single one needs no sum over chunks.
        """
        if chunk not in self._loss:
            model = _with_one_block(self.model)
            low = chunk // self.recipe.sequence_length + 1
            self._loss[chunk] = self._draw(model, low, TREATED, loss="chunked", loss_chunk=chunk)
        return self._loss[chunk]

    def _draw(self, model: Model, low: int, ways: Sequence[str], **knobs: object) -> Bodies:
        """Lines through `low` rows and one more; ways: of treating blocks of the whole model."""
        recipe = replace(self.recipe, accumulation=2, **RecomputedBlocks(0, 0).knobs, **knobs)
        setting = describe(model, recipe, self.device)[0]
        kinds = find_kinds(model.architecture)
        if model is self.model:
            setting = replace(setting, runs=_treat(setting.runs, kinds, ways))
        shape = replace(without_shape(recipe), sequence_length=recipe.sequence_length)
        return _draw(setting, shape, low, len(kinds))


def _with_one_block(model: Model) -> Model:
    """The model with its first block alone: the first that is trained, where nothing else is, as
    under adapters that blocks of one kind have."""
    a, trained = model.architecture, [w.layer for w in model.weights if w.trainable]
    only = min(trained, default=0)
    if only <= 0:
        weights = tuple(w for w in model.weights if w.layer < 1)
        return replace(model, architecture=replace(a, layers=1), weights=weights)
    weights = tuple(
        replace(w, layer=0, name=w.name.replace(f".{only}.", ".0.", 1)) if w.layer == only else w
        for w in model.weights
        if w.layer in (-1, only)
    )
    kinds = (a.kind(only),) if a.layer_kinds else ()
    return replace(model, architecture=replace(a, layers=1, layer_kinds=kinds), weights=weights)


def _treat(runs: tuple[Run, ...], kinds: tuple[str, ...], ways: Sequence[str]) -> tuple[Run, ...]:
    """Cycles of one block of each kind under each treatment, from runs that keep every block."""
    firsts = {block.kind: block for run in reversed(runs) for block in reversed(run.cycle)}
    return tuple(
        Run(
            cycle=tuple(
                replace(firsts[kind], recomputed=way != "kept", selective=way == "selective")
                for kind in kinds
            ),
            count=CYCLES,
        )
        for way in ways
    )


class Estimate:
    """The peak of one method and precision as a function of the exact knobs."""

    def __init__(
        self, model: Model, recipe: Recipe, device: Device, lines: Lines | None = None
    ) -> None:
        self.model, self.recipe, self.device = model, recipe, device
        self.local = local_model(model, recipe.parallel, 0)  # as the fullest rank holds it
        self._kinds = find_kinds(model.architecture)
        self._lines = lines or Lines(model, recipe, device)
        self._offset: Callable[[], int] | None = None

    def anchor(self, predicted: int, micro: int, recompute: RecomputedBlocks, chunk: int) -> None:
        """Shift the estimate to a predicted peak, so that differences from it carry no offset."""

        @cache
        def offset() -> int:
            return predicted - self._raw(micro, recompute, chunk)

        self._offset = offset  # found when it is asked for: mostly nothing is

    def with_optimizer(self, recipe: Recipe) -> Estimate:
        """For a recipe that differs in its optimizer alone, which no segment depends on."""
        other = Estimate(self.model, recipe, self.device, self._lines)
        other._offset = self._offset
        return other

    def _held(self, nbytes: int) -> int:
        return nbytes if self.device.is_cpu else block_size(nbytes)

    @property
    def _always(self) -> int:
        """Weights and optimizer state, bytes."""
        settings, known = self.recipe.optimizer, self._lines.always
        if settings not in known:
            known[settings] = self._count_always(settings)
        return known[settings]

    def _count_always(self, settings: Optimizer) -> int:
        optimizer = find_optimizer(settings)
        state = optimizer.state if self.device.is_cpu else optimizer.on_device
        total = sum(self._held(s.nbytes) for s in optimizer.shared_state(settings))
        for w, times in self._lines.distinct(self.local):
            states = state(w.spec, settings) if w.trainable else ()
            total += times * sum(self._held(s.nbytes) for s in (*w.stored.values(), *states))
        return total

    @cached_property
    def least(self) -> int:
        """What no exact knob can change: weights, state and gradients. A lower bound."""
        return self._always + sum(w.nbytes for w in self.local.weights if w.trainable)

    @property
    def _step_temporaries(self) -> int:
        settings, known = self.recipe.optimizer, self._lines.temporaries
        if settings not in known:
            specs = [w.spec for w in self.local.weights if w.trainable]
            family, groups = find_optimizer(settings), split_specs(specs, settings)
            known[settings] = max(family.step_temporaries(own, one) for own, one in groups)
        return known[settings]

    def peak(self, micro: int, recompute: RecomputedBlocks, chunk: int) -> int:
        """Bytes at the highest instant of a steady step of two or more micro-batches."""
        offset = 0 if self._offset is None else self._offset()
        return self._raw(micro, recompute, chunk) + offset

    def _raw(self, micro: int, recompute: RecomputedBlocks, chunk: int) -> int:
        return self._climb(self._lines.bodies, self._times(recompute), micro, chunk)

    def alike(self, micro: int, chunk: int, way: str = "kept") -> Alike:
        """Nearly the peak where all blocks are treated this way; see `Alike`."""
        lines, count = (
            self._lines.alike(way),
            Counter(map(self.model.architecture.kind, self._layers)),
        )
        times = [min(1, count[kind]) for kind in self._kinds]
        times += [max(0, count[kind] - 1) for kind in self._kinds]
        saved: dict[int, float] = {}
        for cycle in lines.lists[0]:
            for block, (net, row, _, _) in cycle.segments:
                if block is not None:
                    saved[block] = saved.get(block, 0) + net + row * micro
        return Alike(self._climb(lines, times, micro, chunk), max(saved.values()))

    @property
    def _layers(self) -> range:
        return range(self.model.architecture.layers)

    def _climb(self, bodies: Bodies, times: list[int], micro: int, chunk: int) -> int:
        """The highest instant of these blocks, each as often as it stands in the model."""
        r = self.recipe
        several = micro * r.sequence_length > chunk
        losses = self._lines.loss(chunk) if chunk and several else bodies
        level = self._always + 3.0 * 8 * micro * r.sequence_length
        later = micro * r.parallel.dp < r.global_batch
        highest, level = _climb(bodies, losses, tuple(times), micro, level, later)
        return round(max(highest, level + self._step_temporaries))

    def _times(self, recompute: RecomputedBlocks) -> list[int]:
        """Return how often each simulated block stands in the model with this recomputation."""
        layers = self.model.architecture.layers
        found: list[int] = []
        first = 0
        for count in (*recompute, layers - sum(recompute)):
            kinds = Counter(map(self.model.architecture.kind, range(first, first + count)))
            found += [min(1, kinds[kind]) for kind in self._kinds]
            found += [max(0, kinds[kind] - 1) for kind in self._kinds]
            first += count
        return found


@lru_cache(maxsize=1024)  # levers are planned roughly first, then exactly
def _climb(
    bodies: Bodies, losses: Bodies, times: tuple[int, ...], micro: int, level: float, later: bool
) -> tuple[float, float]:
    """The highest level of a step's micro-batches, and the last; losses: whose losses they have.

    later: whether a later micro-batch follows the first, of a value's too.
    """
    highest = level
    passes = [
        [forward, loss, _spliced(backward, head)]
        for (forward, _, backward), (_, loss, head) in zip(
            _in_threes(bodies.lists), _in_threes(losses.lists), strict=True
        )
    ]
    for one in passes if later else passes[::2]:
        for cycles in one:
            for cycle in cycles:
                counted = [
                    (1 if block is None else times[block], net + row * micro, rise + up * micro)
                    for block, (net, row, rise, up) in cycle.segments
                ]
                level, top = _repeat(counted, level)
                highest = max(highest, top)
    return highest, level


def _in_threes(lists: Sequence[list[Cycle]]) -> list[Sequence[list[Cycle]]]:
    """Forward, loss and backward of each pass."""
    return [lists[start : start + 3] for start in range(0, len(lists), 3)]


def _repeat(segments: list[tuple[int, float, float]], level: float) -> tuple[float, float]:
    """The level after these segments and the highest one within, from (times, net, rise) of each.

    All repeat together as often as each of them does; what some repeat more often follows.
    """
    together = min(times for times, _, _ in segments)
    highest = level
    if together:
        start = level
        for _, net, rise in segments:
            highest = max(highest, level + rise)
            level += net
        further = (level - start) * (together - 1)
        highest, level = max(highest, highest + further), level + further
    for times, net, rise in segments:
        if more := times - together:
            highest = max(highest, level + rise, level + net * (more - 1) + rise)
            level += net * more
    return level, highest


@lru_cache(maxsize=1024)
def _block_of(name: str) -> int | None:
    """Which simulated block a stretch is of; None where it is of none."""
    kind, _, index = name.removesuffix(AFTER_PRODUCT).partition(" ")
    return int(index) if kind == "block" else None


@lru_cache(maxsize=64)
def _draw(setting: Setting, recipe: Recipe, low: int, kinds: int) -> Bodies:
    """Lines through `low` rows and one more, of a first and of a later micro-batch.

    recipe: gives the rows' length and their documents. A second length is simulated over unknown
    sizes, and answers for more of them. kinds: how many simulated blocks are a cycle.
    """
    answers = find_answers(setting)

    def batch(rows: int, tokens: int) -> Batch:
        return worst_batch(replace(recipe, micro_batch=rows, sequence_length=tokens))

    one, two = (
        answers.passes(batch(rows, recipe.sequence_length), batch, plain=2)
        for rows in (low, low + 1)
    )
    return Bodies([
        _join([(a.name, _line(a, b, low)) for a, b in zip(at_one, at_two, strict=True)], kinds)
        for passes in zip(one, two, strict=True)
        for at_one, at_two in zip(*map(_lists, passes), strict=True)
    ])  # fmt: skip


def _join(segments: list[tuple[str, Line]], kinds: int) -> list[Cycle]:
    """Neighbouring segments of blocks of one cycle joined."""

    def cycle(segment: tuple[str, Line]) -> str | int:
        block = _block_of(segment[0])
        return segment[0] if block is None else block // kinds

    joined = [list(found) for _, found in groupby(segments, cycle)]
    return [Cycle(one[0][0], tuple((_block_of(n), line) for n, line in one)) for one in joined]


def _lists(passes: Passes) -> tuple[list[Segment], list[Segment], list[Segment]]:
    return passes.forward, passes.loss, passes.backward


def _line(one: Segment, two: Segment, low: int) -> Line:
    """The lines through what a segment adds, and through its rise, at `low` rows and one more."""
    net, rise = sum(one.net.values()), one.rise
    net_row, rise_row = sum(two.net.values()) - net, two.rise - rise
    return net - low * net_row, net_row, rise - low * rise_row, rise_row


def _spliced(backward: list[Cycle], head: list[Cycle]) -> list[Cycle]:
    """A backward whose head's part is that of another loss."""

    def is_head(cycle: Cycle) -> bool:
        return cycle.name.removesuffix(AFTER_PRODUCT) == "head"

    return [c for c in head if is_head(c)] + [c for c in backward if not is_head(c)]
