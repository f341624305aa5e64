"""`memfit train` in containers of 0.75 to 4 GiB: does it end, and does it hold what was predicted?

The demo's model, with batches and lengths that the limits bind. Each run is the whole command, in a
control group of exactly its `limits.memory`, where the kernel ends what needs more. What it held is
the peak of anonymous pages of all its processes. `make demo`'s data is written where it is not
there. Writes bench/results/limits_cpu.jsonl; with limits as arguments, their rows of it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from container import run_within

from memfit.core.units import parse_bytes, show_bytes
from memfit.files.run_folder import read_plan
from memfit.records import read_json
from memfit.records.results import Certificate, Run

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent / "recipes"
FULL = "demo-llama_full_cpu.yaml"
WITHIN = 0.15
LONG = {"task.sequence_length": 1024, "attention": "math", "task.global_batch": 8}
# limit, and what the demo's request is changed to
CASES: tuple[tuple[str, dict[str, object]], ...] = (
    ("0.75 GiB", {}),
    ("1 GiB", {"task.global_batch": 16}),
    ("1.5 GiB", {"task.global_batch": 32}),
    ("2 GiB", {"task.sequence_length": 512, "task.global_batch": 16, "precision": "bf16-mixed"}),
    ("3 GiB", LONG),
    ("4 GiB", {**LONG, "model.num_hidden_layers": 8}),
)


def train(limit: str, changes: dict[str, object], folder: Path) -> dict[str, Any]:
    """One run in a container of its limit, as a row."""
    command = [
        sys.executable, "-m", "memfit", "train", str(RECIPES / FULL), "--folder", str(folder),
        "--set", f"limits.memory={limit}", "--set", "task.steps=2",
    ]  # fmt: skip
    for key, value in changes.items():
        command += ["--set", f"{key}={value}"]
    held = run_within(command, parse_bytes(limit))
    if held.code:
        raise SystemExit(f"{limit}: exit code {held.code}, {held.kills} kills\n{held.stderr}")
    plan = read_plan(folder / "plan.json")
    proof, run = (
        read_json(folder / f"{name}.json", kind)
        for name, kind in (("certificate", Certificate), ("run", Run))
    )
    predicted = plan.memory.device_total
    assert predicted is not None
    return {
        "limit": parse_bytes(limit), "recipe": plan.recipe_digest, "chosen": plan.label,
        "live": plan.memory.peak_allocated, "predicted": predicted,
        "low": plan.memory.total_low, "high": plan.memory.total_high,
        "certified": proof.memory.device_total, "verdict": proof.memory.verdict,
        "measured": held.anonymous, "own_counter": run.measurements["memory.device_total"].value,
        "error": predicted / held.anonymous - 1, "charged": held.charged, "kills": held.kills,
        "group": held.group, "threads": run.environment["threads"],
        "torch": run.environment["torch"],
    }  # fmt: skip


def main() -> None:
    sys.path.insert(0, str(HERE.parent / "scripts"))
    import demo

    if not (demo.FOLDER / "docstrings.jsonl").exists():
        demo.write_data()
    results = HERE / "results" / "limits_cpu.jsonl"
    asked = sys.argv[1:] or [limit for limit, _ in CASES]
    known = [json.loads(line) for line in results.read_text().splitlines()]
    rows = {row["limit"]: row for row in known if "certified" in row}
    for limit, changes in CASES:
        if limit not in asked:
            continue
        folder = Path(tempfile.mkdtemp(prefix="memfit-limits-"))
        try:
            row = train(limit, changes, folder / "run")
        finally:
            shutil.rmtree(folder)
        rows[row["limit"]] = row
        print(
            f"{limit:>8}  predicted {show_bytes(row['predicted'])} ({show_bytes(row['low'])} to"
            f" {show_bytes(row['high'])})  held {show_bytes(row['measured'])}"
            f"  {row['error']:+.1%}  {row['verdict']}, {row['kills']} kills  {row['chosen']}",
            flush=True,
        )
        text = "".join(json.dumps(rows[n]) + "\n" for n in sorted(rows))
        results.write_text(text)
    assert all(row["measured"] <= row["limit"] and not row["kills"] for row in rows.values())
    assert all(abs(row["error"]) <= WITHIN for row in rows.values())


if __name__ == "__main__":
    main()
