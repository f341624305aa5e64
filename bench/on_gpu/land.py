"""`make gpu-land FROM=FOLDER`: bring the results of `make gpu` to where they are kept.

Rows go to bench/results/gpu/, measured runs to measurements/DEVICE.jsonl. What has landed before
stays, unless it was measured again. A rehearsal's rows are refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from on_gpu.rows import Key, Row, read_rows

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 16 * 2**20  # bytes of a file that comes back


class Refused(Exception):
    """What cannot be landed, with what to do about it."""


def land(folder: Path, root: Path = ROOT) -> list[Path]:
    """Land a folder of results and return the files that changed; raises Refused."""
    source = folder / "rows.jsonl"
    if not source.exists():
        raise Refused(f"`{source}` is not there\nhint: FROM is the folder that `make gpu` wrote to")
    for file in folder.iterdir():
        if file.stat().st_size > LARGEST:
            raise Refused(f"`{file}` is larger than 16 MiB\nhint: measure into a fresh folder")
    rows = read_rows(source)
    if not rows or any(row.get("rehearsal") for row in rows.values()):
        raise Refused(
            f"`{source}` holds no rows of a GPU\nhint: rows of `--device cpu` are a rehearsal's"
        )
    changed = [_merge(rows, root / "bench" / "results" / "gpu" / "rows.jsonl")]
    changed += _land_runs(folder / "corpus.jsonl", root / "measurements")
    archive = folder / "recordings.tar"
    if archive.exists():
        to = root / "bench" / "results" / "gpu" / "recordings.tar"
        to.write_bytes(archive.read_bytes())
        changed.append(to)
    return changed


def _merge(rows: dict[Key, Row], path: Path) -> Path:
    """The landed rows with these in their places, in the order of their keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = read_rows(path)
    for key, row in rows.items():
        if "skipped" not in row or key not in known:
            known[key] = row
    _write(path, [known[key] for key in sorted(known)])
    return path


def _land_runs(source: Path, home: Path) -> list[Path]:
    """Append the measured runs to their device's file of the corpus, each once."""
    if not source.exists():
        return []
    found: dict[str, list[dict[str, Any]]] = {}
    for line in source.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        found.setdefault(run["recipe"]["device"], []).append(run)
    changed = []
    for device, runs in found.items():
        path = home / f"{device}.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        old = [json.loads(line) for line in text.splitlines()]
        seen = {run["id"] for run in old}
        _write(path, old + [run for run in runs if run["id"] not in seen])
        changed.append(path)
    return changed


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = (json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--commit", action="store_true", help="commit what landed, and the docs")
    asked = parser.parse_args()
    try:
        changed = land(asked.folder)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 2
    for path in changed:
        print(f"landed {path.relative_to(ROOT)}")
    subprocess.run([sys.executable, str(ROOT / "scripts" / "generate_docs.py")], check=True)
    if asked.commit:
        kept = ["bench/results/gpu", "measurements"]
        subprocess.run(["git", "add", "--all", *kept], cwd=ROOT, check=True)
        subprocess.run(
            ["git", "commit", "--all", "--message", "Rows of `make gpu`, and their documents"],
            cwd=ROOT, check=True,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
