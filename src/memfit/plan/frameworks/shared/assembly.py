"""A step of another framework, laid end to end: what is always held, the passes, the update.

Shared by the frameworks whose forward is simulated over `memfit.meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import msgspec

from memfit.core.units import show_bytes
from memfit.families.capabilities.limits import own_kernels
from memfit.families.shared.masks import Masking
from memfit.meta.attending.kernels import heads_of, usable
from memfit.meta.distributed.sharding import Sharding
from memfit.meta.meter import block_size
from memfit.meta.workspace import find_grid, product_workspace
from memfit.plan.frameworks import Job, make_ledger
from memfit.plan.memory.predicted_memory import without_shape
from memfit.plan.simulate.blocks import (
    ROUNDING,
    Part,
    Parts,
    find_runs,
    repeats,
    shorten,
    split_rows,
)
from memfit.plan.simulate.closed_form import Answers, find_answers
from memfit.plan.simulate.program import Comparing, Program
from memfit.plan.simulate.segments import Level, Passes, Segment, expand
from memfit.plan.simulate.setting import Attention, Batch, Loss, Precision, Repeat, Setting
from memfit.records.hardware import Device
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.model import DTYPE_BYTES, Model
from memfit.records.recipe import Recipe

Held = Mapping[Part, tuple[int, str]]  # kind, owner -> bytes, because
GRADIENTS, INPUTS = Kind.GRADIENTS, (Kind.INPUT, "batch")
OF_TOKENS, OF_PAIRS = 2, 3  # tensors of a batch: tokens and labels; which are padding, too


class Simulated(msgspec.Struct, frozen=True):
    """The passes of one rank's micro-batches, and how often each block stands in the model."""

    first: Passes
    later: Passes | None
    counts: list[Repeat]
    setting: Setting


def attention_kernel(job: Job) -> str:
    """Return the requested kernel, or the one that torch takes where that one cannot run."""
    recipe, device = job.recipe, job.device
    own = own_kernels(job.model.architecture)
    if own:  # of the class itself, whatever is asked for
        return own[0]
    runs = usable(
        recipe.compute_dtype, heads_of(job.model.architecture, 0),  # their flash knows windows
        platform=device.platform, capability=device.capability,
    )  # fmt: skip
    return recipe.attention if recipe.attention in runs else runs[0]


def run_passes(
    job: Job,
    model: Model,
    program: Program,
    kernel: str,
    *,
    two_steps: bool = False,
    sharding: Sharding | None = None,
    compares: Comparing | None = None,
    second: str = "",
    caches: bool = False,
    masking: Masking | None = None,
) -> Simulated:
    """Simulate the micro-batches; model: with the dtypes and names that `program` needs.

    two_steps: a step with one micro-batch is followed by the next step's: for loops whose variables
    hold what the one before has made. sharding: of one rank; FSDP2's units autocast nothing.
    compares: the loss of pairs; second: the dtype of a second model, where that is the reference.
    caches: whether autocast keeps its casts of trained weights until a forward has ended.
    masking: of Hugging Face's own attention.
    """
    recipe = job.recipe
    answers, counts = _describe(
        model,
        without_shape(recipe),
        program,
        kernel,
        job.device,
        two_steps,
        sharding,
        compares,
        second,
        caches,
        masking,
    )
    first, *later = answers.passes(_batch(recipe.micro_batch, recipe.sequence_length), _batch)
    return Simulated(first, later[0] if later else None, counts, answers.setting)


@lru_cache(maxsize=256)
def _describe(
    model: Model,
    recipe: Recipe,
    program: Program,
    kernel: str,
    device: Device,
    two_steps: bool,
    sharding: Sharding | None,
    compares: Comparing | None,
    second: str,
    caches: bool,
    masking: Masking | None,
) -> tuple[Answers, list[Repeat]]:
    """The passes of any shape, and how often each block stands in the model."""
    outside, blocks = split_rows(model, recipe.recompute_blocks)
    if recipe.options.get("reentrant"):
        blocks = [msgspec.structs.replace(one, reentrant=one.recomputed) for one in blocks]
    runs = find_runs(blocks)
    setting = Setting(
        architecture=msgspec.structs.replace(model.architecture, layers=0),
        outside=outside,
        runs=shorten(runs),
        attention=Attention(kernel=kernel, masking=masking),
        precision=Precision(
            autocast=recipe.autocast and (sharding is None or sharding.flat),
            compute=recipe.compute_dtype,
            caches=caches and recipe.autocast,
            scaled=recipe.scaled,
        ),
        loss=Loss(
            chunk=recipe.loss_chunk,
            references=recipe.references if compares is not None else 0,
            compares=compares,
            second=second,
        ),
        cuda=not device.is_cpu,
        grid=find_grid(device),
        adapter_dropout=recipe.lora.dropout > 0,
        micro_batches=(
            "of_one_step" if recipe.accumulation > 1 else "of_two_steps" if two_steps else "one"
        ),
        program=program,
        sharding=sharding,
    )
    return find_answers(setting), repeats(runs)


