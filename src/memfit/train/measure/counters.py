"""Counters of what a step really takes: live tensor bytes, the CUDA allocator, resident memory."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from msgspec.structs import replace
from torch import nn

from memfit.allocator.settings import check_allocator
from memfit.core.errors import InvalidRequest
from memfit.core.units import KIB
from memfit.families import read_model
from memfit.parallelism.pipeline import shown_micro_batches
from memfit.records.hardware import Device
from memfit.records.ledger import Entry, Ledger, Phase
from memfit.records.recipe import Recipe
from memfit.records.results import Measurement
from memfit.records.shapes import BatchShape
from memfit.train.data.sampler import IGNORED, Micro, Rated
from memfit.train.distributed.gloo import without_gloo
from memfit.train.measure.cuda_allocator import set_allocator
from memfit.train.measure.live import LiveBytes
from memfit.train.measure.observer import Observer
from memfit.train.measure.resident import INTERVAL, Resident, settle_heap
from memfit.train.model.weights import fill_weights
from memfit.train.run.drift import Counters
from memfit.train.run.machine import describe_environment
from memfit.train.run.oom_report import Alive
from memfit.train.step.build import Built, build_model, build_optimizer
from memfit.train.step.step import Batch, Enter, RatedBatch, StepResult, evaluate, nowhere, step

T = TypeVar("T")
LIVE = "live tensor bytes (every operator that torch dispatches)"
ANONYMOUS = f"RssAnon of the process, every {INTERVAL * 1000:.0f} ms: libraries, tensors, allocator"
REHEARSED = 2  # micro-batches of a rehearsed step: the second holds what the first one left


class Watch(NamedTuple):
    """What a watched step tells its watcher."""

    enter: Enter
    register: Callable[[Batch], None]


class Unwatched:
    """Stands where `LiveBytes` would, and sees nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class _Teller:
    """Tells who counts tensors, and who keeps phases."""

    def __init__(self, live: LiveBytes, enter: Enter) -> None:
        self._live, self._enter = live, enter
        self.register_batch, self.register_cache = live.register_batch, live.register_cache

    def enter(self, phase: Phase) -> None:
        """A phase begins."""
        self._live.enter(phase)
        self._enter(phase)


