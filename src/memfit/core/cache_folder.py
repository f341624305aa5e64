"""Where memfit keeps what it can make anew: tokens of data, certificates."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of `$MEMFIT_CACHE`, else `~/.cache/memfit`; it may not exist."""
    return Path(os.environ.get("MEMFIT_CACHE") or "~/.cache/memfit").expanduser()
