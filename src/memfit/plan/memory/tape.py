"""The tape of a simulated run: every allocation and release that the CUDA allocator would see.

The closed form knows what is alive; how much the caching allocator reserves for it depends on the
order of births and deaths. Here the step is simulated at its full depth, event by event, and laid
behind the loaded weights and before the optimizer's update, twice, as the certificate traces it.
`bench/plan_vs_certificate.py` compares what both replays reserve.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, takewhile
from typing import NamedTuple

from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.adapters.shared.reference_copy import copied_rows
from memfit.allocator.caching import Replay
from memfit.allocator.caching import replay as run_allocator
from memfit.allocator.heap import Held, hold_freed
from memfit.allocator.orders import OTHERS, RISING
from memfit.allocator.quick import Ask, is_quick, replay_quickly, reserve_large
from memfit.allocator.settings import Settings, read_settings
from memfit.allocator.tape import FREED, Line
from memfit.families import find_family
from memfit.meta import Meter
from memfit.meta.layers.quantised import quantising_bytes
from memfit.meta.workspace import foreach_norm, product_workspace
from memfit.optimizers import find_optimizer
from memfit.optimizers.shared.groups import in_order, split_specs
from memfit.optimizers.shared.offloaded import stays
from memfit.parallelism.pipeline import stage_model
from memfit.parallelism.shards import cut_model, local_model
from memfit.plan.memory.lengthen import record_deep
from memfit.plan.memory.playing import NOTHING, Part, Playing, Reel, cut_pieces
from memfit.plan.memory.predicted_memory import (
    describe,
    find_fullest,
    without_history,
    without_shape,
    worst_batch,
)
from memfit.plan.memory.rollouts import SCORES, cache_sizes, key_dtype, scored_phases
from memfit.plan.memory.saving import gather_chains
from memfit.plan.simulate.blocks import AFTER_PRODUCT
from memfit.plan.simulate.fsdp_units import drawing_turns
from memfit.plan.simulate.sampled.rollout import (
    Slots,
    find_admissions,
    find_limit,
    record_rollout,
)
from memfit.plan.simulate.setting import Batch, Recording, Run, Setting
from memfit.records.hardware import Device
from memfit.records.ledger import Kind, Phase
from memfit.records.model import DTYPE_BYTES, Model, TensorSpec, Weight
from memfit.records.recipe import Optimizer, Recipe

IN_ORDER = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
# Turns of loops, each of a few dozen events, beyond which a tape is too long to be replayed in
# seconds: chunks of the loss (of rows of 10^9 tokens they fill 24 GB), and a block's calls of
# attention, one for each document.
MOST_CHUNKS, MOST_CALLS = 4096, 256


class Tape(NamedTuple):
    """What the allocator sees of a run, cut into stretches of one phase each."""

    codes: list[int]  # n: storage n is born; ~n: it dies
    asks: list[Ask]  # bytes and stream of each storage; no bytes of what stands there already
    cuts: list[int]  # of the codes: where each stretch but the first begins
    phases: list[Phase]  # of each stretch

    @property
    def events(self) -> list[Line]:
        """The same as `allocator.caching` reads it, without storages of no bytes."""
        asks = self.asks
        return [
            (code, *asks[code]) if code >= 0 else (~code, FREED, 0)
            for code in self.codes if asks[max(code, ~code)][0]
        ]  # fmt: skip

    @property
    def marks(self) -> list[int]:
        """Of those events: where each stretch but the first begins."""
        have = (self.asks[max(code, ~code)][0] > 0 for code in self.codes)
        before = [0, *accumulate(have)]
        return [before[cut] for cut in self.cuts]


class Replayed(NamedTuple):
    """The allocator's replay of a simulated run, bytes."""

    allocated: int  # the highest sum of blocks
    reserved: int  # the most taken from the driver
    phases: dict[Phase, int]  # the highest sum of blocks in each phase
    events: int
    small: int = 0  # of the reserved bytes, where no segment is ever released: of small storages