class Meter:
    """Peaks of memory by phase, and who held them, over all steps that were watched.

    On a CPU the counter is `LiveBytes`: exact bytes of live tensors. On CUDA the allocator's own
    counters give the peaks, and `LiveBytes` says who held them. torch runs compiled code as it is
    written wherever operators are watched, so that a compiled step is never watched: on a CPU
    nothing is known of it but resident memory.
    """

    def __init__(
        self, device: torch.device, *, compiled: bool = False, resident: Resident | None = None
    ) -> None:
        self.device = device
        self._resident = resident  # what counts the process's pages, on a CPU
        self._blind = compiled
        self.peaks: dict[Phase, int] = {}
        self._entries: dict[Phase, tuple[int, tuple[Entry, ...]]] = {}
        self._phase = Phase.LOAD
        self._cuda = device.type == "cuda"
        self._reserved = self._used = self._outside = 0  # highest so far, CUDA only
        self._between = False  # whether what runs belongs to no phase
        self._beside = 0  # highest of what belonged to none, CUDA only
        self.failed: Alive | None = None  # what was alive when watched work failed

    @property
    def peak(self) -> int:
        """The largest of all instants, bytes."""
        return max(self._beside, *self.peaks.values(), 0)

    @property
    def phase(self) -> Phase:
        """The phase that is running, or ran last."""
        return self._phase

    def counters(self) -> Counters:
        """What has been reached so far, up to now."""
        self._enter(self._phase)
        return Counters(dict(self.peaks), self.ledger, self._reserved, self._used)

    def mark(self) -> Watch:
        """The watch of a step whose tensors nobody counts: it keeps the phase, and on CUDA the
        allocator's peaks."""
        return Watch(self._enter, lambda _: None)

    @property
    def ledger(self) -> Ledger:
        """What was alive at each phase's own peak."""
        entries = (e for phase in Phase for e in self._entries.get(phase, (0, ()))[1])
        return Ledger(entries=tuple(entries))

    def leave(self) -> None:
        """The running phase is over; what follows counts towards the peak and to no phase."""
        self._enter(self._phase)
        self._between = True

    def watch_load(self, model: nn.Module, work: Callable[[], None]) -> None:
        """Run what fills a model; its peak belongs to the phase `load`."""
        with self._live() as live:
            live.register_model(model)
            live.enter(Phase.LOAD)
            self._enter(Phase.LOAD)
            work()

    def watch(self, built: Built, phase: Phase, work: Callable[[], T]) -> T:
        """Run what comes between two steps; its peak belongs to one phase."""
        with self._live() as live:
            live.register_model(built.model)
            live.register_optimizer(built.optimizer)
            live.enter(phase)
            live.restart()
            self._enter(phase)
            return work()

    def watch_step(self, built: Built, work: Callable[[Watch], T]) -> T:
        """Run one step after the first and count every tensor of it."""
        with self._live() as live:
            live.register_model(built.model)
            live.register_optimizer(built.optimizer)
            live.enter(Phase.FORWARD)
            live.restart()
            self._enter(Phase.FORWARD)
            return work(self._watch(live))

    @contextmanager
    def observing(self, built: Built) -> Iterator[Observer]:
        """Count every tensor of an iteration after the first; what it yields hears of phases."""
        with self._live() as live:
            live.register_model(built.model)
            live.register_optimizer(built.optimizer)
            live.enter(Phase.PREFILL)
            live.restart()
            self._enter(Phase.PREFILL)
            yield _Teller(live, self._enter)

    def marking(self) -> Observer:
        """The observer of an iteration whose tensors nobody counts: see `mark`."""
        return _Teller(cast(LiveBytes, Unwatched()), self._enter)

    def rehearse(
        self, recipe: Recipe, micros: Sequence[Micro], held_out: Sequence[Micro] = ()
    ) -> nn.Module:
        """Build the model, run optimizer steps and an evaluation on the worst, all of it watched.

        micros: two steps on the first one, one on each other; each step repeats its micro-batch as
        often as the recipe accumulates, but twice at most.

        The model comes back before its weights are filled, the optimizer is thrown away and the
        generators are put back: what follows cannot know that this has been. It is what a
        certificate traces, step by step, so that the two can be compared to the byte.
        """
        count = shown_micro_batches(recipe, REHEARSED)
        repeated = [[micro] * count for micro in micros]

        def work(built: Built, live: LiveBytes) -> None:
            watch = self._watch(live)
            watch.enter(Phase.FIRST_STEP)
            first = watch._replace(enter=lambda _: watch.enter(Phase.FIRST_STEP))
            run_step(built, repeated[0], first)
            for step_micros in repeated:
                run_step(built, step_micros, watch)
            self._rehearse_evaluation(built, held_out or micros[:1], watch)

        return self._rehearse(recipe, work)

    def rehearse_iterations(
        self, recipe: Recipe, run: Callable[[Built, Observer], None]
    ) -> nn.Module:
        """As `rehearse`, of iterations of reinforcement learning, which `run` runs."""
        return self._rehearse(recipe, lambda built, live: run(built, _Teller(live, self._enter)))

    def _rehearse(self, recipe: Recipe, work: Callable[[Built, LiveBytes], None]) -> nn.Module:
        model = self._build_and_run(recipe, work)
        gc.collect()  # an optimizer and its hooks are a cycle, which would keep its states
        if self._cuda:
            self._enter(self._phase)
            torch._C._cuda_clearCublasWorkspaces()  # what follows takes its own, as at first
            torch.cuda.empty_cache()
        return model

    def _build_and_run(self, recipe: Recipe, work: Callable[[Built, LiveBytes], None]) -> nn.Module:
        gpus = [self.device] if self._cuda else []
        with torch.random.fork_rng(devices=gpus), self._live() as live:
            self._enter(Phase.LOAD)
            model = build_model(recipe, self.device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()  # empty memory may hold NaN, and denormals are slow
            live.register_model(model)
            built = Built(recipe, model, build_optimizer(recipe, model))
            live.register_optimizer(built.optimizer)
            work(built, live)
            del built
        return model

    def _rehearse_evaluation(self, built: Built, micros: Sequence[Micro], watch: Watch) -> None:
        watch.enter(Phase.EVALUATE)
        for micro in micros:
            for _ in range(REHEARSED):
                result = evaluate(built, put(micro, built.device, watch))
        del result

    def _watch(self, live: LiveBytes) -> Watch:
        def enter(phase: Phase) -> None:
            live.enter(phase)
            self._enter(phase)

        def register(batch: Batch) -> None:
            live.register_batch(*batch.tensors)

        return Watch(enter, register)

    @contextmanager
    def _live(self) -> Iterator[LiveBytes]:
        """Count every tensor meanwhile. Frees come from reference counts alone, as in a trace."""
        if self._blind:
            yield cast(LiveBytes, Unwatched())
            return
        enabled = gc.isenabled()
        gc.disable()
        live = LiveBytes(self.device.type)
        self.failed = None
        try:
            with live, without_gloo(live):
                yield live
        except BaseException:
            phase, entries, tensors = live.now()
            rows = tuple((live.owner_of(tensor), tensor) for tensor in tensors)
            self.failed = Alive(phase, tuple(entries), rows, complete=True)
            raise
        finally:
            if enabled:
                gc.enable()
        self._merge(live)

    def measurements(self) -> dict[str, Measurement]:
        """Memory by the counter that gave it; live tensors and resident memory are never mixed."""
        found = {"memory.rss_peak": _bytes(peak_rss(), "getrusage ru_maxrss, of the process")}
        if self._resident is not None and (reached := self._resident.note()):
            found["memory.device_total"] = _bytes(reached, ANONYMOUS)
        if self._blind and not self._cuda:
            return found
        if not self._cuda:
            return {"memory.peak_allocated": _bytes(self.peak, LIVE)} | found
        self._enter(self._phase)
        return {
            "memory.peak_allocated": _bytes(self.peak, "torch.cuda.max_memory_allocated"),
            "memory.peak_reserved": _bytes(self._reserved, "torch.cuda.max_memory_reserved"),
            "memory.device_total": _bytes(
                self._used, "torch.cuda.mem_get_info where phases begin, of all processes"
            ),
            "memory.outside_allocator": _bytes(
                self._outside, "mem_get_info less memory_reserved, of all processes"
            ),
        } | found

    def _enter(self, phase: Phase) -> None:
        """CUDA: what the allocator reached since the last phase began belongs to that phase."""
        if self._cuda:
            reached = torch.cuda.max_memory_allocated(self.device)
            if self._between:
                self._beside = max(self._beside, reached)
            else:
                self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), reached)
            self._reserved = max(self._reserved, torch.cuda.max_memory_reserved(self.device))
            torch.cuda.reset_peak_memory_stats(self.device)
            free, total = torch.cuda.mem_get_info(self.device)
            self._used = max(self._used, total - free)
            held = torch.cuda.memory_reserved(self.device)
            self._outside = max(self._outside, total - free - held)
        self._phase, self._between = phase, False

    def _merge(self, live: LiveBytes) -> None:
        held = live.ledger()
        for phase, nbytes in live.peaks.items():
            if nbytes >= self._entries.get(phase, (0, ()))[0]:
                self._entries[phase] = (nbytes, held.at(phase))
            if not self._cuda:
                self.peaks[phase] = max(self.peaks.get(phase, 0), nbytes)


