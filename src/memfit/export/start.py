"""How every rank of a job is started: torchrun, and what a scheduler says of its machines."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from memfit.core.errors import UnknownName
from memfit.core.system.reading import is_file, is_folder
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
        ) + tuple(
            f"reward: `{path}` is looked up in the folder where the job starts: copy it there"
            for path in _list_rewards(job.plan)
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
        "chat template": request.task.chat_template,
        **{
            f"function {spec}": spec.rpartition(":")[0]
            for spec in (*request.run.metrics, *request.run.callbacks)
        },
    }  # fmt: skip
    paths = {what: Path(name).expanduser() for what, name in named.items() if name}
    here = {what: path for what, path in paths.items() if is_file(path) or is_folder(path)}
    return {what: str(path.resolve()) for what, path in here.items()}


def _list_rewards(plan: Plan) -> list[str]:
    """Files of reward functions and the folder of an adapter that are named from here; they are a
    part of the recipe, which a job takes as it is."""
    reward = plan.recipe.reward
    named = (*reward.files, reward.adapter_folder) if plan.recipe.samples else ()
    return [path for path in named if path and not Path(path).expanduser().is_absolute()]


def with_whole_paths(plan: Plan) -> Plan:
    """The same plan for another folder: what its request names here is named by its whole path."""
    request, local = plan.request, list_local(plan)
    task = replace(
        request.task,
        data=local.get("data", request.task.data),
        evaluation=local.get("held-out data", request.task.evaluation),
        chat_template=local.get("chat template", request.task.chat_template),
    )

    def name_whole(specs: tuple[str, ...]) -> tuple[str, ...]:
        found = ((local.get(f"function {s}"), s) for s in specs)
        return tuple(f"{path}:{s.rpartition(':')[2]}" if path else s for path, s in found)

    run = replace(
        request.run,
        metrics=name_whole(request.run.metrics),
        callbacks=name_whole(request.run.callbacks),
    )
    tokenizer = local.get("tokenizer", request.tokenizer)
    model = request.model
    if isinstance(model, str) and "model" in local:
        model = local["model"]
    request = replace(request, task=task, tokenizer=tokenizer, model=model, run=run)
    return replace(plan, request=request)


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
