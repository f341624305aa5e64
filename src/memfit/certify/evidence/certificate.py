"""From a trace to a certificate: replay, the three memory numbers, the verdict."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.allocator.caching import Replay, replay
from memfit.allocator.heap import Held, hold_freed, keeps_freed
from memfit.allocator.orders import OTHERS
from memfit.allocator.settings import Settings, check_allocator, read_settings
from memfit.base_formats import find_base_format
from memfit.catalog.overheads import Overhead, find_outside
from memfit.certify.evidence.recording import Recording, write_recording
from memfit.certify.iterations import trace_iterations
from memfit.certify.repeating.shortest import trace_shortest
from memfit.certify.tracing.recorder import Recorder, Trace
from memfit.certify.tracing.trace_step import (
    TRACED_MICRO_BATCHES,
    import_for,
    trace_generation,
    trace_step,
)
from memfit.certify.versions import NEWEST_TORCH, release
from memfit.core import units
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import installed_versions
from memfit.core.system.beside import start_beside
from memfit.families import read_model
from memfit.parallelism.pipeline import shown_micro_batches
from memfit.plan.memory.predicted_memory import find_fullest, predict_stages
from memfit.plan.memory.process import describe_process
from memfit.plan.memory.verdict import describe_orders, doubt_sampled
from memfit.records.hardware import Device
from memfit.records.ledger import Entry, Kind, Phase
from memfit.records.recipe import Parallel, Recipe
from memfit.records.results import Certificate, Memory, Verdict
from memfit.records.shapes import (
    BatchShape,
    RowBounds,
    bounding_shapes,
    bounds_of,
    evaluation_shapes,
)

LIBRARIES = ("memfit", "torch", "transformers", "peft")


def make_certificate(
    recipe: Recipe,
    device: Device,
    usable: int | None,
    batches: Sequence[BatchShape] | None,
    *,
    data: RowBounds | None = None,
    held_out: RowBounds | None = None,
    tape: Path | None = None,
    rank: int | None = None,
    full_trace: bool = False,
    imports: Callable[[], int | None] = lambda: None,
) -> Certificate:
    """Trace the recipe's step in this process and judge it; see `memfit.certify.certify`.

    imports: what a run on this CPU holds before its first tensor; called after the trace.
    """
    started = time.perf_counter()
    base = find_base_format(recipe.base_format)
    rank, which = _choose_rank(recipe, device, rank)
    check_allocator(recipe.allocator, device)
    memory_driver = device.memory_driver or Settings().device_memory
    of_cuda = "" if device.is_cpu else recipe.allocator
    settings = read_settings(of_cuda, device_memory=memory_driver)
    later = None
    if recipe.parallel.world == 1 and not recipe.scores:  # a score head says nothing
        import_for(recipe)  # once, and not in the fork again
        later = start_beside(partial(_trace_later, recipe, device, full_trace))
    trace = _trace_data(recipe, device, batches, data, held_out, rank, full=full_trace)
    if tape is not None:
        write_recording(_record(trace, None if device.is_cpu else settings), tape)
    imported = imports() if device.is_cpu and device.context is None else None
    if imported is not None:
        device = device.with_context(imported)
    memory, phases, bounds = _judge_trace(trace, device, settings, usable, recipe.parallel)
    if device.is_cpu and keeps_freed(recipe.allocator):
        memory = _on_cpu(trace, device, usable, recipe.parallel, hold_freed(trace.tape))
    memory = doubt_sampled(recipe, device, memory, "traced")
    generation, phases_later = None, dict[Phase, int]()
    if later is not None:
        generation, phases_later, _ = _judge_trace(later(), device, settings, usable, Parallel())
    return Certificate(
        recipe_digest=recipe.digest,
        recipe=recipe,
        device=device.id,
        memory=memory,
        phases={str(phase): n for phase, n in {**phases, **phases_later}.items()},
        ledger=trace.ledger,
        at_peak=trace.alive(Phase(memory.peak_phase)),
        bounds=(*which, *bounds, *_torch_bounds()),
        seconds=round(time.perf_counter() - started, 3),
        versions=installed_versions((*LIBRARIES, *((base.library,) if base.library else ()))),
        generation=generation,
        data=data or (None if batches else bounds_of(recipe)),
        held_out=held_out,
        host={str(phase): n for phase, n in trace.host.items()},
    )


def certify_stages(
    recipe: Recipe,
    device: Device,
    usable: int | None,
    *,
    data: RowBounds | None = None,
    held_out: RowBounds | None = None,
    full_trace: bool = False,
    imports: Callable[[], int | None] = lambda: None,
) -> Certificate:
    """The certificate of a pipeline's fullest stage, with the phases of all others beside it.

    Each stage that may be the fullest is traced; which it is, is then read off the traces.
    imports: see `make_certificate`.
    """
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    parallel = recipe.parallel
    made = {
        rank: make_certificate(
            recipe, device, usable, None,
            data=data, held_out=held_out, rank=rank, full_trace=full_trace, imports=imports,
        )
        for rank, _ in predict_stages(model, recipe, device)
    }  # fmt: skip
    fullest = max(made, key=lambda rank: made[rank].memory.peak_allocated or 0)
    places = {str(parallel.stage_place(rank)): one.phases for rank, one in made.items()}
    which = (
        f"rank {fullest} of {parallel.world}, the fullest of the stages {', '.join(places)} of"
        f" {parallel.pp}, which were traced each"
    )
    bounds = (which, *made[fullest].bounds[1:])  # the first says that this rank was asked for
    seconds = round(sum(one.seconds for one in made.values()), 3)
    return replace(made[fullest], stages=places, bounds=bounds, seconds=seconds)


def _trace_later(recipe: Recipe, device: Device, full: bool) -> Trace:
    """`memfit generate` after the run, without what describes its tensors: it may be pickled."""
    found = trace_shortest(
        lambda recorder: trace_generation(recipe, device, recorder=recorder),
        recipe, device, full=full,
    )  # fmt: skip
    return dataclasses.replace(found, tensor=_undescribed, alive=_undescribed)


def _undescribed(what: object) -> NoReturn:
    raise LookupError(f"{what!r}: this trace is without descriptions of its tensors")


def _choose_rank(recipe: Recipe, device: Device, rank: int | None) -> tuple[int, tuple[str, ...]]:
    """Return the requested rank, else the fullest; and the certificate's notes on it."""
    world = recipe.parallel.world
    if rank is not None and not 0 <= rank < world:
        raise InvalidRequest(
            f"rank {rank} is not one of {world}", hint=f"use a rank from 0 to {world - 1}"
        )
    if world == 1:
        return 0, ()
    if rank is not None:
        return rank, (f"rank {rank} of {world}, which was asked for",)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    fullest, why = find_fullest(model, recipe, device)
    return fullest, (why,)


