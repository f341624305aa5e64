"""Check that a wheel built twice from the same files has the same bytes, and what it contains.

The second build stands in another folder, under another umask, clock's zone and age of its files.
`.ci/run` calls it. It exits 1 and names every file that differs, is missing or is too many.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLD = 1_000_000_000  # seconds since 1970: the age of the second build's files
MOST = 20  # faults that are named


def list_files() -> list[Path]:
    """What git tracks, as it stands in the working tree, from the root on."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    return [Path(name) for name in names.split("\0") if name and (ROOT / name).is_file()]


def build_wheel(folder: Path, *, other: bool) -> Path:
    """Copy the tree into a folder and build its wheel there; other: under other circumstances."""
    tree, out = folder / "tree", folder / "out"
    for name in list_files():
        to = tree / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to)
        if other:
            os.utime(to, (OLD, OLD))
            to.chmod(0o600)
    environment = os.environ | ({"TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "7"} if other else {})
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(tree), "-w", str(out)],
        check=True, env=environment, umask=0o077 if other else 0o022,
    )  # fmt: skip
    return next(out.glob("*.whl"))


def find_differences(one: Path, two: Path) -> list[str]:
    """Members whose bytes or whose entry in the archive differ; the whole file's bytes last."""
    with zipfile.ZipFile(one) as a, zipfile.ZipFile(two) as b:
        found = []
        for name in sorted({*a.namelist(), *b.namelist()}):
            if name not in a.namelist() or name not in b.namelist():
                found.append(f"{name} is in one of two wheels")
                continue
            x, y = a.getinfo(name), b.getinfo(name)
            if a.read(name) != b.read(name):
                found.append(f"{name} has other bytes")
            elif (x.date_time, x.external_attr) != (y.date_time, y.external_attr):
                found.append(f"{name} has another date or mode")
    if not found and one.read_bytes() != two.read_bytes():
        found.append("the archives have other bytes")
    return found


def find_faults(wheel: Path) -> list[str]:
    """Files that a wheel lacks or has too many: the package, the measurements, the licences."""
    wanted = {}
    for name in list_files():
        if name.is_relative_to("src"):
            wanted[str(name.relative_to("src"))] = name
        elif name.parts[0] == "measurements":
            wanted[f"memfit/{name}"] = name
    with zipfile.ZipFile(wheel) as archive:
        about = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = about.rpartition("/")[0]
        wanted |= {f"{about}/licenses/{name}": Path(name) for name in ("LICENSE", "NOTICES.md")}
        names = set(archive.namelist())
        found = [f"{name} is missing" for name in sorted(wanted.keys() - names)]
        own = {name for name in names if not name.startswith(f"{about}/")}
        found += [f"{name} is no file of the tree" for name in sorted(own - wanted.keys())]
        found += [
            f"{name} is another file than the tree's"
            for name in sorted(wanted.keys() & names)
            if archive.read(name) != (ROOT / wanted[name]).read_bytes()
        ]
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="memfit-wheel-") as place:
        wheels = []
        for folder in ("one", "another/one"):
            wheels.append(build_wheel(Path(place) / folder, other=bool(wheels)))
        faults = [*find_differences(*wheels), *find_faults(wheels[0])]
        if faults:
            rest = [f"and {len(faults) - MOST} more"] if len(faults) > MOST else []
            sys.exit("\n".join([*faults[:MOST], *rest]))
        digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
        with zipfile.ZipFile(wheels[0]) as archive:
            count = len(archive.namelist())
        print(f"{wheels[0].name}: {count} files, the same bytes twice, SHA-256 {digest}")


if __name__ == "__main__":
    main()
