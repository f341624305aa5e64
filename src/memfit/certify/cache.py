"""Certificates that were made before, found by everything that they depend on.

The key is a digest of the order (the recipe with its allocator's settings, the device, the limit,
the bounds of the data), of the versions of the libraries that a step runs on, of memfit's own
files, of the files that hold the model's weights, and for a CPU of this machine, whose imports are
measured. A file is named after its key and starts with the digest of what follows, so that a file
that was damaged is no certificate. What cannot be read or written is passed over: a cache is never
a reason to fail.
"""

from __future__ import annotations

import os
import platform
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

from memfit.certify.versions import STEP_LIBRARIES
from memfit.core.cache_folder import cache_folder
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import installed_versions
from memfit.core.units import MIB
from memfit.families.weight_files.hub_cache import hub_folder
from memfit.records import from_data, to_data, write_atomically
from memfit.records.results import Certificate

SWITCH = "MEMFIT_NO_CACHE"  # where it is set, nothing is read or written
LARGEST = 64 * MIB  # of the folder; the certificates that were used longest ago go first
FORMAT = "1"
HERE = Path(__file__).resolve().parents[1]  # memfit's own files


def folder() -> Path:
    """The folder that holds the certificates."""
    return cache_folder() / "certificates"


def switched_off() -> bool:
    """Whether the environment says that nothing is to be read or written."""
    return bool(os.environ.get(SWITCH))


def make_key(order: str, source: str, *, on_cpu: bool) -> str:
    """The digest of all that a certificate depends on.

    order: the order as JSON. source: the folder or hub id whose files a run would load; "" for
    random weights. on_cpu: whether the certificate holds what this machine's imports take.
    """
    facts = [FORMAT, order, repr(sorted(installed_versions(STEP_LIBRARIES).items())), sys.version]
    facts += [describe_files(HERE, (".py", ".toml", ".json")), describe_source(source)]
    facts += [platform.node(), platform.machine()] if on_cpu else []
    return sha256("\0".join(facts).encode()).hexdigest()


def describe_files(top: Path, endings: tuple[str, ...]) -> str:
    """Name, size and time of change of every file below a folder; equal texts, equal content."""
    found = []
    waiting = [str(top)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir():
                        waiting.append(entry.path)
                    elif entry.name.endswith(endings):
                        stat = entry.stat()
                        found.append((entry.path, stat.st_size, stat.st_mtime_ns))
        except OSError:
            continue
    return repr(sorted(found))


def describe_source(source: str) -> str:
    """The files that hold a model's weights on this machine: a certificate knows their dtypes."""
    if not source:
        return ""
    folder = Path(source)
    if not folder.is_dir():
        folder = hub_folder(source)
    return describe_files(folder, (".safetensors", ".json")) if folder.is_dir() else ""


def find(key: str) -> Certificate | None:
    """The certificate of that key, marked as one from the cache; None where there is none."""
    file = folder() / f"{key}.json"
    content = read_entry(file)
    if content is None:
        return None
    try:
        import msgspec

        data: dict[str, Any] = msgspec.json.decode(content)
        found = from_data({**data, "from_cache": True}, Certificate, source=str(file))
        os.utime(file)  # it was used just now
    except (OSError, ValueError, TypeError, InvalidRequest):
        return None
    return found


def keep(key: str, certificate: Certificate) -> None:
    """Write a certificate under its key, and remove the oldest ones beyond the folder's size."""
    import msgspec

    content = msgspec.json.encode(to_data(certificate))
    try:
        write_entry(folder() / f"{key}.json", content)
        _remove_oldest(folder())
    except OSError:  # a full disk, a folder that is not ours
        return


def read_entry(file: Path) -> bytes | None:
    """What `write_entry` wrote; None where there is no such file, or it was damaged."""
    try:
        digest, _, content = file.read_bytes().partition(b"\n")
    except OSError:
        return None
    return content if digest == sha256(content).hexdigest().encode() else None


def write_entry(file: Path, content: bytes) -> None:
    """Write the content behind its digest, atomically. Raises OSError."""
    write_atomically(file, sha256(content).hexdigest().encode() + b"\n" + content)


def _remove_oldest(place: Path) -> None:
    files = [(file.stat().st_mtime_ns, file.stat().st_size, file) for file in place.iterdir()]
    excess = sum(size for _, size, _ in files) - LARGEST
    for _, size, file in sorted(files):
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= size
