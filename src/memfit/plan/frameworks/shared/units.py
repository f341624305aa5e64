"""FSDP as accelerate makes it, simulated unit by unit.

Source: accelerate 1.15 (accelerator.py: prepare_model, no_sync; utils/fsdp_utils.py:
fsdp2_prepare_model; utils/dataclasses.py: set_mixed_precision), torch 2.13.

`fsdp_version: 1` is FullyShardedDataParallel: a flat parameter a block, and one of all that is
outside, whole from a forward's beginning to its backward's end. `fsdp_version: 2` is `fully_shard`:
the embedding, each block, and the final norm with the head are units, or these ends with a tied
embedding; of a model with adapters the norm stays in the root's, as it is looked for one module too
high. Under mixed precision what is trained is made fp32, gathered and reduced in 16 bits; version 1
is autocast besides, 2 is not. While micro-batches accumulate, gradients wait unsharded. Offloaded
shards, their gradients, the optimizer's states and its step are on the host.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from memfit.base_formats import is_quantised
from memfit.core.errors import InvalidRequest
from memfit.core.units import show_bytes
from memfit.families.shared.masks import Masking
from memfit.meta.distributed.sharding import SHARDS, Sharding
from memfit.plan.frameworks import Job
from memfit.plan.frameworks.hugging_face.pairs import TILED
from memfit.plan.frameworks.hugging_face.states import by_bitsandbytes
from memfit.plan.frameworks.shared.assembly import (
    Held,
    Simulated,
    assemble,
    cublas,
    run_passes,
    without,
)
from memfit.plan.simulate.program import Comparing, Program
from memfit.records.ledger import Entry, Kind, Ledger, Phase
from memfit.records.model import Model, Weight
from memfit.records.recipe import Recipe

Hold = Callable[[Model], Held]
LOW = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}


def asks_version_2(job: Job) -> bool:
    """Whether a job's shards are FSDP2's."""
    return job.recipe.parallel.dp_shard > 1 and job.recipe.options.get("fsdp_version") == 2


def asks_units(job: Job) -> bool:
    """Whether a job's shards are of units that are simulated here: not FSDP1's with frozen ones."""
    shards = job.recipe.parallel.dp_shard > 1
    return asks_version_2(job) or (shards and job.recipe.method == "full")


def predict_units(
    job: Job, model: Model, program: Program, kernel: str, *, weights: Hold, states: Hold,
    update: Hold, compares: Comparing | None = None, masking: Masking | None = None,
) -> Ledger:  # fmt: skip
    """The ledger of the first rank, whose shards are the largest.

    weights, states, update: what holds a model's parameters, its optimizer's states, and what an
    update needs beside them, called with a rank's shards. compares: the loss of pairs;
    masking: of Hugging Face's own attention.
    """
    recipe = job.recipe
    low, flat = LOW.get(recipe.precision, ""), not asks_version_2(job)
    model = widened(recipe, model)
    sharding = Sharding(
        shards=recipe.parallel.dp_shard, shard=0, copies=1, reshards=recipe.parallel.zero == 3,
        low=low, wide=low, ends=("head",) if recipe.method == "lora" else ("norm", "head"),
        joins=not flat, reads=_reads_head(job), defers=True, flat=flat,
        on_host=recipe.offload == "parameters",
    )  # fmt: skip
    simulated = run_passes(
        job, model, program, kernel, sharding=sharding, compares=compares, masking=masking
    )
    local = _flattened(model, sharding) if flat else _cut(model, sharding)
    held = {**cublas(job.device)}
    largest = max(w.nbytes for w in model.weights)
    reason = f"the largest weight, {show_bytes(largest)}, whole while it is shared out"
    if flat:
        largest = 2 * sharding.shards * max(w.nbytes for w in local.weights)
        reason = f"the largest unit, {show_bytes(largest // 2)}, and what it is flattened to"
    load = weights(replace(model, weights=()) if sharding.on_host else local)
    held |= load
    load = {**load, (Kind.TEMPORARY, "loading"): (largest, reason)}
    if not sharding.on_host:
        held |= states(local)

    def lay(passes: Simulated) -> Ledger:
        step = {} if sharding.on_host else update(local)
        return assemble(job, passes, load=load, held=held, update=step)

    found = lay(simulated)
    if job.device.is_cpu:
        return found
    later = simulated.later
    bare = Simulated(
        without(simulated.first, Kind.GRADIENTS, SHARDS),
        None if later is None else without(later, Kind.GRADIENTS, SHARDS),
        simulated.counts,
        simulated.setting,
    )
    return _add_pools(found, lay(bare), model, sharding)


def widened(recipe: Recipe, model: Model) -> Model:
    """Under mixed precision what is trained is stored in fp32."""
    if recipe.precision not in LOW:
        return model
    wide = (replace(w, dtype="float32") if w.trainable else w for w in model.weights)
    return replace(model, weights=tuple(wide))


def _reads_head(job: Job) -> bool:
    """Whether TRL's loss from tiles takes the weight of a head that is a unit of its own.

    Nothing runs such a unit; one with the norm or an embedding is gathered when these run.
    """
    recipe = job.recipe
    alone = recipe.method == "lora" and not job.model.architecture.tied_embeddings
    return alone and asks_version_2(job) and recipe.options.get("version") == TILED


def _cut(model: Model, sharding: Sharding) -> Model:
    """A rank's share of each weight."""
    cut = (replace(w, shape=sharding.local(w.shape)) for w in model.weights)
    return replace(model, weights=tuple(cut))


