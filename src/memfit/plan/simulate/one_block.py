"""One block without data: saved, recomputed whole or in part, or waiting in host memory."""

from __future__ import annotations

import msgspec

from memfit import meta
from memfit.families.capabilities.added import only_added
from memfit.families.shared.forward import Forward, Weights, module
from memfit.meta import Tensor
from memfit.meta.distributed.offload import Load
from memfit.plan.simulate.program import Program
from memfit.plan.simulate.setting import Block


@module
def run_block(
    forward: Forward,
    program: Program,
    weights: Weights,
    x: Tensor,
    shared: tuple[Tensor, ...],
    block: Block,
    before: Load | None,
) -> tuple[Tensor, Load | None]:
    """The block's output, and what it saves where that is offloaded; before: the block below."""
    load = None
    if block.offloads:
        others = shared if forward.band is None else (*shared, forward.band)
        load = Load(forward.meter, before, others)
    with forward.meter.saving_to(load):
        if block.recomputed:
            out = _recompute(forward, program, weights, x, shared, block)
        else:
            out = program.block(forward, weights, x, shared)
    if load is not None:
        load.known.clear()
    if before is not None:
        before.leaving.clear()
    return out, load


def _recompute(
    forward: Forward,
    program: Program,
    weights: Weights,
    x: Tensor,
    shared: tuple[Tensor, ...],
    block: Block,
) -> Tensor:
    if block.reentrant:
        return meta.checkpoint_reentrant(lambda x: program.block(forward, weights, x, shared), x)
    if block.selective:
        matrices = [name for name, weight in weights.items() if len(weight.shape) == 2]
        added = only_added(forward.architecture, matrices)
        forward = msgspec.structs.replace(forward, only_added=added)
    return meta.checkpoint(
        lambda x: program.block(forward, weights, x, shared), x, selective=block.selective
    )
