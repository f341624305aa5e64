"""Where memfit keeps what it can make anew: tokens of data, certificates, plans."""

from __future__ import annotations

import os
from pathlib import Path

SWITCH = "MEMFIT_NO_CACHE"  # where it is set, no certificate and no plan is read or written


def cache_folder() -> Path:
    """The folder of `$MEMFIT_CACHE`, else `~/.cache/memfit`; it may not exist."""
    return Path(os.environ.get("MEMFIT_CACHE") or "~/.cache/memfit").expanduser()


def is_switched_off() -> bool:
    """Whether the environment says that nothing is to be read or written."""
    return bool(os.environ.get(SWITCH))


def remove_oldest(folder: Path, most: int) -> None:
    """Remove files of a folder that were used longest ago, until `most` bytes are left."""
    files = [(file.stat().st_mtime_ns, file.stat().st_size, file) for file in folder.iterdir()]
    excess = sum(size for _, size, _ in files) - most
    for _, size, file in sorted(files):
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= size
