"""The trainer's own step on fake tensors, replayed through the CUDA allocator.

`certify` runs in a process of its own, so that importing this package costs nothing and nothing
that happens there can harm the caller. `trace` is the same in this process.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from memfit.certify import cache
from memfit.certify.deferred_compiler import defer_compiler
from memfit.certify.lean_imports import CERTIFYING, import_lean
from memfit.certify.versions import OLDEST_TORCH, release
from memfit.core.callable_package import make_callable
from memfit.core.errors import Error, InvalidRequest, NotCertified
from memfit.core.libraries import install_extra
from memfit.core.system import ahead
from memfit.core.system.memory import find_free
from memfit.core.system.processes import is_shortage
from memfit.core.units import GIB
from memfit.records import Record, from_data, to_data, to_json
from memfit.records.hardware import Device
from memfit.records.recipe import ADAPTED, Recipe
from memfit.records.results import Certificate
from memfit.records.shapes import BatchShape as BatchShape
from memfit.records.shapes import RowBounds

if TYPE_CHECKING:
    from memfit.certify.tracing.recorder import Trace

NEEDED = ("torch", "transformers", "peft")
ROOM = 2 * GIB  # more than two processes of libraries hold, with a trace in one of them
LAST_LINES = 15  # of a crashed child's output, shown to the user
_HERE: ContextVar[bool] = ContextVar("certify in this process", default=False)
_FRESH: ContextVar[bool] = ContextVar("certify without the cache", default=False)
_FULL: ContextVar[bool] = ContextVar("certify with every block traced", default=False)


class Order(Record, frozen=True, kw_only=True):
    """The work of the certifying process."""

    recipe: Recipe
    device: Device
    usable: int | None
    batches: tuple[BatchShape, ...] | None = None
    data: RowBounds | None = None
    held_out: RowBounds | None = None
    tape: str = ""  # a file for the tape; "" keeps none
    rank: int | None = None  # of the recipe's mesh; None certifies the fullest
    full_trace: bool = False  # run every block, those too that repeat others
    stages: bool = False  # of a pipeline, trace every stage that may be the fullest


def certify(
    recipe: Recipe,
    device: Device,
    usable: int | None,
    batches: Sequence[BatchShape] | None = None,
    *,
    data: RowBounds | None = None,
    held_out: RowBounds | None = None,
    tape: Path | None = None,
    rank: int | None = None,
    stages: bool = False,
) -> Certificate:
    """Run the recipe's own step on fake tensors of the device, in a process of its own.

    usable: bytes of the limit (of the whole process on a CPU, of the whole device otherwise).
    batches: the micro-batches of one step, for what is not a run; a run gives bounds instead:
    data, held_out: what no micro-batch of the training data, and of the held-out data, exceeds;
    None takes the rows of `bounds_of`.
    tape: where a `certify.recording.Recording` is written; None keeps none.
    rank: of the recipe's mesh; None certifies the fullest, and its bounds say which that is.
    stages: of a pipeline, with the phases of its other stages (`Certificate.stages`).
    One that was made before, of the same order, versions and files, comes from `certify.cache`.
    Raises NotCertified (the step cannot be traced here), InvalidRequest (it can run nowhere).
    """
    order = Order(
        recipe=recipe,
        device=device,
        usable=usable,
        batches=tuple(batches) if batches else None,
        data=data,
        held_out=held_out,
        tape=str(tape or ""),
        rank=rank,
        stages=stages and recipe.parallel.pp > 1,
    )
    (made,) = certify_all([order])
    if isinstance(made, Error):
        raise made
    return made


def certify_all(orders: Sequence[Order]) -> list[Certificate | Error]:
    """Each order's certificate, or the error that explains why there is none; one process for all.

    Raises NotCertified when nothing can be certified here.
    """
    check_libraries()
    if _FULL.get():
        orders = [structs.replace(order, full_trace=True) for order in orders]
    keys = [_find_key(order) for order in orders]
    made = [
        cache.find(key) if key and not order.tape else None
        for key, order in zip(keys, orders, strict=True)
    ]
    wanted = [at for at, found in enumerate(made) if found is None]
    answers = iter(_run([orders[at] for at in wanted])) if wanted else iter(())
    done = [found or next(answers) for found in made]
    for at in wanted:
        if (key := keys[at]) and isinstance(certificate := done[at], Certificate):
            cache.keep(key, certificate)
    return done


def _run(orders: Sequence[Order]) -> list[Certificate | Error]:
    """Each order's answer, made now."""
    if _HERE.get():
        return [_read_answer(answer_order(to_json(order))) for order in orders]
    with ahead.take("memfit.certify") as child:
        try:
            found = child.communicate("".join(to_json(order, indent=-1) + "\n" for order in orders))
        except BaseException:  # as it is interrupted
            child.kill()
            raise
    return _read_answers(child.returncode, *found, len(orders))


def _find_key(order: Order) -> str:
    """The order's place in the cache; "" where the cache is not used."""
    if _FRESH.get() or cache.switched_off():
        return ""
    recipe, stated = order.recipe, structs.replace(order, tape="")
    source = "" if recipe.weights == "random" else recipe.model.source
    return cache.make_key(to_json(stated, indent=-1), source, on_cpu=order.device.is_cpu)


