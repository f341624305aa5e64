"""FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`): one flat parameter a unit.

Source: torch 2.2, distributed/fsdp/_flat_param.py and _runtime_utils.py. A unit's flat parameter
has one gradient, frozen parts included, if any part of it is trained (`use_orig_params=True`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memfit.core.units import show_bytes
from memfit.plan.frameworks import Job, make_ledger
from memfit.plan.frameworks.shared.assembly import (
    GRADIENTS,
    Held,
    Simulated,
    assemble,
    cublas,
    without,
)
from memfit.plan.simulate.blocks import AFTER_PRODUCT
from memfit.plan.simulate.segments import Passes, Segment
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.model import Model, Weight

GATHERED, GROWN = (Kind.ALL_GATHER, "units"), (GRADIENTS, "units")
IN_FLIGHT = 2  # units gathered at once: `limit_all_gathers`, and the one that backward prefetches


class Units(msgspec.Struct, frozen=True):
    """Bytes of the flat parameters, unsharded."""

    block: int
    blocks: int  # of all blocks together
    root: int
    root_trained: bool
    head: int  # its gradient, which waits until the embedding's is there

    @property
    def trained(self) -> int:
        """Unsharded bytes of the gradients."""
        return self.blocks + (self.root if self.root_trained else 0)


def find_units(model: Model) -> Units:
    """One unit a block; embedding, final norm and head in the root's."""
    by_layer: dict[int, int] = {}
    for w in model.weights:
        by_layer[w.layer] = by_layer.get(w.layer, 0) + w.nbytes
    root = by_layer.pop(-1)
    outside = [w for w in model.weights if w.layer < 0]
    return Units(
        block=max(by_layer.values()),
        blocks=sum(by_layer.values()),
        root=root,
        root_trained=any(w.trainable for w in outside),
        head=sum(w.nbytes for w in outside if w.part == "head" and w.trainable),
    )