def _batch(rows: int, tokens: int) -> Batch:
    return Batch(rows=rows, tokens=tokens, documents=None)


def without(passes: Passes, kind: Kind, owner: str = "") -> Passes:
    """The same passes where these bytes are never there: another part of the ledger holds them.

    owner: whose alone; "" is all.
    """

    def left(parts: Parts) -> Parts:
        return {p: n for p, n in parts.items() if p[0] is not kind or owner not in ("", p[1])}

    def strip(segment: Segment) -> Segment:
        top = left(segment.top)
        gone = sum(segment.top.values()) - sum(top.values())
        return Segment(segment.name, left(segment.net), segment.rise - gone, top)

    return Passes(*([strip(s) for s in stretch] for stretch in _stretches(passes)))


def _stretches(passes: Passes) -> tuple[list[Segment], list[Segment], list[Segment]]:
    return passes.forward, passes.loss, passes.backward


def cublas(device: Device) -> Held:
    """The workspaces of the forward's thread and of autograd's."""
    each = 0 if device.is_cpu else product_workspace(device)
    return {
        (Kind.WORKSPACE, "cublas"): (2 * each, f"2 threads x {show_bytes(each)}, kept by the first")
    }


def ddp_buckets(model: Model) -> Held:
    """DDP's buckets: a copy of every gradient, from the first backward on."""
    nbytes = sum(w.nbytes for w in model.weights if w.trainable)
    reason = f"DDP's buckets: a copy of every gradient, {show_bytes(nbytes)}"
    return {(Kind.GRADIENTS, "buckets"): (nbytes, reason)}


def rounded(nbytes: Iterable[int]) -> int:
    """Bytes of the blocks that hold these tensors on CUDA."""
    return sum(map(block_size, nbytes))


def assemble(
    job: Job,
    simulated: Simulated,
    *,
    load: Held,
    held: Held,
    update: Held,
    during: Mapping[Phase, Held] | None = None,
    before: Callable[[Level], None] | None = None,
    reasons: Mapping[Part, str] | None = None,
) -> Ledger:
    """The ledger of an optimizer step that is not the first.

    load: at the end of loading; held: in every later instant; update: beside gradients, at the
    worst moment of the optimizer's step; during: of the passes named, in each instant; before:
    what happens between steps, whose phases it notes; reasons: of what it makes.
    """
    level = Level()
    level.add(_bytes(held))
    if before is not None:
        before(level)
    tensors = OF_PAIRS if job.recipe.prefers else OF_TOKENS
    level.add({INPUTS: tensors * job.recipe.tokens * DTYPE_BYTES["int64"]})
    extra = during or {}
    why: dict[Part, str] = dict(reasons or {})
    for parts in (load, held, update, *extra.values()):
        why |= {part: because for part, (_, because) in parts.items()}
    _walk(level, simulated.first, simulated.counts, extra)
    if simulated.later is not None:
        if job.recipe.accumulation == 1:  # of the next step
            level.add({p: -n for p, n in level.live.items() if p[0] is GRADIENTS})
        later = _bytes(extra.get(Phase.ACCUMULATE, {}))
        for stretch in _stretches(simulated.later):
            for segments, times in expand(stretch, simulated.counts):
                level.add(later)
                level.walk(Phase.ACCUMULATE, segments, times)
                level.add(later, -1)
        level.note(Phase.ACCUMULATE)
    elif job.recipe.accumulation > 1:  # by shorter samples, of which nothing is known
        level.note(Phase.ACCUMULATE, _bytes(extra.get(Phase.ACCUMULATE, {})))
    level.note(Phase.OPTIMIZER_STEP, _bytes(update))
    instants = {Phase.LOAD: dict(load)}
    for phase, (_, alive) in level.peaks.items():
        instants[phase] = _named(alive, why)
    return make_ledger(instants)


def _walk(level: Level, passes: Passes, counts: list[Repeat], extra: Mapping[Phase, Held]) -> None:
    phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD)
    for phase, stretch in zip(phases, _stretches(passes), strict=True):
        more = _bytes(extra.get(phase, {}))
        level.add(more)
        for segments, times in expand(stretch, counts):
            level.walk(phase, segments, times)
        level.note(phase)
        level.add(more, -1)


def _bytes(held: Held) -> Parts:
    return {part: nbytes for part, (nbytes, _) in held.items()}


def _named(parts: Parts, why: Mapping[Part, str]) -> dict[Part, tuple[int, str]]:
    return {
        part: (nbytes, why.get(part) or f"{show_bytes(nbytes)} of {part[0]} of the {part[1]}")
        for part, nbytes in sorted(parts.items())
        if nbytes and (part != ROUNDING or nbytes > 0)
    }


def owners(model: Model, nbytes: Callable[[str, tuple[int, ...]], int]) -> dict[str, list[int]]:
    """Bytes of each parameter by component; nbytes: of a dtype and a shape."""
    found: dict[str, list[int]] = {}
    for w in model.weights:
        part = "blocks" if w.part == "block" else w.part
        found.setdefault(part, []).append(nbytes(w.dtype, w.shape))
    return found
