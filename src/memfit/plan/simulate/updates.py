"""What lies around the micro-batches of a step: loaded weights, clipping, the optimizer's update.

None of it depends on the shape of a micro-batch, so it is summed once for a model and an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from memfit.adapters.shared.peft_layers import base_name
from memfit.adapters.shared.reference_copy import REFERENCE, copied_rows
from memfit.adapters.shared.stored import stored_names
from memfit.adapters.shared.value_model import VALUE
from memfit.families import find_family, read_model
from memfit.families.weight_files.headers import UNKNOWN, read_widths
from memfit.families.weight_files.names import file_parts, find_parts
from memfit.meta.layers.quantised import quantising_bytes
from memfit.meta.meter import block_size
from memfit.meta.workspace import foreach_norm
from memfit.optimizers import Counted, find_optimizer
from memfit.optimizers.shared.gathered import find_gathers
from memfit.optimizers.shared.groups import in_order, split_specs
from memfit.optimizers.shared.offloaded import stays
from memfit.parallelism.experts import is_expert
from memfit.parallelism.pipeline import stage_model
from memfit.parallelism.shards import cut_model, local_model
from memfit.plan.simulate.blocks import ROUNDING, Part, Parts, owner_of
from memfit.plan.simulate.fsdp_units import drawing_turns, find_sharding, gradient_bytes
from memfit.plan.simulate.segments import Segment
from memfit.records.hardware import Device
from memfit.records.ledger import Kind
from memfit.records.model import DTYPE_BYTES, Model, TensorSpec, Weight
from memfit.records.recipe import Optimizer, Recipe

TEMPORARY: Part = (Kind.TEMPORARY, "optimizer")


class Around(NamedTuple):
    """What is alive before the first micro-batch, and what follows the last."""

    loaded: Parts
    padded: Parts  # the same from the first forward on: FSDP2 pads its shards then
    filling: tuple[Parts, ...]  # while a weight is drawn or quantised, beside all that is loaded
    reading: Parts  # the largest tensor of a file on a CPU, beside all that is loaded
    first: Segment  # clipping and the update that makes the optimizer's state
    later: Segment  # the same of every later step
    rounded: int  # what the blocks of all gradients are larger


def around_micro_batches(model: Model, recipe: Recipe, device: Device, rank: int = 0) -> Around:
    """See `Around`; raises InvalidRequest when the optimizer has no such implementation."""
    made = _Around(model, recipe, device, rank)
    loaded = padded = made.load(made.model)
    if recipe.parallel.world > 1:
        first = rank - rank % (recipe.parallel.world // recipe.parallel.pp)
        padded = made.load(local_model(model, recipe.parallel, first))
    return Around(
        loaded, padded, made.fill(rank), made.read(), made.first(), made.later(), made.rounded()
    )


class _Line:
    """Consecutive instants, of which the highest counts (the first of equal ones)."""

    def __init__(self) -> None:
        self.net: Parts = {}
        self.rise = 0
        self.top: Parts = {}

    def note(self, parts: Parts) -> None:
        """An instant at which these are alive too."""
        here = _sum(self.net, parts)
        rise = sum(n for part, n in here.items() if part != ROUNDING)
        if rise > self.rise:
            self.rise, self.top = rise, here

    def add(self, parts: Parts) -> None:
        self.net = _sum(self.net, parts)

    def close(self, name: str) -> Segment:
        return Segment(name, self.net, self.rise, self.top)


def _sum(a: Parts, b: Parts) -> Parts:
    return {part: a.get(part, 0) + b.get(part, 0) for part in (*a, *(p for p in b if p not in a))}


class _Around:
    """Sums over the weights of one model."""

    def __init__(self, model: Model, recipe: Recipe, device: Device, rank: int) -> None:
        self.whole_model, self.model = model, local_model(model, recipe.parallel, rank)
        self.staged = stage_model(model, recipe.parallel, rank)
        self.whole = cut_model(self.staged, recipe.parallel)
        self.recipe = recipe
        self.device = device
        self.sharding = find_sharding(recipe, rank)
        self.trainable = in_order(self._trained(rank), recipe.optimizer)
        self.on_host = self.sharding is not None and self.sharding.on_host  # all but buffers
        self.shared = False  # whether the states' shared tensors are counted already

    def _trained(self, rank: int) -> Iterator[TensorSpec]:
        """What this rank updates, with what it gathers where its optimizer does."""
        recipe, held = self.recipe, self.sharding
        own = [w.spec for w in self.model.weights if w.trainable]
        if held is None or not find_optimizer(recipe.optimizer).gathers:
            yield from own
            return
        models = self.whole, self.staged
        parts, wholes = ([w.shape for w in m.weights if w.trainable] for m in models)
        for spec, part, whole in zip(own, parts, wholes, strict=True):
            if len(whole) == 2:
                gathers = find_gathers(spec.shape, part, whole, held.shards)
                spec = replace(spec, whole=whole, gathers=gathers)
            yield spec

    def load(self, model: Model) -> Parts:
        """Parameters and buffers."""
        nbytes: dict[str, list[int]] = {}
        for weight in () if self.on_host else model.weights:
            held = nbytes.setdefault(VALUE if weight.of_value else owner_of(weight.part), [])
            held += [spec.nbytes for spec in weight.stored.values()]
        a = self.model.architecture
        nbytes["rotary"] = [spec.nbytes for spec in find_family(a.family).buffers(a)]
        if self.recipe.copies_reference:
            nbytes[REFERENCE] = [w.nbytes for w in copied_rows(model)]
        parts: Parts = {}
        for owner, sizes in nbytes.items():
            parts = _sum(parts, hold((Kind.PARAMETERS, owner), sizes, self.device))
        return parts

    def fill(self, rank: int) -> tuple[Parts, ...]:
        """What drawing whole weights holds, and making each size of a quantised weight beside the
        others of its block; see train/model/quantised.py."""
        if self.on_host:
            return ()
        turns = drawing_turns(self.whole_model, self.recipe, rank)
        drawn, beside = (
            hold((Kind.TEMPORARY, "model"), max(sizes, key=sum, default=[]), self.device)
            for sizes in ([t.dense for t in turns], [t.dense for t in turns if t.of_block])
        )
        return (drawn, *(_sum(beside, made) for made in self._quantise()))

    def _quantise(self) -> tuple[Parts, ...]:
        quantised = [w for w in self.whole.weights if w.coding]
        sizes = dict.fromkeys((w.shape, w.dtype) for w in quantised)
        part, coding = (Kind.TEMPORARY, "model"), self.recipe.coding
        return tuple(
            hold(part, tensors, self.device)
            for shape, dtype in sizes
            for tensors in quantising_bytes(coding, shape, dtype, cut=self.sharding is not None)
        )

    def read(self) -> Parts:
        """The largest tensor of the weights' files, and the dense weight that it fills; of random
        weights the largest that is drawn beside them.

        On a GPU files are read on the host. `train.weights.EmptyWeights` is the same of a trace.
        """
        recipe, a = self.recipe, self.model.architecture
        drawn = find_family(a.family).drawn(a) if recipe.weights == "random" else 0
        if not self.device.is_cpu:
            return hold((Kind.TEMPORARY, "model"), [drawn], self.device) if drawn else {}
        of_reward = stored_names(self.model).values() if recipe.scored_by_adapter else ()
        judging = [prod(shape) * DTYPE_BYTES[UNKNOWN] for _, shape in of_reward]
        judging += [drawn] if drawn else []
        if recipe.weights != "pretrained":
            return {(Kind.TEMPORARY, "model"): max(judging)} if judging else {}
        widths, plain = read_widths(recipe.model.source), read_model(recipe.model)
        prefix, family = plain.weights[0].name.partition(".")[0], plain.architecture.family
        names = {w.name for w in plain.weights}
        largest = [0, *judging]
        for weight in self.staged.weights:  # a shard is a view of the file's whole tensor
            name, shape = base_name(weight.name), weight.shape
            if name not in names:
                continue  # of an adapter
            parts = find_parts(name, shape, prefix, widths.__contains__)
            for part in parts or file_parts(name, shape, family):
                each = part.reading(widths.get(part.name, DTYPE_BYTES[UNKNOWN]))
                dense = prod(shape) * DTYPE_BYTES[weight.dtype] if weight.coding else 0
                largest.append(each + dense)
        return {(Kind.TEMPORARY, "model"): max(largest)}

    def first(self) -> Segment:
        """The step that makes the optimizer's state: before all updates, or each with its own."""
        settings = self.recipe.optimizer
        line = _Line()
        if settings.in_backward:
            return line.close("first update")  # all was updated within backward
        self._clip(line)
        together = settings.implementation not in find_optimizer(settings).state_while_updating
        for specs, own in split_specs(self.trainable, settings):
            for each in [specs] if together else [[spec] for spec in specs]:
                line.add(self._state(each))
                line.note(self._update(each, own))
        return line.close("first update")

    def later(self) -> Segment:
        """A step that finds the state."""
        line = _Line()
        if not self.recipe.optimizer.in_backward:
            self._clip(line)
            for specs, own in split_specs(self.trainable, self.recipe.optimizer):
                line.note(self._update(specs, own))
        return line.close("update")

    def rounded(self) -> int:
        """What the gradients' blocks are larger."""
        none = self.device.is_cpu or self.recipe.optimizer.in_backward or self.on_host
        sizes = [] if none else [s.nbytes for s in self.trainable]
        if sizes and self.sharding is not None:  # one buffer a unit
            sizes = gradient_bytes(self.whole, self.sharding)
        return sum(block_size(n) - n for n in sizes)

    def _state(self, specs: Iterable[TensorSpec]) -> Parts:
        settings = self.recipe.optimizer
        optimizer = find_optimizer(settings)
        held = optimizer.state if self.device.is_cpu else optimizer.on_device
        nbytes: list[int] = []
        for spec in specs:
            if not stays(self.recipe, spec.numel):
                continue  # on the host
            if not self.shared and optimizer.shares(spec, settings):
                self.shared = True
                nbytes += [s.nbytes for s in optimizer.shared_state(settings)]
            nbytes += [s.nbytes for s in held(spec, settings)]
        return hold((Kind.OPTIMIZER_STATE, "optimizer"), nbytes, self.device)

    def _clip(self, line: _Line) -> None:
        if not self.recipe.optimizer.clip_norm or self.on_host:
            return
        scalar = DTYPE_BYTES[self.recipe.trainable_dtype]
        for number, (own, axes) in enumerate(self._meshes()):
            count = len(own)
            each = [scalar] * count
            norms = hold(TEMPORARY, each, self.device)
            if not self.device.is_cpu:
                norms[Kind.WORKSPACE, "optimizer"] = foreach_norm([w.numel for w in own])
            line.note(norms)
            if not axes:
                line.note(hold(TEMPORARY, [*each, scalar * count, scalar], self.device))
            else:  # the ranks' norms are squared, summed and their root taken, all of them at once
                all_at_once = [scalar * count] * (3 + axes)
                line.note(hold(TEMPORARY, [*each, *all_at_once], self.device))
            if not number:
                line.add({TEMPORARY: scalar})  # the norm, held until the step has returned it

    def _meshes(self) -> Iterator[tuple[list[Weight], int]]:
        """What is trained, by the mesh that it lies on, and along how many axes norms differ."""
        held, trained = self.sharding, [w for w in self.model.weights if w.trainable]
        axes = 0 if held is None else (held.shards > 1) + (held.tp > 1)
        if held is None or held.dealt is None:
            yield trained, axes
            return
        routed = [w for w in trained if is_expert(w.name)]
        yield [w for w in trained if w not in routed], axes
        if routed:
            yield routed, (held.dealt.parts > 1) + 1

    def _update(self, specs: Sequence[TensorSpec], settings: Optimizer) -> Parts:
        if self.on_host:
            return {}
        family = find_optimizer(settings)
        counted: Counted = "live" if self.device.is_cpu else "device"
        copies = {TEMPORARY: family.step_temporaries(specs, settings, counted)}
        if not self.device.is_cpu:
            blocks = family.step_temporaries(specs, settings, "blocks")
            copies[ROUNDING] = blocks - copies[TEMPORARY]
        return copies


def hold(part: Part, nbytes: Iterable[int], device: Device) -> Parts:
    """Storages of these bytes, and what their blocks are larger."""
    requested = list(nbytes)
    total = sum(requested)
    if device.is_cpu:
        return {part: total}
    return {part: total, ROUNDING: sum(block_size(n) for n in requested) - total}