def peak_rss() -> int:
    """Bytes of the process that were ever resident at once."""
    reached = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return reached if sys.platform == "darwin" else reached * KIB


def start_device(recipe: Recipe, device: Device) -> torch.device:
    """Where a recipe runs, its allocator set.

    Raises InvalidRequest when this machine has no such device, or this process another allocator.
    """
    check_allocator(recipe.allocator, device)
    if device.is_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InvalidRequest(
            f"the recipe is for `{device.id}`, and torch finds no GPU here",
            hint="run it on a machine with one; `memfit certify` needs none",
        )
    set_allocator(recipe.allocator)
    return torch.device("cuda", torch.cuda.current_device())


def to_batch(micro: Micro, device: torch.device, beside: float = 1.0) -> Batch:
    """The micro-batch as tensors on the device; beside: as of `Batch`."""
    ids, labels, positions, reference, context = (
        None if a is None else torch.from_numpy(a).to(device)
        for a in (
            micro.input_ids, micro.labels, micro.position_ids, micro.reference, micro.context,
        )
    )  # fmt: skip
    assert ids is not None
    assert labels is not None
    rated = None
    if micro.rated is not None:
        found = (None if a is None else torch.from_numpy(a).to(device) for a in micro.rated)
        rated = RatedBatch(*found)  # type: ignore[arg-type]
    return Batch(
        ids, labels, positions, micro.documents, reference, context=context, beside=beside,
        rated=rated,
    )  # fmt: skip


def put(micro: Micro, device: torch.device, watch: Watch, beside: float = 1.0) -> Batch:
    """Return the micro-batch on the device, and register it with its watcher."""
    batch = to_batch(micro, device, beside)
    watch.register(batch)
    return batch


def count_targets(recipe: Recipe, micros: Sequence[Micro]) -> int:
    """What the loss of micro-batches is a mean over: target tokens, pairs, or rated answers."""
    if recipe.rates:
        return sum(micro.answers for micro in micros)
    return sum(micro.pairs if recipe.prefers else micro.targets for micro in micros)


def count_beside(recipe: Recipe, micros: Sequence[Micro]) -> int:
    """What the cross-entropy beside the loss of pairs is a mean over; 0 where there is none."""
    return sum(micro.learned_beside for micro in micros) if recipe.learns else 0


def run_step(
    built: Built,
    micros: list[Micro],
    watch: Watch | None = None,
    counts: tuple[int, int] | None = None,
    *,
    skips: bool = False,
) -> StepResult:
    """One optimizer step over the micro-batches, each put on the device when its turn comes.

    counts: `count_targets` and `count_beside` of all ranks, where there are others. skips: see
    `step`.
    """
    seen = watch or Watch(nowhere, lambda _: None)
    if counts is None:
        counts = count_targets(built.recipe, micros), count_beside(built.recipe, micros)
    targets, beside = counts

    # holds no batch once it is given out
    batches = (put(micro, built.device, seen, beside) for micro in micros)
    return step(built, batches, targets, seen.enter, skips=skips)


