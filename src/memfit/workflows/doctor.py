"""What a bug report needs: versions, this machine, its accelerators, caches. Changes nothing."""

from __future__ import annotations

import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

from memfit.certify.evidence.prove import prove
from memfit.core import units
from memfit.core.cache_folder import cache_folder
from memfit.core.errors import NotCertified
from memfit.core.libraries import install_extra
from memfit.records import Record


class Diagnosis(Record, frozen=True, kw_only=True):
    """The answer of `memfit doctor`."""

    versions: dict[str, str]
    system: dict[str, str]
    accelerators: tuple[str, ...]
    certificates: dict[str, str]  # kind of device -> whether this torch is proved to imitate it
    caches: dict[str, str]
    problems: tuple[str, ...]  # what will not work here, and how to mend it


def diagnose(versions: dict[str, str]) -> Diagnosis:
    """Look at this machine; imports torch when it is installed, to ask for its devices.

    A few seconds with torch: its certificates are proved here, in processes of their own.
    """
    accelerators, problems = _accelerators()
    return Diagnosis(
        versions=versions,
        system={
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "processors": str(os.cpu_count()),
            "memory": units.show_gib(_memory()),
        },
        accelerators=accelerators,
        certificates=_certificates(),
        caches={str(path): _state(path) for path in _caches()},
        problems=problems,
    )


def _accelerators() -> tuple[tuple[str, ...], tuple[str, ...]]:
    if find_spec("torch") is None:
        return (), ("torch is not installed: planning works, certifying and training need "
                    f"`{install_extra('train')}`",)  # fmt: skip
    import torch

    if not torch.cuda.is_available():
        return (), ("torch sees no CUDA device: training runs on the processor; planning and "
                    "certifying for any device work",)  # fmt: skip
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"{index}: {properties.name}, {units.show_gib(properties.total_memory)}")
    return tuple(found), ()


def _certificates() -> dict[str, str]:
    """Runs the certificate's self-check, for one device of each kind."""
    if find_spec("torch") is None:
        return {}
    found = {}
    for kind, device in (("CPU", "cpu-x86"), ("CUDA", "h100-sxm")):
        try:
            found[kind] = f"proved: {prove(device)}"
        except NotCertified as refusal:
            found[kind] = f"refused: {refusal.message}"
    return found


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _caches() -> list[Path]:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return [cache_folder(), Path(home).expanduser()]


def _state(path: Path) -> str:
    """Whether a cache exists, how large it is, and whether it can be written."""
    if not path.exists():
        return "not there yet"
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file() and not f.is_symlink())
    return units.show_bytes(size) + ("" if os.access(path, os.W_OK) else ", not writable")
