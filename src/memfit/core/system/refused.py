"""What the system refuses: memory, room on a disk, a right to a file, a place that cannot be."""

from __future__ import annotations

import errno

from memfit.core.errors import Error, InvalidRequest, RunFailed
from memfit.core.system.processes import is_shortage
from memfit.core.system.reading import shorten

FULL = (errno.ENOSPC, errno.EDQUOT)
DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_PLACE = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)


def explain_refusal(error: Exception) -> Error | None:
    """The user's error that an exception of the system's stands for; None where it is a bug."""
    text = f"{type(error).__name__}: {error}"
    if is_shortage(text):
        return RunFailed(
            f"memory ran out ({shorten(text, 200)})",
            hint="stop what else holds memory, or raise this process's limit (`ulimit -v`)",
        )
    if not isinstance(error, OSError):
        return None
    place = f"`{shorten(str(error.filename), 300)}`" if error.filename else "a file"
    if error.errno in FULL:
        return RunFailed(
            f"cannot write {place}: {error.strerror}",
            hint="free space there and type the same command again",
        )
    if error.errno in DENIED:
        return InvalidRequest(
            f"this user may not use {place}: {error.strerror}",
            hint="name another file or folder, or change its rights (`ls -ld` shows them)",
        )
    if error.errno in NO_PLACE:
        return InvalidRequest(
            f"cannot use {place}: {error.strerror}", hint="name another file or folder"
        )
    return None
