"""Are the traces of this torch those of the other builds that were tried?

    python bench/torch_versions.py        adds this build to bench/results/torch_versions.json

Every recipe of `bench/exactness.py` is traced for a CPU and for an H100, and its tape (bytes,
order, streams) is hashed. Builds with and without CUDA, with and without a GPU, should agree; a
difference between versions of torch is printed by name, and is torch's own.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "bench")]

import torch  # noqa: E402
import transformers  # noqa: E402
from exactness import GRID  # noqa: E402
from tiny_steps import CPU, FAMILIES, H100, make_recipe, possible  # noqa: E402

from memfit.certify import trace  # noqa: E402
from memfit.records import write_atomically  # noqa: E402
from memfit.records.hardware import Device  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "torch_versions.json"


def digest(family: str, name: str, device: Device) -> str | None:
    """16 hexadecimal digits of a tape; None where the recipe cannot run on the device."""
    changes = dict(GRID[name])
    if not device.is_cpu and changes.get("precision", "fp32") == "fp32":
        changes.setdefault("attention", "efficient")
    traced = trace(make_recipe(family, **changes), device)
    events = [(event.nbytes, event.stream) for event in traced.tape]
    said = [events, list(traced.marks), {str(p): n for p, n in traced.phases.items()}]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def main() -> None:
    torch.set_num_threads(1)
    low_bit = find_spec("torchao") is not None
    names = [name for name in GRID if low_bit or ("bit" not in name and "fp8" not in name)]
    found = {
        f"{device.id}, {family}, {name}": digest(family, name, device)
        for device in (CPU, H100)
        for family in FAMILIES
        for name in names
        if possible(family, GRID[name])
    }
    build = str(torch.__version__)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows[build] = {
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.is_available(),
        "transformers": transformers.__version__,
        "traces": found,
    }
    write_atomically(RESULTS, (json.dumps(dict(sorted(rows.items())), indent=1) + "\n").encode())
    print(f"torch {build}: {len(found)} traces")
    for other, row in rows.items():
        shared = found.keys() & row["traces"].keys()
        differ = sorted(name for name in shared if found[name] != row["traces"][name])
        if other != build:
            print(f"  against {other}: {len(shared) - len(differ)} of {len(shared)} are equal")
            for name in differ:
                print(f"    differs: {name}")


if __name__ == "__main__":
    main()