def _flattened(model: Model, sharding: Sharding) -> Model:
    """A rank's share of the flat parameters: one a block, and one of all that is outside."""
    first: dict[int, Weight] = {}
    elements: dict[int, int] = {}
    for w in model.weights:
        first.setdefault(w.layer, w)
        elements[w.layer] = elements.get(w.layer, 0) + w.numel
    parts = {layer: (-(-n // sharding.shards),) for layer, n in elements.items()}
    flat = (replace(first[layer], name="_flat_param", shape=parts[layer]) for layer in parts)
    return replace(model, weights=tuple(flat))


def _add_pools(found: Ledger, bare: Ledger, model: Model, sharding: Sharding) -> Ledger:
    """With what is reserved beside each phase's peak for two streams, whose pools are their own.

    bare: without a rank's reduced gradients. These fill a pool from which no other stream takes,
    so that a phase reserves the most it has beside them, and all of the pool. Gradients on their
    way to the host leave theirs to the next unit's; FSDP1 keeps them so long.
    """
    gathered: dict[int, int] = {}
    own: dict[int, int] = {}
    for w in model.weights:
        each = w.numel * (2 if sharding.low or w.dtype != "float32" else 4)
        gathered[w.layer] = gathered.get(w.layer, 0) + each
        part = sharding.padded(w.shape) * (w.nbytes // w.numel) if w.trainable else 0
        own[w.layer] = own.get(w.layer, 0) + part
    block = max(nbytes for layer, nbytes in gathered.items() if layer >= 0)
    passing = sharding.on_host and not sharding.flat
    reduced = max(own.values()) if passing else sum(own.values())
    pools = []
    for phase in found.phases:
        idle = max(0, bare.total(phase) + reduced - found.total(phase))
        reason = f"pools of two streams: two gathered blocks of {show_bytes(block)}"
        reason += f"; {show_bytes(idle)} of reduced gradients' that no other stream takes"
        entry = Entry(
            kind=Kind.FRAGMENTATION, phase=phase, owner="streams", nbytes=2 * block + idle,
            because=reason,
        )  # fmt: skip
        pools += [entry] if phase is not Phase.LOAD else []
    return Ledger(entries=(*found.entries, *pools))


def check_units(job: Job) -> None:
    """Raise InvalidRequest for what accelerate's FSDP2 has, and is not described here."""
    recipe = job.recipe
    if is_quantised(recipe.base_format):
        raise InvalidRequest(
            f"`base_format: {recipe.base_format}` under accelerate's FSDP2 is not described: it"
            " leaves 4-bit weights whole or cuts them, by the dtype they are stored as",
            hint="`options.fsdp_version: 1`, or `base_format: bf16`",
        )
    if by_bitsandbytes(recipe):
        raise InvalidRequest(
            f"`optimizer: {recipe.optimizer.name}` of bitsandbytes under accelerate's FSDP2: its"
            " first step fails, as it takes no weights that are cut (DTensor)",
            hint="torchao's: `options.adamw8bit: torchao` (`optim: adamw_torch_8bit`)",
        )
    if _reads_head(job) and recipe.offload == "parameters":
        raise InvalidRequest(
            f"`offload: parameters` under accelerate's FSDP2 with adapters and TRL {TILED}'s loss,"
            " which reads the head's weight where it waits, on the host, is not described",
            hint="`offload: none`, or `options.version: '0.29'`",
        )
    if recipe.scaled:
        raise InvalidRequest(
            f"`precision: {recipe.precision}` under accelerate's FSDP2 is not described",
            hint="`precision: bf16-mixed`",
        )
