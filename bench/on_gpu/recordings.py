"""Recordings of the caching allocator under every setting, each held against the replay."""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path

import allocator_parity

from on_gpu.rows import Place, Row, Unit

TWINS = 4  # tapes that the replay itself plays in a rehearsal
KEPT = 15 * 2**20  # bytes of recordings that come back; further ones are compared and not kept
WIDE = 2**20  # bytes of a recording that is too large to be a test's


def list_units(place: Place) -> list[Unit]:
    cases = [case for case in allocator_parity.make_cases() if case.tape or not place.rehearsal]
    return [Unit(case.name, 120.0) for case in cases[: TWINS if place.rehearsal else None]]


def measure(name: str, place: Place) -> Row:
    """How much was compared, and the first difference where there is one."""
    case = next(case for case in allocator_parity.make_cases() if case.name == name)
    snapshot = allocator_parity.imitate(case) if place.rehearsal else allocator_parity.record(case)
    settings = allocator_parity.settings_of(case, snapshot["device_memory"])
    with tempfile.TemporaryDirectory() as folder:
        row = allocator_parity.compare(name, snapshot, settings, Path(folder))
        for file in Path(folder).iterdir():
            row["kept"] = keep(place.out / "recordings.tar", file)
    row.pop("name")
    return row


def keep(archive: Path, file: Path) -> bool:
    """Add a recording to the archive, which is whole at any time; False where it is too large."""
    content = file.read_bytes()
    old = archive.read_bytes() if archive.exists() else b""
    if len(content) > WIDE or len(old) + len(content) > KEPT:
        return False
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as new:
        if old:
            with tarfile.open(fileobj=io.BytesIO(old)) as before:
                for member in before.getmembers():
                    if member.name != file.name:
                        new.addfile(member, before.extractfile(member))
        info = tarfile.TarInfo(file.name)
        info.size = len(content)
        new.addfile(info, io.BytesIO(content))
    part = archive.with_suffix(".partial")
    part.write_bytes(made.getvalue())
    part.replace(archive)
    return True
