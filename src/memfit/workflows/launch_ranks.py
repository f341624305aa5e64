"""`memfit train` on many ranks: starting them here, or being one of those that a launcher started.

Without a launcher this process plans and certifies, then starts a process a device. Under torchrun
or srun every process is one already: the first plans and certifies, the others wait for its files.
All ranks see the run folder.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.core.errors import Error, InvalidRequest, RunFailed
from memfit.core.system.processes import end_with_parent
from memfit.core.system.streams import guarded_output
from memfit.files.run_folder import read_plan
from memfit.plan.request import problem as problems
from memfit.records import read_json
from memfit.records.recipe import ADAPTED, Recipe
from memfit.records.request import Request
from memfit.records.results import Certificate, Run
from memfit.workflows.elastic import MORE, Elastic, keep_going
from memfit.workflows.prepare_child import prepare_apart
from memfit.workflows.prepare_run import prepare

if TYPE_CHECKING:
    from memfit.train.distributed.ranks import Ranks
    from memfit.train.run.progress import Progress


def is_first_rank() -> bool:
    """Whether this process is the first of its run, or alone: the one that speaks."""
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    return rank == "0"


def train_ranks(
    request: Request,
    folder: Path,
    *,
    progress: Progress | None,
    say: Callable[[str], None],
    override: bool,
    policy: Elastic,
    continues: bool = False,
) -> Run:
    """As `memfit.api.train`, of a request for more than one rank.

    policy: what happens where this process starts the ranks and one is lost.
    """
    from memfit.train.distributed.ranks import find_place, join

    place, kind = find_place(), _device_type(request)
    if place is None:
        return _start(
            request, folder, progress, say,
            override=override, policy=policy, continues=continues,
        )  # fmt: skip
    if place.size != request.ranks:
        raise InvalidRequest(
            f"the request is for {request.ranks} ranks, and the launcher started {place.size}",
            hint="make `hardware.count` x `hardware.nodes` the number of processes",
        )

    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun itself started this process
        end_with_parent(code=RunFailed.exit_code)

    def first() -> str:
        prepare(request, folder, say=say, override=override, continues=continues)
        return ""

    with join(place, kind) as ranks:
        ranks.from_first(first)
        return _run(folder, ranks, progress, override=override)


def _device_type(request: Request) -> str:
    return "cpu" if problems.find_device(request.hardware.device).is_cpu else "cuda"


def _start(
    request: Request,
    folder: Path,
    progress: Progress | None,
    say: Callable[[str], None],
    *,
    override: bool,
    policy: Elastic,
    continues: bool,
) -> Run:
    """Plan and certify here, then start the ranks and wait for them."""
    if request.hardware.nodes > 1:
        raise InvalidRequest(
            f"the request is for {request.hardware.nodes} machines, and this process starts the"
            " ranks of one",
            hint="start the same command on each with `torchrun --nnodes … -m memfit train …`",
        )
    if _device_type(request) == "cuda":
        from memfit.train.distributed.launch import check_devices

        check_devices(request.ranks, "cuda")
    prepare_apart(request, folder, say=say, override=override, continues=continues)
    from memfit.train.distributed.launch import launch

    options = {"override": override, "shown": progress is not None}

    def start(current: Request, notes: Sequence[str]) -> None:
        fewer = current.ranks < request.ranks
        order = json.dumps({**options, "notes": notes, "fewer": fewer})
        words = ["-m", "memfit.workflows.launch_ranks", str(folder), order]
        launch(words, folder, current.ranks)

    keep_going(start, request, folder, say=say, policy=policy, override=override)
    return read_json(folder / "run.json", Run)


def _run(
    folder: Path,
    ranks: Ranks,
    progress: Progress | None,
    *,
    override: bool,
) -> Run:
    """Train what the run folder holds, as one of the ranks."""
    plan, proof = read_plan(folder / "plan.json"), folder / "certificate.json"
    import_for_run(plan.recipe)
    from memfit.train.run import loop

    return loop.train(
        plan.recipe,
        read_json(folder / "request.json", Request),
        folder,
        certificate=read_json(proof, Certificate) if proof.exists() else None,
        predicted_seconds=plan.time.step_seconds,
        progress=progress,
        override=override,
        ranks=ranks,
    )


def import_for_run(recipe: Recipe) -> None:
    """Import what a run of the recipe needs, as `memfit.certify.import_memory` measures it.

    For a process that does nothing else; one that has imported such libraries is left as it is.
    """
    if "transformers" not in sys.modules:
        from memfit.certify.import_memory import import_for_run as run_imports

        run_imports(adapters=recipe.method in ADAPTED, lean=not recipe.coding)


def main(arguments: list[str]) -> int:
    """One rank that `_start` began: its folder and options; the exit code."""
    from memfit.train.distributed.ranks import Ranks, find_place, join, leave_word
    from memfit.train.run.progress import open_progress

    end_with_parent(code=RunFailed.exit_code)
    folder, options = Path(arguments[0]), json.loads(arguments[1])
    try:
        place = find_place()
        first = place is None or not place.rank
        progress = open_progress(sys.stderr) if options["shown"] and first else None
        kind = _device_type(read_json(folder / "request.json", Request))
        with nullcontext(Ranks()) if place is None else join(place, kind) as ranks:
            ranks.notes = tuple(options["notes"])
            ranks.more = folder / MORE if options["fewer"] else None
            _run(
                folder, ranks, progress,
                override=options["override"],
            )  # fmt: skip
    except BaseException as error:
        if not isinstance(error, Error):
            traceback.print_exc()
        code = leave_word(error)
        sys.stderr.flush()
        os._exit(code)  # a thread of gloo's would wait for ranks that do not come
    return 0


if __name__ == "__main__":
    with guarded_output():
        sys.exit(main(sys.argv[1:]))
