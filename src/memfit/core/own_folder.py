"""Where the user's own rows of the catalogue are."""

from __future__ import annotations

import os
from pathlib import Path


def own_folder() -> Path:
    """`~/.config/memfit`, which `XDG_CONFIG_HOME` moves; it may not exist."""
    home = os.environ.get("XDG_CONFIG_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path("~/.config").expanduser()
    return base / "memfit"
