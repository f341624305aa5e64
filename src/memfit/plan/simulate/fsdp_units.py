"""The units of FSDP2 in a simulated step: the same as `parallelism.shard` makes of the module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from memfit import meta
from memfit.adapters.shared.peft_layers import base_name
from memfit.families import find_family, read_model
from memfit.families.shared.forward import Forward, Weights
from memfit.meta import Meter, Tensor
from memfit.meta.distributed.flat import FlatUnit
from memfit.meta.distributed.sharding import Dealt, OnReduced, Sharding, Shared, Unit
from memfit.parallelism.experts import is_expert
from memfit.parallelism.pipeline import owner_of
from memfit.parallelism.shards import shard_index
from memfit.parallelism.tensor import cut_dim
from memfit.records.model import DTYPE_BYTES, Model, Weight
from memfit.records.recipe import Recipe

SCORE = "score.weight"
ENDS = ("norm", "head")  # parts of the unit that holds both, in memfit's own step
Mark = Callable[[str, str], None]
Named = tuple[str, tuple[int, ...], str, bool, str]  # name, shape, dtype, trainable, part


def find_sharding(recipe: Recipe, rank: int) -> Sharding | None:
    """How this rank holds the model; None on one device."""
    parallel = recipe.parallel
    if parallel.world == 1:
        return None
    mixed = recipe.precision == "bf16-mixed"
    return Sharding(
        shards=parallel.shards,
        shard=shard_index(parallel, rank),
        copies=parallel.dp_replicate,
        reshards=parallel.reshard_after_forward,
        low="bfloat16" if mixed else "",
        wide="float32" if mixed else "",
        tp=parallel.tp,
        coding=recipe.coding,
        on_host=recipe.offload == "parameters",
        dealt=_find_dealt(recipe, rank) if parallel.ep > 1 else None,
    )


def _find_dealt(recipe: Recipe, rank: int) -> Dealt:
    parallel = recipe.parallel
    place = rank % parallel.dp_shard // parallel.ep
    return Dealt(
        ranks=parallel.ep, imbalance=parallel.received,
        parts=parallel.expert_shards, part=place,
    )  # fmt: skip


class Units:
    """The units of one simulated model, in the order in which torch finds them."""

    def __init__(self, meter: Meter, sharding: Sharding, on_reduced: OnReduced | None) -> None:
        self.shared = Shared(meter, sharding, on_reduced)
        self._make = FlatUnit if sharding.flat else Unit
        self.root: Unit | None = None  # what no other unit holds
        self.embedding: Unit | None = None
        self.tail: Unit | None = None  # final norm and head
        self.blocks: list[Unit] = []
        self.experts: dict[int, Unit] = {}  # that are dealt to ranks, by block
        self._joined = False  # whether the root's unit is the head's, too, as accelerate ties them

    def outside(self, rows: Iterable[Named], owner: Callable[[str], str], *, tied: bool) -> Weights:
        """The weights outside the blocks: of a tied head, and of FSDP1, all are the root's unit.

        accelerate's unit of a tied head has its final norm and embedding: as whole, and as long.
        """
        made: Weights = {}
        rows = list(rows)
        token = next((row[0] for row in rows if row[4] == "embedding"), "")
        apart = self.shared.sharding.ends
        self._joined = tied and self.shared.sharding.joins
        tied = tied or self.shared.sharding.flat
        rest = [r for r in rows if tied or (r[4] not in apart and r[0] != token)]
        if rest:
            self.root = self._make(self.shared, owner(rest[0][4]), reshards=False)
            made |= fill(self.root, rest)
        ends = [r for r in rows if r[4] in apart]
        if not tied and token:  # of stages, only the first has it, and the last the ends
            reshards = self.shared.sharding.reshards
            self.embedding = self._make(self.shared, "embedding", reshards=reshards)
            made |= fill(self.embedding, (r for r in rows if r[0] == token))
        if not tied and ends:
            self.tail = self._make(self.shared, "head", reshards=False)
            made |= fill(self.tail, ends)
        return made

    def defer(self, *, first_of_many: bool) -> None:
        """Whether the next micro-batch's gradients wait, unsharded, for those of the last."""
        self.shared.syncs = not (first_of_many and self.shared.sharding.defers)

    def block(self, rows: Iterable[Named]) -> Weights:
        """The weights of one more block."""
        sharding, rows = self.shared.sharding, list(rows)
        unit = self._make(self.shared, "blocks", reshards=sharding.reshards)
        self.blocks.append(unit)
        routed = [row for row in rows if sharding.dealt is not None and is_expert(row[0])]
        made = fill(unit, (row for row in rows if row not in routed))
        if routed:
            inner = Unit(self.shared, "blocks", reshards=sharding.reshards, inner=True)
            self.experts[len(self.blocks) - 1] = inner
            made |= fill(inner, routed)
        return {row[0]: made[row[0]] for row in rows}

    def begin(self, forward: Forward) -> Forward:
        """The root's forward begins; what the model's own code must know of units."""
        if self.root is not None:
            self.root.gather()
        tail = self.root if self._joined else self.tail
        return replace(forward, embeds=self.embedding, tail=tail)

    def end(self, loss: Tensor) -> None:
        """The root's forward ends with the loss, and with it that of a head which never ran."""
        for unit in (self.root, self.tail):
            if unit is not None and unit.entered:
                unit.leave(loss)
        self.shared.end_forward()

    def let_go(self) -> None:
        """Free what is gathered after a forward without a backward, as `parallelism.let_go`."""
        for unit in self.shared.units:
            unit.give_up()

    def finish(self, mark: Mark) -> None:
        """The whole backward is over: every unit in turn."""
        mark("embedding", "embedding")
        for unit in (self.root, self.embedding):
            if unit is not None:
                unit.finish()
        for index, unit in enumerate(self.blocks):
            mark(f"block {index}", "blocks")
            unit.finish()
            if index in self.experts:
                self.experts[index].finish()
        mark("tail", "head")
        if self.tail is not None:
            self.tail.finish()
        self.shared.end_backward()

    def enter(self, unit: Unit | None, x: Tensor) -> Tensor:
        """Before the forward of a unit with a gradient's input."""
        return x if unit is None or self.shared.sharding.reads else unit.enter(x)

    def lowered(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return a block's inputs, cast as FSDP2 casts the inputs of its units."""
        low = "" if self.shared.sharding.flat else self.shared.sharding.low
        floating = ("float32", "float16", "float64")
        return tuple(meta.cast(t, low) if low and t.dtype in floating else t for t in tensors)


def fill(unit: Unit, rows: Iterable[Named]) -> Weights:
    """These weights, of this unit."""
    shared = unit.shared.sharding.tp > 1
    return {
        name: unit.add(
            shape,
            dtype,
            trainable=trainable,
            summed=shared and cut_dim(name) is None and name != SCORE,  # which all make alike
        )
        for name, shape, dtype, trainable, _ in rows
    }


def gradient_bytes(model: Model, sharding: Sharding) -> list[int]:
    """Bytes of each unit's reduced gradients, which are one buffer; model: as tp and ep ranks cut
    it."""
    tied = model.architecture.tied_embeddings
    token = next((w.name for w in model.weights if w.part == "embedding"), "")
    units: dict[str, int] = {}
    for w in model.weights:
        if not w.trainable:
            continue
        unit_name = f"block {w.layer}" if w.layer >= 0 else "root"
        if w.layer < 0 and not tied and (w.part in ENDS or w.name == token):
            unit_name = "tail" if w.part in ENDS else "embedding"
        own = sharding
        if sharding.dealt is not None and is_expert(w.name):
            unit_name, own = f"experts {w.layer}", sharding.of_experts
        nbytes = own.padded(w.shape) * DTYPE_BYTES[w.dtype]
        units[unit_name] = units.get(unit_name, 0) + nbytes
    return list(units.values())


class Turn(NamedTuple):
    """What is whole at once while random numbers are drawn: a block, or a module outside them."""

    of_block: bool
    dense: list[int]  # bytes of each tensor
    quantised: list[Weight]  # made one after the other, beside those


def drawing_turns(model: Model, recipe: Recipe, rank: int) -> list[Turn]:
    """The turns in which random weights are drawn (train/model/weights.py, `fill_weights`): each
    rank draws those of one process, and keeps its own rows; a tied head has a turn, too. None on
    one device, nor where weights are read.

    model: after its adapter, before any cut. Another stage's weight is dense where it is drawn.
    """
    parallel, a = recipe.parallel, model.architecture
    if recipe.weights != "random" or parallel.world == 1:
        return []
    place, drawn = parallel.stage_place(rank), find_family(a.family).drawn(a)
    names = {weight.name for weight in read_model(recipe.model).weights}
    base = [weight for weight in model.weights if base_name(weight.name) in names]
    groups = [[*group] for _, group in groupby(base, _find_module)]
    if a.tied_embeddings:
        groups.append([weight for weight in base if weight.name == base[0].name])
    turns = []
    for group in groups:
        turn = Turn(group[0].layer >= 0, [], [])
        if turn.of_block and drawn:
            turn.dense.append(drawn)
        for weight in group:
            here = parallel.pp == 1 or owner_of(weight, a.layers, parallel) == place
            if weight.coding and here:
                turn.quantised.append(weight)
            else:
                turn.dense.append(prod(weight.shape) * DTYPE_BYTES[weight.dtype])
        turns.append(turn)
    return turns


def _find_module(weight: Weight) -> int | str:
    """The block of a weight, or its module outside the blocks."""
    return weight.layer if weight.layer >= 0 else weight.name.rpartition(".")[0]