def _record(trace: Trace, settings: Settings | None) -> Recording:
    made = (event.tensor for event in trace.tape if event.nbytes > 0)
    return Recording(
        events=trace.tape,
        marks=trace.marks,
        stretches=trace.stretches,
        tensors={number: trace.tensor(number) for number in made},
        settings=settings,
    )


def _trace_data(
    recipe: Recipe,
    device: Device,
    batches: Sequence[BatchShape] | None,
    data: RowBounds | None,
    held_out: RowBounds | None,
    rank: int,
    *,
    full: bool,
) -> Trace:
    """The instants of a run whose data stays within bounds, which the trace then states."""
    if recipe.samples:
        return trace_iterations(recipe, device, rank=rank)
    evaluation = evaluation_shapes(recipe, held_out) if held_out else ()
    first, *also = (None,) if data is None else bounding_shapes(recipe, data)
    if first is not None:
        batches = (first,) * shown_micro_batches(recipe, TRACED_MICRO_BATCHES)

    def run(recorder: Recorder) -> Trace:
        return trace_step(
            recipe, device, batches, also=also, evaluation=evaluation, rank=rank, recorder=recorder
        )

    trace = trace_shortest(run, recipe, device, full=full)
    if data is None:
        return trace
    stated = (str(data), *([f"held out: {held_out}"] if held_out else ()))
    return dataclasses.replace(trace, bounds=(*stated, *trace.bounds))


