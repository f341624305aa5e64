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
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache as cache_result
from hashlib import sha256
from importlib import import_module
from pathlib import Path

from memfit.certify import cache
from memfit.certify.lean_imports import import_lean
from memfit.core.cache_folder import cache_folder
from memfit.core.errors import NotCertified
from memfit.core.libraries import quiet_import, scan_models_once
from memfit.core.system.processes import end_with_parent, name_parent
from memfit.core.system.streams import answers_alone

FORMAT = "1"
ADAPTERS = "--adapters"  # an argument: with what LoRA's run imports
LEAN = "--lean"  # an argument: without packages that no step calls
INSTALLED = (".dist-info", ".egg-info", ".pth", ".egg-link", ".egg")  # what pip leaves of packages
STEERING = (
    "MALLOC_", "GLIBC_TUNABLES", "LD_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "TORCH",
    "PYTORCH_", "USE_", "HF_", "TRANSFORMERS_", "ACCELERATE_", "BNB_", "CUDA_",
)  # fmt: skip


def import_for_run(*, adapters: bool, lean: bool) -> None:
    """Import what a run has imported when its first tensor is made; see `start_measuring`."""
    from memfit.train.measure import resident

    with quiet_import():
        if lean:
            import_lean(resident.TRAINING, adapters=adapters, prepare=scan_models_once)
        else:
            for name in resident.TRAINING:
                import_module(name)
        if adapters:
            import_module(resident.ADAPTERS)


def start_measuring(
    environment: Mapping[str, str], *, adapters: bool, lean: bool
) -> Callable[[], int | None]:
    """Anonymous bytes of a process that has imported what a run imports, found when called.

    None: unknown. Taken from the cache, else measured in a process beside this one.
    environment: of that process. adapters: with what LoRA's run imports. lean: without packages
    that no step calls, as a run does whose base is not quantised.
    What is returned raises NotCertified where that process fails.
    """
    words = (*([ADAPTERS] if adapters else []), *([LEAN] if lean else []))
    file = None if cache.switched_off() else _file(words, environment)
    if file is not None and (known := _find(file)) is not None:
        return lambda: known
    measured = _start(words, environment)

    @cache_result
    def wait() -> int | None:
        found = measured()
        if found is not None and file is not None:
            _keep(file, found)
        return found

    return wait


def _start(words: Sequence[str], environment: Mapping[str, str]) -> Callable[[], int | None]:
    child = subprocess.Popen(
        [sys.executable, "-m", "memfit.certify.import_memory", *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        env={**environment, **name_parent()},
    )  # fmt: skip

    def wait() -> int | None:
        printed, _ = child.communicate()
        if child.returncode:
            raise NotCertified(
                "the process that measures what a run's imports take ended with code"
                f" {child.returncode}",
                hint="its own words stand above; `memfit doctor` says what is installed",
            )
        return int(printed) if printed.isdigit() else None

    return wait


def main(words: Sequence[str]) -> None:
    """Print the bytes; nothing where they are unknown. What libraries print goes to stderr."""
    answer_to = answers_alone()
    end_with_parent()
    from memfit.train.measure import resident

    resident.give_back_freed()
    import_for_run(adapters=ADAPTERS in words, lean=LEAN in words)
    found = resident.read_anonymous()
    answer_to.write("" if found is None else str(found))
    answer_to.flush()
    os._exit(0)


def _file(words: Sequence[str], environment: Mapping[str, str]) -> Path:
    return cache_folder() / "imports" / make_key(words, environment)


def _find(file: Path) -> int | None:
    content = cache.read_entry(file)
    return int(content) if content is not None and content.isdigit() else None


def _keep(file: Path, nbytes: int) -> None:
    try:
        cache.write_entry(file, str(nbytes).encode())
    except OSError:  # a full disk, a folder that is not ours: it is measured again
        return


def make_key(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """The digest of all that the figure depends on, these arguments of `main` among them."""
    steering = {k: v for k, v in environment.items() if k.startswith(STEERING)}
    paths = [path for path in sys.path if path and os.path.isdir(path)]
    facts = [
        FORMAT, repr(words), sys.version, sys.executable, repr(sorted(sys.flags)),
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


if __name__ == "__main__":
    main(sys.argv)
