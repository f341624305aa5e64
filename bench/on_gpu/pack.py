"""`make gpu-pack`: the wheels that a machine with torch and transformers alone lacks.

    python3 bench/on_gpu/pack.py [--folder build/gpu-pack] [--python 3.12]

Downloads them for Linux on x86-64, takes from bitsandbytes what other versions of CUDA need, and
fails where wheels and source together are larger than the limit.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 60 * 2**20
MIB = 2**20
# What is imported and such a machine may lack, in the versions that the tests run with. datasets is
# not among them: nothing here reads data sets, and it would need pandas.
WHEELS = (
    "msgspec==0.22.0", "ruamel.yaml==0.19.1", "click==8.5.1", "rich==15.0.0", "torchao==0.18.0",
    "bitsandbytes==0.50.2", "liger-kernel==0.8.5", "peft==0.21.2", "accelerate==1.15.0",
    "hypothesis==6.170.17", "sortedcontainers==2.4.0", "pytest-timeout==2.4.0",
    "pytest-randomly==5.1.0", "markdown-it-py==4.0.0", "mdurl==0.1.2", "pygments==2.19.2",
)  # fmt: skip
PLATFORMS = (*(f"manylinux_2_{n}_x86_64" for n in (28, 27, 24, 17)), "manylinux2014_x86_64")
KEPT = ("cpu", "cuda130", "cuda132")  # of bitsandbytes' libraries, one a version of CUDA


def download(folder: Path, python: str) -> None:
    """Every wheel into the folder; SystemExit names one that cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    options += ["--python-version", python]
    options += [word for name in PLATFORMS for word in ("--platform", name)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    done = subprocess.run(
        [*command, *options, *WHEELS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise SystemExit(f"{said[-1] if said else done.stderr}\nhint: pip must reach a registry")


def slim(wheel: Path) -> None:
    """Take the libraries of other accelerators and CUDA versions out of bitsandbytes' wheel."""
    small = wheel.with_suffix(".partial")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as new:
        names = [info.filename for info in old.infolist() if _is_kept(info.filename)]
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        for name in names:
            new.writestr(name, _record(old, names, record) if name == record else old.read(name))
    small.replace(wheel)


def _is_kept(name: str) -> bool:
    found = re.search(r"libbitsandbytes_(\w+)\.so$", name)
    return found is None or found[1] in KEPT


def _record(archive: zipfile.ZipFile, names: list[str], record: str) -> bytes:
    """The list of files that a wheel carries, of those that are left."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    for name in names:
        content = archive.read(name)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.writerow(
            [name, "", ""] if name == record else [name, f"sha256={digest}", len(content)]
        )
    return text.getvalue().encode()


def source_bytes() -> int:
    """Bytes of the files that git holds, or that it would: what travels besides the wheels."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
    )  # fmt: skip
    paths = {ROOT / name.decode() for name in listed.stdout.split(b"\0") if name}
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu-pack")
    parser.add_argument("--python", default="3.12", help="of the machine that has the GPU")
    asked = parser.parse_args()
    download(asked.folder, asked.python)
    for wheel in asked.folder.glob("bitsandbytes-*.whl"):
        slim(wheel)
    wheels = sorted(asked.folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / MIB:7.2f} MiB  {wheel.name}")
    packed, source = sum(w.stat().st_size for w in wheels), source_bytes()
    total = packed + source
    print(f"{len(wheels)} wheels {packed / MIB:.1f} MiB, source {source / MIB:.1f} MiB", end="")
    print(f": {total / MIB:.1f} of {LIMIT / MIB:.0f} MiB")
    if total > LIMIT:
        print("hint: leave a wheel out of WHEELS in bench/on_gpu/pack.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
