"""The trainer's own step on fake tensors, replayed through the CUDA allocator.

`certify` runs in a process of its own, so that importing this package costs nothing and nothing
that happens there can harm the caller. `trace` is the same in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from memfit.errors import Error, InvalidRequest, NotCertified
from memfit.hardware import Device
from memfit.nouns import Noun, from_data, to_data, to_json
from memfit.recipe import Recipe
from memfit.results import Certificate

if TYPE_CHECKING:
    from memfit.certify.recorder import Trace

NEEDED = ("torch", "transformers", "peft")
LAST_LINES = 15  # of a crashed child's output, shown to the user


class BatchShape(Noun, frozen=True, kw_only=True):
    """One micro-batch without its tokens."""

    rows: int
    tokens: int  # of one row
    documents: tuple[tuple[int, ...], ...] | None = None  # lengths in each row; None = one a row


class Order(Noun, frozen=True, kw_only=True):
    """What the certifying process is asked for."""

    recipe: Recipe
    device: Device
    usable: int | None
    batches: tuple[BatchShape, ...] | None


def certify(
    recipe: Recipe,
    device: Device,
    usable: int | None,
    batches: Sequence[BatchShape] | None = None,
) -> Certificate:
    """Run the recipe's own step on fake tensors of the device, in a process of its own.

    usable: bytes of the limit (of live tensors on a CPU, of the whole device otherwise).
    batches: the micro-batches of the worst step; None takes the worst that the recipe allows.
    Raises NotCertified (the step cannot be traced here), InvalidRequest (it can run nowhere).
    """
    _check_libraries()
    order = Order(
        recipe=recipe, device=device, usable=usable, batches=tuple(batches) if batches else None
    )
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",  # a certificate does not depend on this machine's GPUs
        "HIP_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    child = subprocess.run(
        [sys.executable, "-m", "memfit.certify"],
        input=to_json(order),
        capture_output=True,
        text=True,
        env=environment,
    )
    answer = _read_answer(child)
    if "error" in answer:
        kind = NotCertified if answer["exit_code"] == NotCertified.exit_code else InvalidRequest
        raise kind(answer["error"], hint=answer["hint"])
    return from_data(answer, Certificate, where="the certifying process's answer")


def _check_libraries() -> None:
    """Raise NotCertified when what the step runs on is not installed; nothing is imported."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise NotCertified(
            f"certifying runs the trainer's own step, and `{missing[0]}` is not installed",
            hint="pip install 'memfit[train]'",
        )


def _read_answer(child: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The last line of its output; a crash is NotCertified with the last lines of its errors."""
    lines = child.stdout.splitlines()
    if child.returncode == 0 and lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    said = "\n".join(child.stderr.splitlines()[-LAST_LINES:])
    raise NotCertified(
        f"the certifying process ended with code {child.returncode}:\n{said}",
        hint="please report this; `memfit predict` gives the closed form meanwhile",
    )


def answer_order(text: str) -> str:
    """What the child prints for an order: a Certificate, or the error that explains why not."""
    from memfit.certify.certificate import make_certificate

    order = from_data(json.loads(text), Order, where="the order to certify")
    try:
        made = make_certificate(order.recipe, order.device, order.usable, order.batches)
    except Error as error:
        code = type(error).exit_code
        return json.dumps({"error": error.message, "hint": error.hint, "exit_code": code})
    return json.dumps(to_data(made))


def trace(
    recipe: Recipe,
    device: Device,
    batches: Sequence[BatchShape] | None = None,
    steps: int = 2,
) -> Trace:
    """Run the recipe's own step on fake tensors of the device, in this process.

    Raises NotCertified and InvalidRequest as `certify` does; what torch aborts on ends the process.
    """
    from memfit.certify.recorder import trace_step

    return trace_step(recipe, device, batches, steps)
