"""Published runs, read by `memfit check` from files in their tools' own keys.

    python bench/neighbour_rows.py

Each row of the corpus with memory (or that ran out of it) of torchtitan, transformers' Trainer (in
LLaMA-Factory's keys) and DeepSpeed (in LLaMA-Factory's and its own) becomes files, and is checked.
Results go to bench/results/neighbour_rows.json: by source how many are read, how many of those are
predicted as the row's own recipe is, the error of the peak, how many lie within the predictor's
own band, and the verdicts: a run that ran must not be answered with `does_not_fit`,
and one that ran out not with `fits`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

import published_files  # noqa: E402
from memfit import accuracy, api  # noqa: E402
from memfit.corpus import Row, read_corpus  # noqa: E402
from memfit.errors import Error  # noqa: E402

RESULTS = HERE / "results" / "neighbour_rows.json"


def check(row: Row) -> dict[str, Any]:
    """What `check` answers of one row, beside what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        files, data, left = published_files.write_files(row, Path(folder))
        _, plan = api.check(files, data)
    memory, own = plan.memory, accuracy.compare([row])
    found: dict[str, Any] = {
        "verdict": memory.verdict, "ran_out": row.out_of_memory, "left_out": sorted(left),
        "same_as_the_row": memory.peak_reserved == accuracy.predict(row)[0].peak_reserved,
    }  # fmt: skip
    for figure in own.compared:
        kind = "peak_allocated" if figure.kind in ("peak_allocated", "peak_active") else ""
        kind = kind or ("device_total" if figure.kind == "device_total" else "peak_reserved")
        predicted = getattr(memory, kind)
        found |= {
            "kind": figure.kind,
            "error": predicted / figure.measured - 1,
            "within": figure.low - figure.spread <= figure.measured <= figure.high + figure.spread,
        }
    return found


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one source; wrong: a run that ran `does_not_fit`, one that ran out `fits`."""
    errors = [abs(one["error"]) for one in rows if "error" in one]
    verdicts = Counter(one["verdict"] for one in rows)
    wrong = [
        one for one in rows if one["verdict"] == ("fits" if one["ran_out"] else "does_not_fit")
    ]
    return {
        "read": len(rows),
        "said_whole": sum(one["same_as_the_row"] for one in rows),
        "counters": sorted({one["kind"] for one in rows if "kind" in one}),
        "median": statistics.median(errors),
        "worst": max(errors),
        "within": sum(one.get("within", False) for one in rows),
        "verdicts": verdicts,
        "wrong": len(wrong),
    }


def table(groups: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown, a row a source."""
    lines = [
        "| files | runs of | counter | read | refused | median | worst | in the band"
        " | fits | at risk | does not fit | no verdict | wrong |",
        f"|{'---|' * 13}",
    ]
    for name, one in sorted(groups.items()):
        tool, _, source = name.partition(": ")
        said = [one["verdicts"].get(v, 0) for v in ("fits", "at_risk", "does_not_fit", "unproven")]
        cells = [
            tool, source, ", ".join(one["counters"]), one["read"], sum(one["refused"].values()),
            f"{one['median']:.1%}", f"{one['worst']:.1%}", one["within"], *said, one["wrong"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main() -> None:
    groups: dict[str, dict[str, Any]] = {}
    for row in read_corpus(published_files.CORPUS):
        if not published_files.is_told(row):
            continue
        tool = f"{row.recipe.framework} in {published_files.TOOLS[row.recipe.framework]}'s keys"
        source = f"{tool}: {accuracy.repository(row)}"
        group = groups.setdefault(source, {"rows": {}, "refused": Counter()})
        try:
            group["rows"][row.id] = check(row)
        except Error as error:
            group["refused"][error.message[:120]] += 1
        print(row.id, group["rows"].get(row.id, "refused"), flush=True)
    for name, group in groups.items():
        group |= summarise(list(group["rows"].values()))
        print(name, {k: v for k, v in group.items() if k != "rows"})
    RESULTS.write_text(json.dumps(groups, indent=1, sort_keys=True) + "\n")
    print("\n".join(table(groups)))


if __name__ == "__main__":
    main()
