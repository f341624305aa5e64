"""What a run's imports take of this machine's memory, measured once for each set of packages.

A run on a CPU holds its interpreter and libraries beside its tensors, and a limit there counts
them. Measuring that takes a fresh process that imports all that a run imports, much of which no
traced step needs. The figure is cached under the digest of what it depends on: the interpreter,
every package that is installed, memfit's own files, the machine, and what of the environment steers
allocators, thread pools and optional imports. A damaged entry is none.
"""

from __future__ import annotations

import os
import platform
import sys
from hashlib import sha256
from pathlib import Path

from memfit.certify import cache
from memfit.core.cache_folder import cache_folder

FORMAT = "1"
INSTALLED = (".dist-info", ".egg-info", ".pth", ".egg-link", ".egg")  # what pip leaves of packages
STEERING = (
    "MALLOC_", "GLIBC_TUNABLES", "LD_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TORCH",
    "PYTORCH_", "USE_", "HF_", "TRANSFORMERS_", "ACCELERATE_", "BNB_", "CUDA_",
)  # fmt: skip


def measure_imports(*, adapters: bool) -> int | None:
    """Anonymous bytes of a process that has imported what a run imports; None: unknown.

    Taken from the cache, else measured in this process, which has done nothing else yet.
    adapters: with what LoRA's run imports.
    """
    file = _file(adapters) if not cache.switched_off() else None  # before anything is imported:
    if file is not None and (known := _find(file)) is not None:  # libraries change `os.environ`
        return known
    from memfit.train.measure import resident

    found = resident.measure_imports(adapters=adapters)
    if found is not None and file is not None:
        _keep(file, found)
    return found


def _file(adapters: bool) -> Path:
    return cache_folder() / "imports" / make_key(adapters=adapters)


def _find(file: Path) -> int | None:
    content = cache.read_entry(file)
    return int(content) if content is not None and content.isdigit() else None


def _keep(file: Path, nbytes: int) -> None:
    try:
        cache.write_entry(file, str(nbytes).encode())
    except OSError:  # a full disk, a folder that is not ours: it is measured again
        return


def make_key(*, adapters: bool) -> str:
    """The digest of all that the figure depends on."""
    steering = {k: v for k, v in os.environ.items() if k.startswith(STEERING)}
    paths = [path for path in sys.path if path and os.path.isdir(path)]
    facts = [
        FORMAT, repr(adapters), sys.version, sys.executable, repr(sorted(sys.flags)),
        platform.node(), platform.machine(), platform.release(), repr(os.cpu_count()),
        repr(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None),
        repr(sorted(steering.items())), repr([_describe_installed(path) for path in paths]),
        cache.describe_files(cache.HERE, (".py", ".toml", ".json")),
    ]  # fmt: skip
    return sha256("\0".join(facts).encode()).hexdigest()


def _describe_installed(path: str) -> tuple[str, list[tuple[str, int]]]:
    """What is installed in a folder of `sys.path`: names, which hold versions, and when."""
    with os.scandir(path) as entries:
        found = [(e.name, e.stat().st_mtime_ns) for e in entries if e.name.endswith(INSTALLED)]
    return path, sorted(found)
