"""Predicted memory of one optimizer step: closed form over the segments of a small model.

`plan.blocks` simulates the first, a middle and the last of each run of equal blocks with sizes
only; here the segments are laid end to end for the whole depth, phase by phase, on top of what is
always there. A phase's peak is a maximum over instants, never a sum of maxima.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from memfit.hardware import Device
from memfit.ledger import Entry, Kind, Ledger, Phase
from memfit.model import DTYPE_BYTES, Model, TensorSpec
from memfit.optimizers import Counted, find_optimizer
from memfit.plan.because import explain
from memfit.plan.blocks import (
    AFTER_PRODUCT,
    ROUNDING,
    Batch,
    Part,
    Parts,
    Passes,
    Repeat,
    Run,
    Segment,
    Setting,
    expand,
    find_runs,
    owner_of,
    repeats,
    shorten,
    simulate,
    split_rows,
)
from memfit.recipe import Recipe
from memfit.sizes.meter import block_size
from memfit.sizes.workspace import foreach_norm, product_workspace


class Level(msgspec.Struct):
    """What is alive now, and at the highest point of each phase so far.

    Which instant is the highest is decided by the tensors, as in the certificate's ledger: by how
    much their blocks are larger is an estimate that must not choose between equal instants.
    """

    live: Parts = {}
    total: int = 0
    peaks: dict[Phase, tuple[int, Parts]] = {}

    def add(self, parts: Parts, times: int = 1) -> None:
        """Change what is alive."""
        for part, nbytes in parts.items():
            self.live[part] = self.live.get(part, 0) + nbytes * times
            self.total += nbytes * times if part != ROUNDING else 0

    def note(self, phase: Phase, top: Parts | None = None, rise: int | None = None) -> None:
        """An instant of a phase: what is alive and `top`, whose tensors are `rise` bytes."""
        if rise is None:
            rise = sum(n for part, n in (top or {}).items() if part != ROUNDING)
        height = self.total + rise
        known = self.peaks.get(phase)
        if known is None or height > known[0]:
            parts = dict(self.live)
            for part, nbytes in (top or {}).items():
                parts[part] = parts.get(part, 0) + nbytes
            self.peaks[phase] = (height, parts)

    def walk(self, phase: Phase, segments: list[Segment], times: int) -> None:
        """Run segments, again and again; the first and the last time decide."""
        self._once(phase, segments)
        if times > 1:
            for segment in segments:
                self.add(segment.net, times - 2)
            self._once(phase, segments)

    def _once(self, phase: Phase, segments: list[Segment]) -> None:
        for segment in segments:
            self.note(phase, segment.top, segment.rise)
            self.add(segment.net)


def predict_memory(model: Model, recipe: Recipe, device: Device) -> Ledger:
    """Bytes alive at the peak of each phase of a step, by kind and component, and why.

    model: after the adapter (`find_adapter(recipe).adapt`). On a CPU, live tensors; on CUDA, the
    caching allocator's blocks, with what its kernels are known to allocate inside.
    Raises InvalidRequest when the optimizer has no such implementation.
    """
    peaks = _peaks(model, recipe, device)
    return Ledger(
        entries=tuple(
            Entry(
                kind=kind, phase=phase, owner=owner, nbytes=nbytes,
                because=explain(kind, owner, nbytes, model, recipe),
            )
            for phase in Phase
            if phase in peaks
            for (kind, owner), nbytes in sorted(peaks[phase].items())
            if nbytes
        )
    )  # fmt: skip


def predict_peak(model: Model, recipe: Recipe, device: Device) -> int:
    """The ledger's peak alone, in bytes: what a search asks of most of its candidates."""
    return max(sum(parts.values()) for parts in _peaks(model, recipe, device).values())


def _peaks(model: Model, recipe: Recipe, device: Device) -> dict[Phase, Parts]:
    setting, counts = describe(model, recipe, device)
    first, later = simulate(setting)
    peaks = _Step(model, recipe, device, counts, first, later).run()
    return {phase: parts for phase, (_, parts) in peaks.items()}


