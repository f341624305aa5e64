"""`python -m memfit.ui.job`: certify what stdin asks for, and say on stdout how it goes.

The order is one line, `Wanted` as JSON. Each line of stdout is an object: `{"phase": …}`
as the work goes on, and at the end `{"answer": …}` or `{"error": …, "hint": …, "exit_code": …}`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TextIO

import msgspec

from memfit import api
from memfit.core.errors import Error
from memfit.core.system.streams import answers_alone
from memfit.ui.asking import read_query


class Wanted(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What is to be certified."""

    query: dict[str, str]  # as `plan` takes it
    rank: int | None = None  # None: the fullest


def main() -> None:
    """Answer one order. What libraries print goes to stderr; only answers go to stdout."""
    answer_to = answers_alone()
    wanted = msgspec.json.decode(sys.stdin.readline(), type=Wanted)
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    _answer(wanted, answer_to)


def _answer(wanted: Wanted, answer_to: TextIO) -> None:
    def write(line: object) -> None:
        answer_to.write(msgspec.json.encode(line).decode() + "\n")
        answer_to.flush()

    try:
        request = read_query(tuple(wanted.query.items()))
        made = api.draw_step(
            request, rank=wanted.rank, on_phase=lambda phase: write({"phase": phase})
        )
    except Error as error:
        write({"error": error.message, "hint": error.hint, "exit_code": error.exit_code})
    else:
        write({"answer": made})


def _end_with_the_server() -> None:
    """Kill this process and its children when the server, which holds stdin open, is gone."""
    sys.stdin.read()
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
