"""torchrun's command line, and what a scheduler says of its machines."""

from __future__ import annotations

from typing import NamedTuple

from memfit.core.errors import InvalidRequest
from memfit.export.target import Job


class Machines(NamedTuple):
    """Shell words for what differs from machine to machine."""

    rank: str = "${NODE_RANK:-0}"
    address: str = "${MASTER_ADDR:-localhost}"


def torchrun(job: Job, machines: Machines = Machines()) -> str:  # noqa: B008 (a constant)
    """`torchrun` with its options, up to the script."""
    if job.world % job.per_node:
        raise InvalidRequest(
            f"{job.world} ranks do not fill machines of {job.per_node} devices",
            hint="`hardware: {count: …, nodes: …}`",
        )
    words = f"torchrun --nproc-per-node={job.per_node}"
    if job.nodes == 1:
        return f"{words} --standalone"
    return (
        f'{words} --nnodes={job.nodes} --node-rank="{machines.rank}"'
        f' --master-addr="{machines.address}" --master-port=29500'
    )