def synthetic_micro(recipe: Recipe, vocab: int, shape: BatchShape | None = None) -> Micro:
    """Random tokens in a shape; by default the one that a recipe takes for its worst.

    Packed, that is one token beside a document that fills the rest of the row: a second document
    makes attention's outputs be copied together.
    """
    rows, width = recipe.micro_batch, recipe.own_row
    documents = recipe.worst_documents
    if shape is not None:
        rows, width, documents = shape.rows, shape.tokens, shape.documents
    ids = np.random.default_rng(recipe.seed).integers(0, vocab, (rows, width), dtype="int64")
    labels = np.full_like(ids, IGNORED)
    labels[:, :-1] = ids[:, 1:]
    if documents is None:
        precomputed = recipe.preference.reference == "precomputed"
        reference = np.zeros(rows, dtype="float32") if precomputed else None
        places = np.arange(width)[None] if recipe.parallel.cp > 1 else None
        context = rated = None
        if recipe.rates:
            desirable = np.arange(rows) % 2 == 0
            rated = Rated(desirable)
            if recipe.mismatches:
                rated = Rated(desirable, ids.copy(), labels.copy(), reference)
        if recipe.learns == "conversations":
            context = np.full_like(ids, IGNORED)
            context[::2] = labels[::2]
            labels[::2, : width // 2] = IGNORED
            context[labels != IGNORED] = IGNORED
        return Micro(ids, labels, places, None, ids.size, reference, context, rated)
    for row, lengths in zip(labels, documents, strict=True):
        row[np.cumsum(lengths) - 1] = IGNORED
    if not (labels != IGNORED).any():
        labels[0, 0] = ids[0, 0]  # documents of one token learn nothing, and a step must
    positions = [np.concatenate([np.arange(n) for n in lengths]) for lengths in documents]
    return Micro(ids, labels, np.stack(positions), documents, ids.size)


class Measured(NamedTuple):
    """A few real steps: what they took and who held it."""

    measurements: dict[str, Measurement]
    phases: dict[str, int]
    ledger: Ledger
    environment: dict[str, str]


def measure(recipe: Recipe, device: Device, steps: int = 3) -> Measured:
    """Run a few real steps on random tokens and weights; times are of steps nobody watches.

    Raises InvalidRequest when this machine has no such device.
    """
    if recipe.samples:
        raise InvalidRequest(
            f"`objective: {recipe.objective}`: steps on random tokens say nothing of rollouts",
            hint="`memfit train` measures each of its iterations",
        )
    place = start_device(recipe, device)
    recipe = replace(recipe, weights="random")
    if place.type == "cuda":
        return _measure(recipe, Meter(place, compiled=recipe.compile == "blocks"), steps)
    settle_heap(recipe)
    with Resident() as resident:
        meter = Meter(place, compiled=recipe.compile == "blocks", resident=resident)
        return _measure(recipe, meter, steps)


def _measure(recipe: Recipe, meter: Meter, steps: int) -> Measured:
    micro = synthetic_micro(recipe, read_model(recipe.model).architecture.vocab)
    model = meter.rehearse(recipe, [micro])
    meter.watch_load(model, lambda: fill_weights(model, recipe))
    meter.leave()  # the timed steps' peaks are not those of filling the weights
    built = Built(recipe, model, build_optimizer(recipe, model))
    micros = [micro] * recipe.accumulation
    run_step(built, micros)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        float(run_step(built, micros).loss)  # waits for the device
        seconds.append(time.perf_counter() - start)
    tokens = sum(m.tokens for m in micros)
    found = meter.measurements() | time_measurements(seconds, [tokens] * steps)
    phases = {str(phase): meter.peaks[phase] for phase in Phase if phase in meter.peaks}
    return Measured(found, phases, meter.ledger, describe_environment(meter.device))


def time_measurements(seconds: list[float], tokens: list[int]) -> dict[str, Measurement]:
    """Median seconds of a step (spread: interquartile range) and tokens over their total time."""
    if not seconds:
        return {}
    low, high = np.quantile(seconds, [0.25, 0.75])
    count, counter = len(seconds), "perf_counter around each unwatched step"
    return {
        "time.step_seconds": Measurement(
            value=median(seconds), unit="s", counter=counter, n=count, spread=float(high - low)
        ),
        "time.tokens_per_second": Measurement(
            value=sum(tokens) / sum(seconds), unit="tokens/s", counter=counter, n=count
        ),
    }


def _bytes(value: int, counter: str) -> Measurement:
    return Measurement(value=float(value), unit="B", counter=counter)
