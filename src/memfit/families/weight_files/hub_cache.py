"""Where the hub's cache holds a model's files, found without importing its library."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def hub_folder(name: str) -> Path:
    """The folder of a hub id in the hub's cache; it is there where any of its files ever was."""
    sys.audit("memfit.hub_folder", name)  # what follows depends on files that no key knows of
    return _cache() / f"models--{name.replace('/', '--')}"


def _cache() -> Path:
    """The cache of `huggingface_hub.constants`, whose import takes 0.3 s."""
    imported = sys.modules.get("huggingface_hub.constants")
    if imported is not None:
        return Path(imported.HF_HUB_CACHE)
    above = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(above, "huggingface")
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(named or os.path.join(home, "hub"))).expanduser()
