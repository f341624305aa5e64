"""The process that certifies, started before anything else where it will likely be needed.

Importing torch takes longer than all that memfit does before it knows what to certify. Words that
were answered before find their certificate in the cache, and need no such process: a file named
after them says so. A wrong guess costs time alone, and what cannot be written is passed over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from memfit.core.cache_folder import cache_folder, is_switched_off, remove_oldest
from memfit.core.system.ahead import start_ahead

MODULE = "memfit.certify"
ANEW, HELP = "--no-cache", "--help"
ANSWERED = (0, 3)  # exit codes of an answer: it fits, or does not
MOST = 4096  # bytes of the folder, a byte a file; the words typed longest ago go first


def start_unless_answered(words: Sequence[str]) -> None:
    """Start the process, unless these words were answered before or ask for help alone."""
    if HELP in words or len(words) < 2:
        return
    known = not is_switched_off() and ANEW not in words and _file(words).exists()
    if not known:
        start_ahead(MODULE)


def note_answered(words: Sequence[str], code: int) -> None:
    """Note that these words have an answer, which the cache holds."""
    if code not in ANSWERED or is_switched_off() or ANEW in words:
        return
    file = _file(words)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b".")
        remove_oldest(file.parent, MOST)
    except OSError:  # a full disk, a folder that is not ours
        return


def _file(words: Sequence[str]) -> Path:
    facts = repr([list(words), os.getcwd()])
    return cache_folder() / "answered" / sha256(facts.encode("utf-8", "replace")).hexdigest()