@contextmanager
def _switch_on(choice: ContextVar[bool]) -> Iterator[None]:
    token = choice.set(True)
    try:
        yield
    finally:
        choice.reset(token)


def without_cache() -> AbstractContextManager[None]:
    """Certificates are meanwhile made anew, and not cached."""
    return _switch_on(_FRESH)


def with_full_traces() -> AbstractContextManager[None]:
    """Certificates are meanwhile of traces in which every block of the model runs."""
    return _switch_on(_FULL)


def in_this_process() -> AbstractContextManager[None]:
    """Certificates are meanwhile made here: this process does nothing else that a crash could harm,
    and another one would hold all libraries a second time."""
    return _switch_on(_HERE)


def check_libraries() -> None:
    """Raise NotCertified when what the step runs on is missing or too old; nothing is imported."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise NotCertified(
            f"certifying runs the trainer's own step, and `{missing[0]}` is not installed",
            hint=install_extra("train"),
        )
    found = version("torch")
    if release(found) < release(OLDEST_TORCH):
        raise NotCertified(
            f"torch {found} is older than {OLDEST_TORCH}, the oldest whose step memfit can trace",
            hint=f"pip install 'torch>={OLDEST_TORCH}'",
        )


def _read_answers(code: int, out: str, err: str, orders: int) -> list[Certificate | Error]:
    """One line an order; where the process ended too early, NotCertified with its last lines."""
    found = [_read_answer(line) for line in out.splitlines()]
    if code == 0 and len(found) == orders:
        return found
    last = "\n".join(err.splitlines()[-LAST_LINES:])
    crash = NotCertified(
        f"the certifying process ended with code {code}:\n{last}",
        hint="memory ran out: stop what else holds it, or raise this process's limit"
        if code == -signal.SIGKILL or is_shortage(last)
        else "please report this; `memfit predict` gives the closed form meanwhile",
    )
    return [*found, *[crash] * (orders - len(found))]


def _read_answer(line: str) -> Certificate | Error:
    answer: dict[str, Any] = json.loads(line)
    if "error" not in answer:
        return from_data(answer, Certificate, source="the certifying process's answer")
    kind = NotCertified if answer["exit_code"] == NotCertified.exit_code else InvalidRequest
    return kind(answer["error"], hint=answer["hint"])


def start_measuring(
    lines: Sequence[str], environment: Mapping[str, str]
) -> Callable[[], int | None]:
    """What a run of these orders on this CPU holds before its first tensor, found when called.

    None: unknown, or no order asks. What is not known yet is measured in a process beside this one,
    or before this one imports anything where memory has no room for both.
    environment: this process's own before any library was imported, some of which change it.
    """
    orders = [from_data(json.loads(text), Order, source="the order to certify") for text in lines]
    if not any(order.device.is_cpu and order.device.context is None for order in orders):
        return lambda: None
    from memfit.certify import import_memory

    adapters = any(order.recipe.method in ADAPTED for order in orders)
    lean = not any(order.recipe.coding for order in orders)
    wait = import_memory.start_measuring(environment, adapters=adapters, lean=lean)
    if find_free() < ROOM:
        wait()
    return wait


def import_step(lines: Sequence[str]) -> None:
    """Import what these orders' steps run on, without what transformers and peft would take along.

    For a fresh process alone. Where a base is quantised by such a package nothing is hidden.
    """
    orders = [from_data(json.loads(text), Order, source="the order to certify") for text in lines]
    if any(order.recipe.coding for order in orders):
        return
    if all(o.recipe.parallel.world == 1 and o.recipe.compile == "none" for o in orders):
        defer_compiler()
    import_lean(CERTIFYING, adapters=any(order.recipe.method in ADAPTED for order in orders))


def answer_order(text: str, imports: Callable[[], int | None] = lambda: None) -> str:
    """What the child prints for an order: a Certificate, or the error that explains why not.

    imports: see `start_measuring`.
    """
    from memfit.certify.evidence.certificate import certify_stages, make_certificate

    order = from_data(json.loads(text), Order, source="the order to certify")
    tape = Path(order.tape) if order.tape else None
    try:
        if order.stages:
            made = certify_stages(
                order.recipe, order.device, order.usable, data=order.data,
                held_out=order.held_out, full_trace=order.full_trace, imports=imports,
            )  # fmt: skip
        else:
            made = make_certificate(
                order.recipe, order.device, order.usable, order.batches,
                data=order.data, held_out=order.held_out, tape=tape, rank=order.rank,
                full_trace=order.full_trace, imports=imports,
            )  # fmt: skip
    except Error as error:
        code = type(error).exit_code
        return json.dumps({"error": error.message, "hint": error.hint, "exit_code": code})
    return json.dumps(to_data(made))


def trace(
    recipe: Recipe,
    device: Device,
    batches: Sequence[BatchShape] | None = None,
    steps: int = 2,
    rank: int = 0,
) -> Trace:
    """Run the recipe's own step on fake tensors of the device, in this process, as that rank.

    Raises NotCertified and InvalidRequest as `certify` does; what torch aborts on ends the process.
    """
    from memfit.certify.tracing.trace_step import trace_step

    return trace_step(recipe, device, batches, steps, rank=rank)


make_callable(__name__)
