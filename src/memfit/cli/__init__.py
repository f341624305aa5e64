"""The command line: parse, call `memfit.api`, print. Data to stdout, everything else to stderr."""

from __future__ import annotations

import atexit
import gc
import sys
from typing import NoReturn

from memfit.core.system.streams import open_closed_streams

CACHED = ("plan",)  # verbs whose answers are cached, see `typed_before`
CERTIFYING = ("certify",)  # verbs that start a process of libraries, see `start_early`


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run one command line and leave with its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    keeps = arguments is None and words[:1] and words[0] in CACHED
    starts = arguments is None and words[:1] and words[0] in CERTIFYING
    if keeps or starts:
        gc.disable()  # there is nothing to find until the process ends, and little then
        atexit.register(gc.freeze)
    if keeps:
        from memfit.cli.typed_before import run_typed

        open_closed_streams()
        code = run_typed(words)
        if code is not None:
            sys.exit(code)
    if starts:
        from memfit.cli.start_early import start_unless_answered

        start_unless_answered(words)
    from memfit.cli.app import run_words

    code = run_words(words)
    if starts:
        from memfit.cli.start_early import note_answered

        note_answered(words, code)
    if keeps:
        from memfit.cli.typed_before import keep_typed

        keep_typed(code)
    sys.exit(code)


__all__ = ["main"]