def _judge_trace(
    trace: Trace, device: Device, settings: Settings, usable: int | None, parallel: Parallel
) -> tuple[Memory, dict[Phase, int], tuple[str, ...]]:
    """The memory of one process, the peak of each of its phases, and what was assumed."""
    if device.is_cpu:
        memory = _on_cpu(trace, device, usable, parallel)
        return memory, dict(trace.phases), trace.bounds
    replayed = replay(trace.tape, settings, trace.marks)
    if replayed.failure is not None:  # beyond the allowed fraction: say what it would take
        replayed = replay(trace.tape, replace(settings, memory_fraction=1.0), trace.marks)
    phases, overhead = peaks_by_phase(trace, replayed), find_outside(device, parallel)
    others = _replay_other_orders(trace, settings)
    memory = _on_cuda(trace, settings, (replayed, *others), phases, overhead, usable)
    if assumed := device.describe_assumed(usable):
        memory = replace(memory, because=f"{memory.because}; the limit is {assumed}")
    return memory, phases, (*trace.bounds, *_cuda_bounds(trace, settings, overhead))


def _replay_other_orders(trace: Trace, settings: Settings) -> tuple[Replay, ...]:
    """With addresses in other orders, on which expandable segments do not depend."""
    if settings.expandable_segments:
        return ()
    return tuple(replay(trace.tape, settings, order=order) for order in OTHERS)


def peaks_by_phase(trace: Trace, replayed: Replay) -> dict[Phase, int]:
    """Highest allocated bytes of each phase; a phase may come in several stretches."""
    peaks: dict[Phase, int] = {}
    for phase, stretch in zip(trace.stretches, replayed.stretches, strict=True):
        peaks[phase] = max(peaks.get(phase, 0), stretch.allocated)
    return {phase: peaks[phase] for phase in Phase if phase in peaks}


def _on_cpu(
    trace: Trace, device: Device, usable: int | None, parallel: Parallel, held: Held | None = None
) -> Memory:
    because = f"live tensors of {_what(trace)} on fake tensors, in a process"
    alone = parallel.world == 1 and Phase.GENERATE not in trace.phases
    return describe_process(trace.ledger, device, usable, because, prepared=alone, held=held)


def _on_cuda(
    trace: Trace,
    settings: Settings,
    replays: Sequence[Replay],
    phases: dict[Phase, int],
    overhead: Overhead | None,
    usable: int | None,
) -> Memory:
    """replays: with addresses that rise, which is typical, and with those in other orders."""
    phase = max(phases, key=lambda p: phases[p])
    peaks = replays[0].peaks
    reserved = [each.peaks.reserved for each in replays]
    least, most = min(reserved), max(reserved)
    entries = list(trace.ledger.at(phase))
    tensors = sum(e.nbytes for e in entries)

    def add(kind: Kind, owner: str, nbytes: int, because: str) -> None:
        if nbytes:
            entry = Entry(kind=kind, phase=phase, owner=owner, nbytes=nbytes, because=because)
            entries.append(entry)

    add(
        Kind.FRAGMENTATION, "rounding", peaks.allocated - tensors,
        "blocks are multiples of 512 B and keep remainders of up to 1 MiB",
    )  # fmt: skip
    add(
        Kind.FRAGMENTATION, "cached", peaks.reserved - peaks.allocated,
        "segments that the caching allocator holds and no tensor uses",
    )  # fmt: skip
    if overhead is not None:
        add(Kind.CONTEXT, "context", overhead.typical, overhead.because)
    verdict, why = _judge(trace, settings, most, overhead, usable)
    if least < most:
        why = f"{describe_orders(least, most)}; {why}"
    return Memory(
        peak_allocated=peaks.allocated,
        peak_reserved=peaks.reserved,
        device_total=None if overhead is None else peaks.reserved + overhead.typical,
        total_low=None if overhead is None else least + overhead.low,
        total_high=None if overhead is None else most + overhead.high,
        usable=usable,
        verdict=verdict,
        because=f"{_what(trace)} on fake tensors, through the caching allocator; {why}",
        peak_phase=phase,
        entries=tuple(entries),
    )


