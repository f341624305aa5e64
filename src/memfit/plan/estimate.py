"""The peak of thousands of recipes from a handful of simulations, for the search.

What a segment adds and how far it rises is affine in the rows of a micro-batch (exactly what it
adds; the rise wherever the same instant stays the highest), so two simulations give every
micro-batch; a block's segments do not depend on how many blocks are recomputed; and of the loss
only its own segments depend on its chunk. The search ranks with this and checks what it chooses
with `predict_memory`.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from memfit.hardware import Device
from memfit.model import Model
from memfit.optimizers import find_optimizer
from memfit.plan.blocks import AFTER_PRODUCT, Passes, Segment, simulate
from memfit.plan.memory import describe
from memfit.recipe import Recipe
from memfit.sizes.meter import block_size

KINDS = 2  # blocks simulated of those that are alike: the first, which stands for all, and the last
Line = tuple[float, float, float, float]  # net at 0 rows, a row's; rise at 0 rows, a row's
Stretch = tuple[str, Line]  # a segment's name and its two lines


def applies(model: Model) -> bool:
    """Whether the blocks are alike and enough of them for both kinds to be seen whole."""
    layers = model.architecture.layers
    blocks: list[list[tuple[tuple[int, ...], str, bool]]] = [[] for _ in range(layers)]
    for w in model.weights:
        if w.layer >= 0:
            blocks[w.layer].append((w.shape, w.dtype, w.trainable))
    return layers >= 2 * KINDS and all(rows == blocks[0] for rows in blocks)


class Lines:
    """Two simulations, and the lines through them, for one range of rows."""

    def __init__(self, model: Model, recipe: Recipe, device: Device, rows: tuple[int, int]) -> None:
        self.model, self.recipe, self.device, self.rows = model, recipe, device, rows
        self._loss: dict[int, tuple[list[Stretch], ...]] = {}

    @cached_property
    def bodies(self) -> tuple[list[Stretch], ...]:
        """Forward, loss and backward of the first micro-batch, then of a later one."""
        half = self.model.architecture.layers // 2
        return self._draw(self.model, recompute_blocks=half, loss="plain", loss_chunk=0)

    def loss(self, chunk: int) -> tuple[list[Stretch], ...]:
        """The same of a model with one block: only its loss and its head's backward are used."""
        if not chunk:
            return self.bodies
        if chunk not in self._loss:
            architecture = msgspec.structs.replace(self.model.architecture, layers=1)
            weights = tuple(w for w in self.model.weights if w.layer < 1)
            model = msgspec.structs.replace(self.model, architecture=architecture, weights=weights)
            kind = "chunked" if chunk else "plain"
            self._loss[chunk] = self._draw(model, recompute_blocks=0, loss=kind, loss_chunk=chunk)
        return self._loss[chunk]

    def _draw(self, model: Model, **knobs: object) -> tuple[list[Stretch], ...]:
        recipe = msgspec.structs.replace(self.recipe, accumulation=2, **knobs)
        low, high = self.rows
        pair = []
        for rows in self.rows if high > low else (low,):
            one = msgspec.structs.replace(recipe, micro_batch=rows)
            setting = describe(model, one, self.device)[0]
            runs = tuple(
                msgspec.structs.replace(r, count=min(r.count, KINDS)) for r in setting.runs
            )
            first, later = simulate(msgspec.structs.replace(setting, runs=runs))
            pair.append((*_lists(first), *_lists(later or first)))
        return tuple(
            [(a.name, _line(a, b, low, high)) for a, b in zip(at_low, at_high, strict=True)]
            for at_low, at_high in zip(pair[0], pair[-1], strict=True)
        )


