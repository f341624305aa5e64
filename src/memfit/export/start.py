"""How every rank of a job is started: torchrun, and what a scheduler says of its machines."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from memfit.core.errors import UnknownName
from memfit.export.files import File
from memfit.export.needs import Need
from memfit.export.target import Draft, Job, exports
from memfit.export.torchrun import Machines, torchrun
from memfit.records.results import Plan

# whose files start a plan of this framework, and the file that is run
TRAINERS = {
    "megatron": "megatron", "torchtitan": "torchtitan", "trl": "trl", "deepspeed": "deepspeed",
    "hf-trainer": "accelerate",
}  # fmt: skip


class Trained(NamedTuple):
    """The trainer's part of a launcher's export."""

    files: tuple[File, ...]
    left: dict[str, str]
    script: str  # lines of bash, run on every machine
    needs: tuple[Need, ...] = ()
    notes: tuple[str, ...] = ()


def find_trainer(job: Job, machines: Machines) -> Trained:
    """What a launcher starts: the files of the plan's own trainer, and the command."""
    name = job.recipe.framework
    if job.recipe.is_own:
        from memfit.records import to_data

        plan = File(name="plan.json", data=to_data(with_whole_paths(job.plan)))
        notes = tuple(
            f"{what}: `{path}` has to be at this path on every machine"
            for what, path in list_local(job.plan).items()
        )
        train = "memfit train plan.json --folder run"
        if job.nodes == 1:  # it starts the ranks of one machine itself
            return Trained((plan,), {}, f"{train}\n", notes=notes)
        return Trained((plan,), {}, f"{torchrun(job, machines)} -m {train}\n", notes=notes)
    if name not in TRAINERS:
        see = f"launchers start plans of {', '.join(['memfit', *TRAINERS])}"
        raise UnknownName("trainer to start", name, TRAINERS, see=see)
    target = exports.find(TRAINERS[name])
    draft = target.draft(job)
    from memfit.export.unwritten_keys import find_unwritten

    left = {**find_unwritten(job.recipe, target.says), **draft.left}
    script = _script(job, draft, machines)
    return Trained(draft.files, left, script, needs=draft.needs, notes=draft.notes)


def list_local(plan: Plan) -> dict[str, str]:
    """What the plan reads of this machine: a word for it -> its whole path."""
    request = plan.request
    named = {
        "data": request.task.data, "held-out data": request.task.evaluation,
        "tokenizer": request.tokenizer, "model": plan.recipe.model.source,
    }  # fmt: skip
    paths = {what: Path(name).expanduser() for what, name in named.items() if name}
    return {what: str(path.resolve()) for what, path in paths.items() if path.exists()}


def with_whole_paths(plan: Plan) -> Plan:
    """The same plan for another folder: what its request names here is named by its whole path."""
    request, local = plan.request, list_local(plan)
    task = replace(
        request.task,
        data=local.get("data", request.task.data),
        evaluation=local.get("held-out data", request.task.evaluation),
    )
    tokenizer = local.get("tokenizer", request.tokenizer)
    model = request.model
    if isinstance(model, str) and "model" in local:
        model = local["model"]
    return replace(plan, request=replace(request, task=task, tokenizer=tokenizer, model=model))


def _script(job: Job, draft: Draft, machines: Machines) -> str:
    name = job.recipe.framework
    around = f'export NODE_RANK="{machines.rank}" MASTER_ADDR="{machines.address}"\n'
    if name == "megatron":
        return f"{around}bash megatron.sh\n"
    if name == "torchtitan":
        from memfit.export.targets.torchtitan_shared import arguments

        return f"{around}{torchrun(job, machines)} {arguments()}\n"
    if name == "deepspeed":
        return f"{around}{torchrun(job, machines)} train.py --deepspeed deepspeed.json\n"
    start = draft.start.replace('"$RANK"', f'"{machines.rank}"')
    return around + start.replace('"$MASTER_ADDR"', f'"{machines.address}"') + "\n"
