"""FSDP2 as accelerate makes it (`fsdp_version: 2`): units of `fully_shard`, simulated.

Source: accelerate 1.15 (utils/fsdp_utils.py: fsdp2_prepare_model; Accelerator.no_sync), torch 2.13.
The embedding, each block, and the final norm with the head are units; of a model with adapters the
norm stays in the root's, as it is looked for one module too high. Under mixed precision what is
trained is made fp32, gathered and reduced in 16 bits, and nothing is autocast. While micro-batches
accumulate, gradients wait unsharded.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from memfit.errors import InvalidRequest
from memfit.ledger import Kind, Ledger
from memfit.model import Model
from memfit.plan.frameworks import Job
from memfit.plan.frameworks._assembly import Held, assemble, cublas, run_passes
from memfit.plan.program import Program
from memfit.sizes.sharding import Sharding
from memfit.units import show_bytes

Hold = Callable[[Model], Held]
LOW = {"bf16-mixed": "bfloat16"}


def asks_units(job: Job) -> bool:
    """Whether a job's shards are FSDP2's."""
    return job.recipe.parallel.dp_shard > 1 and job.recipe.options.get("fsdp_version") == 2


def predict_units(
    job: Job, model: Model, program: Program, kernel: str, *, weights: Hold, states: Hold,
    update: Hold,
) -> Ledger:  # fmt: skip
    """The ledger of the first rank, whose shards are the largest.

    weights, states, update: what holds a model's parameters, its optimizer's states, and what an
    update needs beside them; asked of a rank's shards.
    """
    recipe = job.recipe
    low = LOW.get(recipe.precision, "")
    if low:
        model = replace(model, weights=tuple(
            replace(w, dtype="float32") if w.trainable else w for w in model.weights
        ))  # fmt: skip
    sharding = Sharding(
        shards=recipe.parallel.dp_shard, shard=0, copies=1, reshards=recipe.parallel.zero == 3,
        low=low, wide=low, ends=("head",) if recipe.method == "lora" else ("norm", "head"),
        defers=True,
    )  # fmt: skip
    simulated = run_passes(job, model, program, kernel, sharding=sharding)
    local = replace(
        model, weights=tuple(replace(w, shape=sharding.local(w.shape)) for w in model.weights)
    )
    shards = weights(local)
    held = {**shards, **states(local), **cublas(job.device), **_streams(job, model, sharding)}
    largest = max(w.nbytes for w in model.weights)
    said = f"the largest weight, {show_bytes(largest)}, whole while it is shared out"
    load: Held = {**shards, (Kind.TEMPORARY, "loading"): (largest, said)}
    return assemble(job, simulated, load=load, held=held, update=update(local))


def _streams(job: Job, model: Model, sharding: Sharding) -> Held:
    """Gathers and reductions have pools of their own, from which no other stream takes."""
    if job.device.is_cpu:
        return {}
    units: dict[int, int] = {}
    own = 0
    for w in model.weights:
        each = w.numel * (2 if sharding.low or w.dtype != "float32" else 4)
        units[w.layer] = units.get(w.layer, 0) + each
        own += sharding.padded(w.shape) * (w.nbytes // w.numel) if w.trainable else 0
    block = max(nbytes for layer, nbytes in units.items() if layer >= 0)
    said = f"pools of two streams: two gathered blocks of {show_bytes(block)}, a rank's gradients"
    return {(Kind.FRAGMENTATION, "streams"): (2 * block + own, said)}


def check_units(job: Job) -> None:
    """Raise InvalidRequest for what accelerate's FSDP2 has, and is not described here."""
    recipe = job.recipe
    if recipe.base_format in ("nf4", "fp4", "int8"):
        raise InvalidRequest(
            f"`base_format: {recipe.base_format}` under accelerate's FSDP2 is not described: it"
            " leaves 4-bit weights whole or cuts them, by the dtype they are stored as",
            hint="`options.fsdp_version: 1`, or `base_format: bf16`",
        )
    if recipe.offload != "none":
        raise InvalidRequest(
            f"`offload: {recipe.offload}` under accelerate's FSDP2 is not described",
            hint="`options.fsdp_version: 1`, or `offload: none`",
        )
    if recipe.scaled:
        raise InvalidRequest(
            f"`precision: {recipe.precision}` under accelerate's FSDP2 is not described",
            hint="`precision: bf16-mixed`",
        )