def shard(job: Job, model: Model, simulated: Simulated, states: Held, update: Held) -> Ledger:
    """The ledger of the fullest rank; states, update: of its shard.

    While micro-batches accumulate (`no_sync`) gradients stay unsharded. A unit's gradient is
    joined from its parts (and zeros where they are frozen): twice its bytes for a moment.
    """
    units, ranks = find_units(model), job.recipe.parallel.dp_shard
    divisor = 1 if job.recipe.accumulation > 1 else ranks
    first, later = without(simulated.first, GRADIENTS), simulated.later
    if later is not None:
        later = without(later, GRADIENTS)
        if job.recipe.accumulation == 1:  # of the next step, whose gradients grow anew
            later = _growing(later, units, divisor)
    grown = _growing(first, units, divisor)
    simulated = Simulated(grown, later, simulated.counts, simulated.setting)
    shards = (units.blocks + units.root) // ranks
    held: dict[tuple[Kind, str], tuple[int, str]] = {
        (Kind.PARAMETERS, "shards"): (shards, f"1/{ranks} of every flat parameter"),
        **states, **cublas(job.device),
    }  # fmt: skip
    gathered = units.root + IN_FLIGHT * units.block
    passing: Held = {
        GATHERED: (gathered, f"the root's unit, {IN_FLIGHT} blocks of {show_bytes(units.block)}")
    }
    joined: Held = {
        (Kind.TEMPORARY, "units"): (
            2 * units.block + units.head,
            "a block's gradients and the flat one they are joined to; the head's, waiting",
        )
    }
    whole: Held = {
        GATHERED: (units.blocks + units.root, "every unit, whole, while it is filled from a file")
    }
    back = {**passing, **joined}
    reason = (
        "of all units, unsharded while accumulating" if divisor == 1 else f"1/{ranks} of each unit"
    )
    step = {**update, GROWN: (units.trained // ranks - units.trained // divisor, reason)}
    ledger = assemble(
        job, simulated, load={**_loaded(held), **whole}, held=held, update=step,
        during={
            Phase.FORWARD: passing, Phase.LOSS: passing, Phase.BACKWARD: back,
            Phase.ACCUMULATE: back,
        },
    )  # fmt: skip
    if not units.root_trained:
        return ledger
    end = {**held, GROWN: (units.trained // divisor, reason)}
    return _higher(ledger, _root_end(units, end))


def shard_frozen(
    job: Job,
    weights: Sequence[tuple[Weight, int]],
    simulated: Simulated,
    whole: Held,
    states: Held,
    update: Held,
) -> Ledger:
    """Adapters in units of their own beside frozen ones, which have no gradient.

    weights: each with its bytes as stored; whole: what is no parameter, and on every rank; states,
    update: of the shard. With `offload: parameters` shards and states are in the host's memory.
    """
    ranks, away = job.recipe.parallel.dp_shard, job.recipe.offload == "parameters"
    by_layer: dict[int, int] = {}
    for w, nbytes in weights:
        by_layer[w.layer] = by_layer.get(w.layer, 0) + (0 if w.trainable else nbytes)
    root = by_layer.pop(-1)
    block = max(by_layer.values())
    trained = sum(nbytes for w, nbytes in weights if w.trainable)
    gathered: Held = {
        GATHERED: (
            root + IN_FLIGHT * block,
            f"the root's unit, {IN_FLIGHT} blocks of {show_bytes(block)}",
        )
    }
    held: dict[tuple[Kind, str], tuple[int, str]] = {**whole, **cublas(job.device)}
    if not away:
        total = sum(nbytes for _, nbytes in weights) // ranks
        held[Kind.PARAMETERS, "shards"] = (total, f"1/{ranks} of every flat parameter")
        held |= states
        held[GROWN] = (trained // ranks, f"1/{ranks} of the adapters' gradients")
    bare = Simulated(
        without(simulated.first, GRADIENTS),
        None if simulated.later is None else without(simulated.later, GRADIENTS),
        simulated.counts,
        simulated.setting,
    )
    phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE)
    return assemble(
        job, bare, load=_loaded(held), held=held, update={} if away else update,
        during=dict.fromkeys(phases, gathered),
    )  # fmt: skip


def _loaded(held: Held) -> Held:
    """What is there before the first step."""
    return {key: value for key, value in held.items() if key[0] is Kind.PARAMETERS}


def _growing(passes: Passes, units: Units, divisor: int) -> Passes:
    """The passes whose backward leaves each block's gradient, and at last the root's.

    Nothing is left to gather ahead when the first block is reached.
    """
    backward: list[Segment] = []
    for segment in passes.backward:
        net, top, rise = dict(segment.net), dict(segment.top), segment.rise
        if segment.name.startswith("block ") and not segment.name.endswith(AFTER_PRODUCT):
            net[GROWN] = net.get(GROWN, 0) + units.block // divisor
        if segment.name == "block 0":
            top[GATHERED] = top.get(GATHERED, 0) - units.block
            rise -= units.block
        if segment.name == "embedding" and units.root_trained:
            net[GROWN] = net.get(GROWN, 0) + units.root // divisor
        backward.append(Segment(segment.name, net, rise, top))
    return Passes(passes.forward, passes.loss, backward)


def _root_end(units: Units, held: Held) -> Ledger:
    """The end of a backward, where the root's gradient is joined and no block is gathered."""
    parts = dict(held)
    parts[GATHERED] = (units.root, "the root's unit")
    parts[Kind.TEMPORARY, "units"] = (2 * units.root, "the root's gradients and the flat one")
    return make_ledger({Phase.BACKWARD: parts})


def _higher(ledger: Ledger, other: Ledger) -> Ledger:
    """Return the ledger, with the backward of `other` where that one has more bytes."""
    if other.total(Phase.BACKWARD) <= ledger.total(Phase.BACKWARD):
        return ledger
    rest = tuple(e for e in ledger.entries if e.phase is not Phase.BACKWARD)
    return Ledger(entries=rest + other.entries)