def predict_flop(model: Model, recipe: Recipe, device: Device) -> int:
    """FLOP of matrix products and attention of one optimizer step, recomputation included."""
    setting, counts = describe(model, recipe, device)
    return simulate(setting)[0].flop(counts) * recipe.accumulation


def describe(model: Model, recipe: Recipe, device: Device) -> tuple[Setting, list[Repeat]]:
    """What to simulate, and how often each simulated block stands in the model."""
    from msgspec.structs import replace

    outside, blocks = split_rows(model, recipe.recompute_blocks)
    runs: tuple[Run, ...] = find_runs(blocks)
    cuda = not device.is_cpu
    setting = Setting(
        architecture=replace(model.architecture, layers=0),
        outside=outside,
        runs=shorten(runs),
        batch=worst_batch(recipe),
        kernel=recipe.attention,
        autocast=recipe.autocast,
        compute=recipe.compute_dtype,
        scaled=recipe.scaled,
        chunk=recipe.loss_chunk if recipe.loss == "chunked" else 0,
        cuda=cuda,
        adapter_dropout=recipe.lora.dropout > 0,
        accumulates=recipe.accumulation > 1,
    )
    return setting, repeats(runs)


def worst_batch(recipe: Recipe) -> Batch:
    """The micro-batch that needs the most memory of all that the recipe allows: full rows."""
    return Batch(
        rows=recipe.micro_batch, tokens=recipe.sequence_length, documents=recipe.worst_documents
    )


