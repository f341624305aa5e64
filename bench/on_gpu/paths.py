"""What is imported where nothing of memfit is installed: its source, and wheels that came along.

Only the standard library is used here: this runs before anything else can be imported.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACK = ROOT / "build" / "gpu-pack"
OWN = ("src", "bench", "tests", "tests/plan/frameworks")
# libraries whose version decides what is measured, and the extra of pyproject.toml with the floor
WATCHED = ("torch", "transformers", "peft", "torchao", "bitsandbytes", "liger-kernel", "triton")


def prepare(pack: Path = PACK) -> list[str]:
    """Put memfit and the packed wheels that are missing here on the path, for children too.

    Returns what is to be said about it, a line each.
    """
    said = []
    added = [str(ROOT / part) for part in OWN]
    for wheel in sorted(pack.glob("*.whl")):
        name, tag = wheel.name.split("-")[0], wheel.name.split("-")[-3]
        if _installed(name):
            continue
        if not _serves(tag, wheel.name.split("-")[-2]):
            said.append(f"{wheel.name} is for another Python than {sys.version.split()[0]}")
            continue
        added.append(str(_unpack(wheel)))
        said.append(f"{wheel.name} is used from the pack")
    sys.path[:0] = [path for path in added if path not in sys.path]
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # a parent's wheels among them
    added += [path for path in before if path and path not in added]
    os.environ["PYTHONPATH"] = os.pathsep.join(added)
    return said


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _serves(python: str, abi: str) -> bool:
    """Whether wheels of these tags can be imported by this Python."""
    here = sys.version_info[:2]
    for tag in python.split("."):
        found = re.fullmatch(r"(py|cp)3(\d*)", tag)
        if found is None:
            continue
        minor = int(found[2] or 0)
        if minor == here[1] or (minor < here[1] and (found[1] == "py" or abi == "abi3")):
            return True
    return False


def _unpack(wheel: Path) -> Path:
    """The folder of a wheel's files; it is complete or it is not there."""
    folder = wheel.parent / "unpacked" / wheel.stem
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place)
        shutil.copytree(place, f"{place}-whole")
        os.replace(f"{place}-whole", folder)
    return folder


def lacking(libraries: tuple[str, ...]) -> list[str]:
    """Those of the libraries that are not here."""
    return [name for name in libraries if not _installed(name)]


def old_versions() -> Iterator[str]:
    """A line for each library that is older than pyproject.toml asks for."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, floor in re.findall(r'"([\w.-]+)>=([\d.]+)', text):
        if name in WATCHED and _installed(name) and _numbers(version(name)) < _numbers(floor):
            yield f"{name} {version(name)} is older than memfit's floor {floor}: tried as it is"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:3])


def versions() -> dict[str, str]:
    """The versions of what decides the figures."""
    found = {"python": sys.version.split()[0]}
    return found | {name: version(name) for name in WATCHED if _installed(name)}