class Estimate:
    """The peak of one method and precision as a function of the exact knobs."""

    def __init__(self, model: Model, recipe: Recipe, device: Device) -> None:
        self.model, self.recipe, self.device = model, recipe, device
        self.layers = model.architecture.layers
        # With packed rows a second row adds a copy of its own: one row stands for itself alone.
        self._one = Lines(model, recipe, device, (1, 1) if recipe.packing else (1, 2))
        self._more = Lines(model, recipe, device, (2, 3)) if recipe.packing else self._one

    def with_optimizer(self, recipe: Recipe) -> Estimate:
        """For a recipe that differs in its optimizer alone, which no segment depends on."""
        other = Estimate(self.model, recipe, self.device)
        other._one, other._more = self._one, self._more
        return other

    def _held(self, nbytes: int) -> int:
        return nbytes if self.device.is_cpu else block_size(nbytes)

    @cached_property
    def _always(self) -> int:
        """Weights and optimizer state, bytes."""
        settings = self.recipe.optimizer
        optimizer = find_optimizer(settings)
        known: dict[tuple[tuple[int, ...], str, bool], int] = {}
        total = 0
        for w in self.model.weights:
            key = (w.shape, w.dtype, w.trainable)
            if key not in known:
                states = optimizer.state(w.spec, settings) if w.trainable else ()
                known[key] = sum(self._held(s.nbytes) for s in (w.spec, *states))
            total += known[key]
        return total

    @cached_property
    def least(self) -> int:
        """What no exact knob can change: weights, state and gradients. A lower bound."""
        return self._always + sum(w.nbytes for w in self.model.weights if w.trainable)

    @cached_property
    def _step_temporaries(self) -> int:
        settings = self.recipe.optimizer
        specs = [w.spec for w in self.model.weights if w.trainable]
        return find_optimizer(settings).step_temporaries(specs, settings)

    def peak(self, micro: int, blocks: int, chunk: int) -> int:
        """Bytes at the highest instant of a steady step of two or more micro-batches."""
        level = self._always + 3.0 * 8 * micro * self.recipe.sequence_length
        highest = level
        lines = self._one if micro == 1 else self._more
        forward, _, backward, forward2, _, backward2 = lines.bodies
        _, loss, head, _, loss2, head2 = lines.loss(chunk)
        passes = [[forward, loss, _spliced(backward, head)]]
        if micro < self.recipe.global_batch:
            passes.append([forward2, loss2, _spliced(backward2, head2)])
        for one in passes:
            for stretches in one:
                for name, (net, net_row, rise, rise_row) in stretches:
                    times = self._times(name, blocks)
                    if not times:
                        continue
                    step, up = net + net_row * micro, rise + rise_row * micro
                    highest = max(highest, level + up, level + step * (times - 1) + up)
                    level += step * times
        return round(max(highest, level + self._step_temporaries))

    def _times(self, name: str, blocks: int) -> int:
        """How often a simulated block stands in the model when that many are recomputed."""
        kind, _, index = name.removesuffix(AFTER_PRODUCT).partition(" ")
        if kind != "block":
            return 1
        count = blocks if int(index) < KINDS else self.layers - blocks
        return max(0, count - 1) if int(index) % KINDS == 0 else min(1, count)


def _lists(passes: Passes) -> tuple[list[Segment], list[Segment], list[Segment]]:
    return passes.forward, passes.loss, passes.backward


def _line(a: Segment, b: Segment, low: int, high: int) -> Line:
    """The lines through what a segment adds, and through its rise, at two numbers of rows."""
    net_a, net_b = sum(a.net.values()), sum(b.net.values())
    step = max(1, high - low)
    net_row, rise_row = (net_b - net_a) / step, (b.rise - a.rise) / step
    return net_a - net_row * low, net_row, a.rise - rise_row * low, rise_row


def _spliced(backward: list[Stretch], head: list[Stretch]) -> list[Stretch]:
    """A backward whose head's part is that of another loss."""

    def is_head(stretch: Stretch) -> bool:
        return stretch[0].removesuffix(AFTER_PRODUCT) == "head"

    return [s for s in head if is_head(s)] + [s for s in backward if not is_head(s)]