def has_tape(recipe: Recipe, device: Device) -> bool:
    """Whether the run of this recipe can be simulated event by event.

    A CPU has no caching allocator. Shards in the host's memory move on streams of their own.
    Loops of too many turns make a tape too long.
    """
    return not device.is_cpu and recipe.offload != "parameters" and not _is_long(recipe)


def keeps_tape(recipe: Recipe) -> bool:
    """Whether what a CPU's heap keeps of this recipe's run is known, event by event."""
    alone = recipe.parallel.world == 1 and not recipe.samples
    return recipe.is_own and alone and not _is_long(recipe)


@lru_cache(maxsize=512)
def hold_run(model: Model, recipe: Recipe, device: Device) -> Held:
    """What the simulated run holds on a CPU whose heap keeps freed blocks; only of `keeps_tape`."""
    return hold_freed(write_tape(model, recipe, device).events)


def _is_long(recipe: Recipe) -> bool:
    tokens = recipe.micro_batch * recipe.sequence_length
    if recipe.loss_chunk and tokens // recipe.loss_chunk > MOST_CHUNKS:
        return True
    documents = worst_batch(recipe).documents
    if documents is None or recipe.attention == "varlen":
        return False
    return recipe.micro_batch * len(documents) > MOST_CALLS


@lru_cache(maxsize=512)
def replay_run(model: Model, recipe: Recipe, device: Device) -> Replayed:
    """The simulated run through the allocator, under the recipe's settings and without a limit.

    model: after its adapter. Only where `has_tape`. Raises InvalidRequest for settings that torch
    does not take.
    """
    tape, settings = _written(model, recipe, device), _settings(recipe, device)
    if is_quick(settings):
        held = replay_quickly(tape.codes, tape.asks, settings, tape.cuts)
        phases = _by_phase(tape, held.stretches)
        return Replayed(max(held.stretches), held.reserved, phases, len(tape.codes), held.small)
    replayed = _replay(tape, settings)
    peaks = replayed.peaks
    stretches = [stretch.allocated for stretch in replayed.stretches]
    phases = _by_phase(tape, stretches)
    return Replayed(peaks.allocated, peaks.reserved, phases, len(tape.codes))


@lru_cache(maxsize=512)
def replay_other_orders(model: Model, recipe: Recipe, device: Device) -> tuple[int, ...]:
    """Bytes that `replay_run` reserves where addresses come in other orders (`allocator.orders`).

    None of expandable segments, which do not depend on them.
    """
    settings = _settings(recipe, device)
    if settings.expandable_segments:
        return ()
    tape = _written(model, recipe, device)
    if is_quick(settings):
        small = replay_run(model, recipe, device).small
        return tuple(small + n for n in reserve_large(tape.codes, tape.asks, settings, OTHERS))
    return tuple(_replay(tape, settings, order).peaks.reserved for order in OTHERS)


def _replay(tape: Tape, settings: Settings, order: int = RISING) -> Replay:
    """Under all settings; beyond the allowed fraction what it would take without one."""
    replayed = run_allocator(tape.events, settings, tape.marks, order)
    if replayed.failure is None:
        return replayed
    return run_allocator(tape.events, replace(settings, memory_fraction=1.0), tape.marks, order)


def _settings(recipe: Recipe, device: Device) -> Settings:
    memory = device.memory_driver or Settings().device_memory
    return read_settings(recipe.allocator, device_memory=memory)


def _by_phase(tape: Tape, allocated: Iterable[int]) -> dict[Phase, int]:
    peaks: dict[Phase, int] = {}
    for phase, nbytes in zip(tape.phases, allocated, strict=True):
        peaks[phase] = max(peaks.get(phase, 0), nbytes)
    return peaks


@lru_cache(maxsize=4)  # plans that differ in their optimizer alone share their micro-batches
def _record(setting: Setting, batch: Batch) -> Recording:
    return record_deep(setting, batch)


@lru_cache(maxsize=4)  # so do those that differ in their updates
def _record_calls(setting: Setting, slots: Slots, dtype: str) -> Recording:
    return record_rollout(setting, slots, dtype, steps=True)


