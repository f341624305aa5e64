"""How every rank of a job is started: torchrun, and what a scheduler says of its machines."""

from __future__ import annotations

from typing import NamedTuple

from memfit.errors import InvalidRequest, UnknownName
from memfit.export import Draft, Job, exports
from memfit.export._files import File

# whose files start a plan of this framework, and the file that is run
TRAINERS = {
    "megatron": "megatron", "torchtitan": "torchtitan", "trl": "trl", "deepspeed": "deepspeed",
    "hf-trainer": "accelerate",
}  # fmt: skip


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


class Trained(NamedTuple):
    """The trainer's part of a launcher's export."""

    files: tuple[File, ...]
    left: dict[str, str]
    script: str  # lines of bash, run on every machine


def find_trainer(job: Job, machines: Machines) -> Trained:
    """What a launcher starts: the files of the plan's own trainer, and the command."""
    name = job.recipe.framework
    if name == "memfit":
        from memfit.nouns import to_data

        plan = File(name="plan.json", data=to_data(job.plan))
        train = "memfit train plan.json --folder run"
        if job.nodes == 1:  # it starts the ranks of one machine itself
            return Trained((plan,), {}, f"{train}\n")
        return Trained((plan,), {}, f"{torchrun(job, machines)} -m {train}\n")
    if name not in TRAINERS:
        see = f"launchers start plans of {', '.join(['memfit', *TRAINERS])}"
        raise UnknownName("trainer to start", name, TRAINERS, see=see)
    target = exports.find(TRAINERS[name])
    draft = target.draft(job)
    from memfit.export import find_unsaid

    left = {**find_unsaid(job.recipe, target.says), **draft.left}
    return Trained(draft.files, left, _script(job, draft, machines))


def _script(job: Job, draft: Draft, machines: Machines) -> str:
    name = job.recipe.framework
    around = f'export NODE_RANK="{machines.rank}" MASTER_ADDR="{machines.address}"\n'
    if name == "megatron":
        return f"{around}bash megatron.sh\n"
    if name == "torchtitan":
        from memfit.export.torchtitan import arguments

        return f"{around}{torchrun(job, machines)} {arguments()}\n"
    if name == "deepspeed":
        return f"{around}{torchrun(job, machines)} train.py --deepspeed deepspeed.json\n"
    start = draft.start.replace('"$RANK"', f'"{machines.rank}"')
    return around + start.replace('"$MASTER_ADDR"', f'"{machines.address}"') + "\n"