class _Step:
    """Two optimizer steps, laid out instant by instant."""

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        device: Device,
        counts: list[Repeat],
        first: Passes,
        later: Passes | None,
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.device = device
        self.counts = counts
        self.first = first
        self.later = later
        self.level = Level()
        self.trainable = [w.spec for w in model.weights if w.trainable]
        self._cublas: Parts = {}
        if not device.is_cpu:
            self._cublas[Kind.WORKSPACE, "cublas"] = product_workspace(device)

    def run(self) -> dict[Phase, tuple[int, Parts]]:
        """The peak of each phase and its parts."""
        level = self.level
        self._load()
        level.note(Phase.LOAD)
        level.add(
            self._cublas
        )  # the forward's; autograd's thread takes its own in its first product
        self._scale_loss()
        self._micro_batches(Phase.FIRST_STEP, Phase.FIRST_STEP, Phase.FIRST_STEP, Phase.FIRST_STEP)
        level.note(Phase.FIRST_STEP)
        self._first_update()
        self._release_gradients()
        self._scale_loss()
        self._micro_batches(Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE)
        self._clip(Phase.OPTIMIZER_STEP)
        self._update(Phase.OPTIMIZER_STEP, self.trainable)
        return level.peaks

    def _hold(self, part: Part, nbytes: Iterable[int]) -> Parts:
        """Storages of these bytes, and what their blocks are larger."""
        asked = list(nbytes)
        total = sum(asked)
        if self.device.is_cpu:
            return {part: total}
        return {part: total, ROUNDING: sum(block_size(n) for n in asked) - total}

    def _load(self) -> None:
        from memfit.families import find_family

        parts: dict[str, list[int]] = {}
        for weight in self.model.weights:
            parts.setdefault(owner_of(weight.part), []).append(weight.nbytes)
        a = self.model.architecture
        parts["rotary"] = [spec.nbytes for spec in find_family(a.family).buffers(a)]
        for owner, nbytes in parts.items():
            self.level.add(self._hold((Kind.PARAMETERS, owner), nbytes))

    def _inputs(self) -> Parts:
        batch = worst_batch(self.recipe)
        one = batch.rows * batch.tokens * DTYPE_BYTES["int64"]
        return self._hold((Kind.INPUT, "batch"), [one] * (2 if batch.documents is None else 3))

    def _micro_batches(self, forward: Phase, loss: Phase, backward: Phase, more: Phase) -> None:
        level = self.level
        level.add(self._inputs())
        for phase, segments in (
            (forward, self.first.forward), (loss, self.first.loss), (backward, self.first.backward)
        ):  # fmt: skip
            for stretch, times in expand(segments, self.counts):
                if stretch[0].name.endswith(AFTER_PRODUCT) and phase is Phase.FIRST_STEP:
                    level.add(self._cublas)
                level.walk(phase, stretch, times)
        level.note(backward)
        if self.later is not None:
            for segments in (self.later.forward, self.later.loss, self.later.backward):
                for stretch, times in expand(segments, self.counts):
                    level.walk(more, stretch, times)
            level.note(more)
        level.add(self._inputs(), -1)

    def _first_update(self) -> None:
        """The step that makes the optimizer's state: before all updates, or each with its own."""
        settings, level = self.recipe.optimizer, self.level
        family = find_optimizer(settings)
        self._clip(Phase.FIRST_STEP)
        if settings.implementation not in family.state_while_updating:
            level.add(self._state(self.trainable))
            self._update(Phase.FIRST_STEP, self.trainable)
            return
        for spec in self.trainable:
            level.add(self._state([spec]))
            self._update(Phase.FIRST_STEP, [spec])

    def _state(self, specs: Iterable[TensorSpec]) -> Parts:
        settings = self.recipe.optimizer
        optimizer = find_optimizer(settings)
        host = () if self.device.is_cpu else optimizer.host_state(settings)
        nbytes: list[int] = []
        for spec in specs:
            held = list(optimizer.state(spec, settings))
            for elsewhere in host:
                held.remove(elsewhere)
            nbytes += [s.nbytes for s in held]
        return self._hold((Kind.OPTIMIZER_STATE, "optimizer"), nbytes)

    def _clip(self, phase: Phase) -> None:
        level = self.level
        level.note(phase)
        if not self.recipe.optimizer.clip_norm:
            return
        scalar, count = DTYPE_BYTES[self.recipe.trainable_dtype], len(self.trainable)
        norm = {(Kind.TEMPORARY, "optimizer"): scalar}  # held until the step has returned it
        each = [scalar] * count
        norms = self._hold((Kind.TEMPORARY, "optimizer"), each)
        if not self.device.is_cpu:
            norms[Kind.WORKSPACE, "optimizer"] = foreach_norm([s.numel for s in self.trainable])
        level.note(phase, norms)
        level.note(
            phase, self._hold((Kind.TEMPORARY, "optimizer"), [*each, scalar * count, scalar])
        )
        level.add(norm)

    def _scale_loss(self) -> None:
        """fp16: the scaler's two numbers, and the scale that this step uses."""
        if self.recipe.scaled:
            self.level.add({(Kind.TEMPORARY, "loss"): 3 * DTYPE_BYTES["float32"]})

    def _update(self, phase: Phase, specs: Sequence[TensorSpec]) -> None:
        settings = self.recipe.optimizer
        family, temporary = find_optimizer(settings), (Kind.TEMPORARY, "optimizer")
        counted: Counted = "live" if self.device.is_cpu else "device"
        copies = {temporary: family.step_temporaries(specs, settings, counted)}
        if not self.device.is_cpu:
            blocks = family.step_temporaries(specs, settings, "blocks")
            copies[ROUNDING] = blocks - copies[temporary]
        self.level.note(phase, copies)

    def _release_gradients(self) -> None:
        level = self.level
        gone = (Kind.GRADIENTS, Kind.TEMPORARY)  # and the 0-dim results of the first step
        level.add({p: -n for p, n in level.live.items() if p[0] in gone})
        if not self.device.is_cpu:
            nbytes = [s.nbytes for s in self.trainable]
            level.add({ROUNDING: sum(nbytes) - sum(block_size(n) for n in nbytes)})