def _of_calls(setting: Setting) -> Setting:
    """What a rollout's calls depend on: no loss, and blocks that differ in being recomputed are
    alike."""
    setting = without_history(setting)
    alike = groupby(block for run in setting.runs for block in run.cycle * run.count)
    runs = tuple(Run(cycle=(block,), count=len(list(same))) for block, same in alike)
    loss = replace(setting.loss, answers=None, chunk=0)
    return replace(setting, loss=loss, runs=runs)


def write_tape(model: Model, recipe: Recipe, device: Device) -> Tape:
    """Load, two optimizer steps, an evaluation and a save of the fullest rank, event by event."""
    return _Writer(model, recipe, device, find_fullest(model, recipe, device)[0]).write()


_written = lru_cache(maxsize=4)(write_tape)  # for its other orders; long ones take 20 MB


class _Writer:
    """Writes the tape of one recipe; storages are numbered as they are born."""

    def __init__(self, model: Model, recipe: Recipe, device: Device, rank: int) -> None:
        self.model, self.recipe, self.device, self.rank = model, recipe, device, rank
        self.local = local_model(model, recipe.parallel, rank)
        self.whole = cut_model(stage_model(model, recipe.parallel, rank), recipe.parallel)
        self.trainable = in_order(
            (w.spec for w in self.local.weights if w.trainable), recipe.optimizer
        )
        self.computed = find_adapter(recipe).loading(model)
        self.setting = describe(model, without_shape(recipe), device, rank, shortened=False)[0]
        self.codes: list[int] = []
        self.asks: list[Ask] = [NOTHING]  # storages are counted from 1
        self.cuts: list[int] = []
        self.phases = [Phase.LOAD]
        self.reels: dict[int, Reel] = {}
        self.threads = 2  # whose cuBLAS workspaces are still to come: the forward's, autograd's
        self.begins = False  # whether the next storage is the result of a thread's first product
        self.has_states = False

    def write(self) -> Tape:
        """The whole run."""
        batch = worst_batch(self.recipe)
        self._load()
        recording = _record(self.setting, batch)
        for first in (True, False):
            if self.recipe.samples:
                self._roll_out(batch)
            pieces = list(cut_pieces(recording, self.setting, first=first))
            playing = self._begin(recording.meter, pieces[0].start)
            for piece in pieces:
                self._run(playing, piece)
            self.enter(Phase.FIRST_STEP if first else Phase.OPTIMIZER_STEP)
            if self.setting.in_backward is None:
                self._update()
            self._end_step(recording, playing)
        if not self.recipe.samples:
            self._evaluate(_record(without_history(self.setting), batch))
        self._save()
        return Tape(self.codes, self.asks, self.cuts, self.phases)

    def enter(self, phase: Phase) -> None:
        """A stretch of this phase begins."""
        if phase != self.phases[-1]:
            self.cuts.append(len(self.codes))
            self.phases.append(phase)

    def hold(self, nbytes: int, stream: int = 0) -> int:
        """A storage is born; returns its number, 0 of what has no bytes."""
        if not nbytes:
            return 0
        number = len(self.asks)
        self.asks.append((nbytes, stream))
        self.codes.append(number)
        return number

    def drop(self, storages: Iterable[int]) -> None:
        """Storages die."""
        self.codes += [~storage for storage in storages if storage]

    def _load(self) -> None:
        for weight in self.local.weights:
            for spec in weight.stored.values():
                self.hold(spec.nbytes)
        architecture = self.local.architecture
        for spec in find_family(architecture.family).buffers(architecture):
            self.hold(spec.nbytes)
        if self.recipe.copies_reference:
            for weight in copied_rows(self.local):
                self.hold(weight.nbytes)
        cut = self.setting.sharding is not None
        if cut and self.recipe.weights == "random":
            self._draw()
        else:
            self._quantise_all(self.whole.weights, cut=cut)
        if self.computed:
            self._begin_products()
            self.drop([self.hold(self.computed)])

    def _draw(self) -> None:
        """Random weights of shards: each module is whole for its turn."""
        for turn in drawing_turns(self.model, self.recipe, self.rank):
            dense = [self.hold(nbytes) for nbytes in turn.dense]
            self._quantise_all(turn.quantised, cut=True)
            self.drop(dense)

    def _quantise_all(self, weights: Iterable[Weight], *, cut: bool) -> None:
        """One weight after another is quantised."""
        for weight in weights:
            if weight.coding:
                made = quantising_bytes(self.recipe.coding, weight.shape, weight.dtype, cut=cut)
                self._quantise(made)

    def _quantise(self, instants: Sequence[Sequence[int]]) -> None:
        """What making one weight holds, instant by instant: what stays from one to the next does
        so from the first tensor on."""
        alive: list[tuple[int, int]] = []  # bytes and storage
        for tensors in instants:
            pairs = zip((n for n, _ in alive), tensors, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            self.drop([storage for _, storage in alive[same:]])
            alive = alive[:same] + [(n, self.hold(n)) for n in tensors[same:]]
        self.drop([storage for _, storage in alive])

    def _begin_products(self) -> None:
        """The first product of a thread takes cuBLAS's workspace."""
        self.threads -= 1
        if not self.device.is_cpu:
            self.hold(product_workspace(self.device))

    def _begin(self, meter: Meter, start: int = 0) -> Playing:
        """Number the storages of a recording's events, which are then played."""
        reel = self.reels.setdefault(id(meter), Reel(meter))  # a reel keeps its meter
        playing = Playing(reel, len(self.asks), start)
        self.asks += playing.asks
        return playing

    def _run(self, playing: Playing, piece: Part) -> None:
        """A micro-batch, or a part of one: its events, each in its phase."""
        phase, at = piece.phase, piece.start
        self.enter(phase)
        if self.threads == 2 and piece.start <= piece.product < piece.stop:
            self._play(playing, at, piece.product)
            self.begins = True
            at = piece.product
        for mark in piece.marks:
            if mark.event < at:
                continue
            self._play(playing, at, mark.event)
            at = mark.event
            if phase in IN_ORDER:
                phase = {"loss": Phase.LOSS, "head": Phase.BACKWARD}.get(mark.name, phase)
                self.enter(phase)
            if self.threads == 1 and mark.name.endswith(AFTER_PRODUCT):
                self.begins = True
        self._play(playing, at, piece.stop)

    def _play(self, playing: Playing, start: int, stop: int) -> None:
        """Events, with a thread's workspace behind the result of its first product."""
        codes = playing.play(start, stop)
        if self.begins:
            births = (at for at, code in enumerate(codes) if code >= 0)
            if (first := next(births, None)) is not None:
                self.begins = False
                self.codes += codes[: first + 1]
                self._begin_products()
                codes = codes[first + 1 :]
        self.codes += codes

    def _end_step(self, recording: Recording, playing: Playing) -> None:
        """Gradients are let go, and results that the loop has read; states stay."""
        kinds, gradients = recording.meter.kinds, dict.fromkeys(recording.gradients)
        alive = playing.find_alive()
        self.drop(n for index in gradients if index in alive for n in alive[index])
        for index, storages in alive.items():
            if index not in gradients and kinds[index] is not Kind.OPTIMIZER_STATE:
                self.drop(storages)

    def _update(self) -> None:
        """Clipping, then the update; the first one makes the states."""
        settings = self.recipe.optimizer
        norm = [self._clip()] if settings.clip_norm else []
        for specs, own in split_specs(self.trainable, settings):
            self._update_group(specs, own)
        self.has_states = True
        self.drop(norm)

    def _update_group(self, specs: Sequence[TensorSpec], settings: Optimizer) -> None:
        family = find_optimizer(settings)
        together = settings.implementation not in family.state_while_updating
        if together:
            self._make_states(specs)
        alone = [family.step_temporaries([s], settings, "device") for s in specs]
        whole = family.step_temporaries(specs, settings, "device")
        at_once = whole == sum(alone)  # temporaries of all parameters live together
        if at_once:
            self.drop([self.hold(nbytes) for nbytes in alone])
        for spec in specs:
            if not together:
                self._make_states([spec])
            if not at_once:
                self._update_alone(spec, settings)

    def _update_alone(self, spec: TensorSpec, settings: Optimizer) -> None:
        meter = Meter(cuda=True)
        find_optimizer(settings).update_alone(spec, settings, meter)
        self._play_alone(meter, [slice(0, len(meter.events))])

    def _play_alone(
        self, meter: Meter, parts: Iterable[slice], keep: Kind | None = None
    ) -> list[int]:
        """Those events; what is left of them is let go, but for a kind that is returned."""
        playing = self._begin(meter)
        for part in parts:
            self.codes += playing.play(part.start, part.stop)
        remaining: list[int] = []
        for index, storages in playing.find_alive().items():
            if keep is not None and meter.kinds[index] is keep:
                remaining += storages
            else:
                self.drop(storages)
        return remaining

    def _make_states(self, specs: Sequence[TensorSpec]) -> None:
        """Before the first update; nothing where they are there."""
        settings = self.recipe.optimizer
        family = find_optimizer(settings)
        if self.has_states:
            return
        for spec in specs:
            if stays(self.recipe, spec.numel):
                for state in family.on_device(spec, settings):
                    self.hold(state.nbytes)

    def _clip(self) -> int:
        """Norms of all gradients, their norm, and the factor; returns the norm, which stays."""
        scalar = DTYPE_BYTES[self.recipe.trainable_dtype]
        partial = self.hold(foreach_norm([s.numel for s in self.trainable]))
        norms = [self.hold(scalar) for _ in self.trainable]
        self.drop([partial])
        stacked = self.hold(scalar * len(self.trainable))
        norm = self.hold(scalar)
        self.drop([stacked, *norms])
        self.drop([self.hold(scalar), self.hold(scalar)])
        return norm

    def _roll_out(self, batch: Batch) -> None:
        """Prompts are read into slots, steps decode, and tokens are scored."""
        recipe = self.recipe
        slots = Slots.of(recipe, find_limit(self.model.architecture))
        dtype = key_dtype(self.model, recipe)
        self.enter(Phase.PREFILL)
        if self.threads == 2:  # the first product of all
            self._begin_products()
        cache = [self.hold(n) for n in cache_sizes(self.model.architecture, slots, dtype)]
        calls = _record_calls(_of_calls(self.setting), slots, dtype)
        prefills = len(find_admissions(slots))
        gathered: list[int] = []  # weights that ranks share and that no forward gives up
        for number, marks in enumerate(calls.passes):
            self.enter(Phase.PREFILL if number < prefills else Phase.DECODE)
            part = slice(marks[0].event, marks[-1].event)
            gathered += self._play_alone(calls.meter, [part], keep=Kind.ALL_GATHER)
        self.drop([*cache, *gathered])
        rewards = (Phase.REWARD,) if recipe.scored_by_adapter else ()
        for phase in (*rewards, *scored_phases(recipe)):
            self.enter(phase)
            setting = without_history(self.setting).scoring(SCORES[phase])
            recording = _record(setting, batch)
            for _ in range(min(2, recipe.accumulation)):
                self._play_alone(recording.meter, [slice(0, recording.stop)])

    def _evaluate(self, recording: Recording) -> None:
        """Two held-out micro-batches, after each of which gathered weights are freed."""
        self.enter(Phase.EVALUATE)
        pieces = list(cut_pieces(recording, without_history(self.setting), first=True))
        for _ in range(2):
            self._play_alone(recording.meter, [slice(p.start, p.stop) for p in pieces])

    def _save(self) -> None:
        """The tensors of a checkpoint are there; of the model's files each rank gathers all."""
        self.enter(Phase.SAVE)
        for chain in gather_chains(self.model, self.recipe, self.rank):
            before = 0
            for nbytes in chain:
                made = self.hold(nbytes)
                self.drop([before])
                before = made
            self.drop([before])