def _what(trace: Trace) -> str:
    if Phase.GENERATE in trace.phases:
        return f"`memfit generate`, a process of its own after the run ({trace.bounds[0]}),"
    return "the trainer's own step"


def _judge(
    trace: Trace, settings: Settings, most: int, overhead: Overhead | None, usable: int | None
) -> tuple[Verdict, str]:
    """Against the limit with the whole band of the context, not with its middle.

    most: bytes reserved, whatever the order of addresses. Where these do not fit, the tape is
    replayed under the limit: the allocator releases cached segments before it fails.
    """
    if settings.allowed is not None:
        within = replay(trace.tape, settings, trace.marks)
        if within.failure is not None:
            allowed = units.show_gib(settings.allowed)
            return "does_not_fit", f"{_fails(trace, within)}; the recipe allows itself {allowed}"
    if usable is None:
        return "unproven", "no limit is known"
    low, high = (overhead.low, overhead.high) if overhead else (0, None)
    band = f"the context is taken as {units.show_gib(low)}"
    band += f" to {units.show_gib(high)}" if high is not None else " or more: it is unknown"
    if high is not None and most + high <= usable:
        return "fits", band
    tight = _replay_within(trace, replace(settings, capacity=max(usable - low, 0)))
    if tight.failure is not None:
        return "does_not_fit", f"{_fails(trace, tight)}; {band}"
    if tight.retries:
        return "at_risk", f"it fits only by giving cached segments back; {band}"
    return "at_risk" if high is not None else "unproven", f"{band}, which straddles the limit"


def _replay_within(trace: Trace, settings: Settings) -> Replay:
    """Under a limit: the first order of addresses that keeps within it; where none does, rising."""
    rising = replay(trace.tape, settings, trace.marks)
    if rising.failure is None or settings.expandable_segments:
        return rising
    others = (replay(trace.tape, settings, trace.marks, order) for order in OTHERS)
    return next((each for each in others if each.failure is None), rising)


def _fails(trace: Trace, stopped: Replay) -> str:
    assert stopped.failure is not None
    phase = trace.stretches[len(stopped.stretches) - 1]
    wanted = units.show_bytes(stopped.failure.nbytes)
    held = units.show_gib(stopped.failure.reserved)
    return f"an allocation of {wanted} fails in {phase} at {held}"


def _cuda_bounds(trace: Trace, settings: Settings, overhead: Overhead | None) -> tuple[str, ...]:
    set_to = f"set to {settings.text}" if settings.text else "at its defaults"
    streams = len({event.stream for event in trace.tape if event.nbytes > 0})
    several = "one stream" if streams == 1 else f"{streams} streams, each with pools of its own"
    bounds = [f"{several}; the CUDA allocator {set_to}"]
    if settings.garbage_collection_threshold and settings.allowed is None:
        bounds.append("garbage_collection_threshold does nothing without a memory fraction below 1")
    if overhead is not None and not overhead.verified:
        bounds.append("the context's band comes from published figures, not from this device")
    return tuple(bounds)


def _torch_bounds() -> tuple[str, ...]:
    """A torch that nobody has tried passed the self-check, and a reader should know that."""
    if release(version("torch")) <= release(NEWEST_TORCH):
        return ()
    newer = f"torch {version('torch')} is newer than {NEWEST_TORCH}, the newest tried"
    return (f"{newer}: the self-check found nothing that it imitates wrongly",)
