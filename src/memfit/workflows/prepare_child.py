"""Plan and certify in a process of its own, which is gone before training begins.

What that takes of memory (the libraries, the planner, the data that is tokenised, the traced step)
would stay with a run that did it itself. Nothing of it uses a GPU.

    python -m memfit.workflows.prepare_child FOLDER

Its Order comes on stdin; it writes a line of JSON for all that it says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from memfit.certify import LAST_LINES, in_this_process
from memfit.certify.lean_imports import CERTIFYING, import_lean
from memfit.core.errors import Error, InvalidRequest, NotCertified, RunFailed
from memfit.core.system.processes import child_environment, end_with_parent, is_shortage
from memfit.core.system.refused import explain_refusal
from memfit.core.system.streams import answers_alone
from memfit.records import Record, from_data, to_json
from memfit.records.recipe import ADAPTED
from memfit.records.request import Request
from memfit.workflows.prepare_run import (
    Imports,
    Prepared,
    Say,
    may_quantise,
    prepare,
    prepare_moved,
    read_prepared,
    unmeasured,
)

KINDS = {
    kind.__name__: kind for kind in (*Error.__subclasses__(), *InvalidRequest.__subclasses__())
}
UNQUANTISED = ("full",)  # methods that train the base, which is then never quantised


class Order(Record, frozen=True, kw_only=True):
    """What is to be prepared."""

    request: Request
    override: bool
    moved: bool = False  # to another number of ranks: request.json stays
    continues: bool = False  # beyond the end that its folder's run was started with


def prepare_apart(
    request: Request,
    folder: Path,
    *,
    say: Say = lambda _: None,
    override: bool = False,
    moved: bool = False,
    continues: bool = False,
) -> Prepared:
    """As `prepare`, in a process beside this one, whose memory comes back with its end.

    A process that has torch already would gain nothing, and prepares itself. moved: as
    `prepare_moved`, always in a process of its own. continues: as in `prepare`.
    Raises what `prepare` raises, and NotCertified where the other process was ended.
    """
    if "torch" in sys.modules and not moved:
        return prepare(request, folder, say=say, override=override, continues=continues)
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            [sys.executable, "-m", "memfit.workflows.prepare_child", str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=child_environment(),
        ) as child:  # fmt: skip
            order = Order(request=request, override=override, moved=moved, continues=continues)
            answer = _converse(child, order, say)
        code = child.returncode
        if answer is None:
            errors.seek(0)
            output = "\n".join(errors.read().splitlines()[-LAST_LINES:])
            raise NotCertified(
                f"the process that plans and certifies ended with code {code}:\n{output}",
                hint="memory ran out: stop what else holds it, or raise this process's limit"
                if code == -signal.SIGKILL or is_shortage(output)
                else "please report this",
            )
    if "error" in answer:
        raise restore_error(**answer)
    return read_prepared(folder)


def restore_error(kind: str, error: str, hint: str) -> Error:
    """The error that another process raised; some kinds write their messages themselves."""
    made = KINDS.get(kind, RunFailed)
    restored = made.__new__(made)
    Error.__init__(restored, error, hint=hint)
    return restored


def _converse(child: subprocess.Popen[str], order: Order, say: Say) -> dict[str, Any] | None:
    """Pass on the child's progress; return its last message, None where it ended without one."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(to_json(order, indent=-1))
        child.stdin.close()
    except BrokenPipeError:
        return None
    for line in child.stdout:
        words: dict[str, Any] = json.loads(line)
        if "say" not in words:
            return words
        say(words["say"])
    return None


def main(folder: Path) -> None:
    """Answer the order on stdin. What libraries print goes to stderr."""
    end_with_parent()
    environment = dict(os.environ)
    answer_to = answers_alone()

    def write(**words: str) -> None:
        answer_to.write(json.dumps(words) + "\n")
        answer_to.flush()

    order = from_data(msgspec.json.decode(sys.stdin.read()), Order, source="the order to prepare")
    try:
        imports = _measure_imports(order.request, environment)
        _import_libraries(order.request)
        with in_this_process():
            made: Any = prepare_moved
            if not order.moved:
                made = partial(prepare, continues=order.continues)
            made(
                order.request, folder, say=lambda text: write(say=text), override=order.override,
                imports=imports,
            )  # fmt: skip
    except (Error, OSError) as error:
        known = error if isinstance(error, Error) else explain_refusal(error)
        if known is None:
            raise
        write(error=known.message, hint=known.hint, kind=type(known).__name__)
    else:
        write(done="")
    os._exit(0)  # no destructors: fake CUDA tensors have no driver to return to


def _measure_imports(request: Request, environment: Mapping[str, str]) -> Imports:
    """Find what a run of this request on a CPU holds before its first tensor.

    environment: this process's own before any library was imported.
    """
    from memfit.plan.request import problem as problems

    if not problems.find_device(request.hardware.device).is_cpu:
        return unmeasured
    from memfit.certify import import_memory

    adapters = request.method in (*ADAPTED, "auto")

    @cache
    def start(lean: bool) -> Callable[[], int | None]:
        return import_memory.start_measuring(environment, adapters=adapters, lean=lean)

    # Both, where the plan chooses the base, and before this process imports: a limit counts them.
    lean = not may_quantise(request)
    for way in sorted({lean, lean or request.base_format == "auto"}):
        start(way)()
    return lambda lean: start(lean)()


def _import_libraries(request: Request) -> None:
    """Import what planning and certifying need, without what libraries would take along where no
    plan of the request quantises its base."""
    if request.method in UNQUANTISED:
        import_lean(CERTIFYING, adapters=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
