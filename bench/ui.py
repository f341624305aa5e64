"""What the page's server weighs: installed bytes and import time, beside Gradio's and Streamlit's.

    python bench/ui.py --folder /tmp/venvs

Each library goes into a virtual environment of its own in --folder (kept, and used again). Sizes
are of what it adds to an empty environment, byte-code left out. Imports are timed in processes of
their own, one library after the other in turn; what is compared is their ratio within a turn, of
CPU seconds, since other work on the machine adds to wall seconds alone.
Writes bench/results/ui.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "src" / "memfit" / "ui" / "page"
RESULT = ROOT / "bench" / "results" / "ui.json"
LIBRARIES = {
    "memfit[ui]": (["starlette", "uvicorn"], "starlette.applications, uvicorn"),
    "gradio": (["gradio"], "gradio"),
    "streamlit": (["streamlit"], "streamlit"),
}


def installed(folder: Path) -> dict[str, int]:
    """Top-level files and folders of site-packages -> bytes without byte-code."""
    (site,) = folder.glob("lib/python*/site-packages")
    found = {}
    for place in site.iterdir():
        files = [place] if place.is_file() else place.rglob("*")
        found[place.name] = sum(
            f.stat().st_size for f in files if f.is_file() and f.suffix != ".pyc"
        )
    return found


def prepare(folder: Path, packages: list[str]) -> dict[str, object]:
    """Bytes and distributions that the packages add; the environment stays."""
    if not folder.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        (folder / "empty.json").write_text(json.dumps(installed(folder)))
        pip = [folder / "bin" / "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, *packages], check=True)
    empty = json.loads((folder / "empty.json").read_text())
    added = {name: n for name, n in installed(folder).items() if name not in empty}
    kinds = sorted(name.split("-")[0] for name in added if name.endswith(".dist-info"))
    versions = [name.removesuffix(".dist-info") for name in added if name.endswith(".dist-info")]
    own = [v for v in versions if v.rsplit("-", 1)[0] in packages]
    return {"bytes": sum(added.values()), "distributions": len(kinds), "versions": sorted(own)}


def time_import(python: Path, modules: str) -> tuple[float, float]:
    """CPU and wall seconds of the import alone, in a process of its own."""
    clocks = "(time.process_time(), time.perf_counter())"
    code = f"import time; a = {clocks}; import {modules}; b = {clocks}; print(b[0]-a[0], b[1]-a[1])"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    cpu, wall = map(float, done.stdout.splitlines()[-1].split())
    return cpu, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    places = {name: given.folder / name.replace("[", "-").strip("]") for name in LIBRARIES}
    for name, (packages, _) in LIBRARIES.items():
        rows[name] = prepare(places[name], packages)
    turns = []
    for turn in range(given.turns + 1):
        seconds = {
            name: time_import(places[name] / "bin" / "python", modules)
            for name, (_, modules) in LIBRARIES.items()
        }
        if turn:  # the first one writes byte-code
            turns.append(seconds)
    for name, row in rows.items():
        row["import_cpu_seconds"] = [round(turn[name][0], 3) for turn in turns]
        row["import_wall_seconds"] = [round(turn[name][1], 3) for turn in turns]
        ratios = [turn[name][0] / turn["memfit[ui]"][0] for turn in turns]
        row["import_ratio"] = round(statistics.median(ratios), 2)
    page = {p.name: len(gzip.compress(p.read_bytes())) for p in sorted(PAGE.iterdir())}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "load": [round(n, 1) for n in os.getloadavg()],
        "note": "import_ratio: median over turns of the library's CPU seconds over memfit[ui]'s",
        "libraries": rows,
        "page_gzipped": {**page, "all": sum(page.values())},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
