"""Published runs, read by `memfit check` from files in their tools' own keys.

    python bench/neighbour_rows.py

Each row of the corpus with memory (or that ran out of it) of torchtitan, transformers' Trainer (in
LLaMA-Factory's keys) and DeepSpeed (in LLaMA-Factory's and its own) becomes files, and is checked.
Results go to bench/results/neighbour_rows.json: by source how many are read, how many of those are
predicted as the row's own recipe is, the error of the peak, how many lie within the predictor's
own band, and the verdicts: a run that ran must not be answered with `does_not_fit`,
and one that ran out not with `fits`.

Rows are judged whose counter is known and whose confidence is not low. The others stand apart, with
their errors against all three counters: which of them was read is not known, or what was read is
not the peak of one recipe.
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
from memfit import api  # noqa: E402
from memfit.accuracy import memory_errors  # noqa: E402
from memfit.accuracy.corpus import Row, read_corpus  # noqa: E402
from memfit.core.errors import Error  # noqa: E402

RESULTS = HERE / "results" / "neighbour_rows.json"
COUNTERS = ("peak_allocated", "peak_reserved", "device_total")
APART = ", apart"  # ends the name of a group that judges nothing


def is_judged(row: Row) -> bool:
    """Whether a row's figure, or that it ran out, judges a prediction."""
    return row.source.confidence != "low" and "unspecified" not in row.memory


def check(row: Row) -> dict[str, Any]:
    """What `check` answers of one row, beside what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        files, data, left = published_files.write_files(row, Path(folder))
        _, plan = api.check(files, data)
    memory, own = plan.memory, memory_errors.compare([row])
    found: dict[str, Any] = {
        "verdict": memory.verdict, "ran_out": row.out_of_memory, "left_out": sorted(left),
        "same_as_the_row": memory.peak_reserved == memory_errors.predict(row)[0].peak_reserved,
    }  # fmt: skip
    for figure in own.compared:
        errors = {kind: getattr(memory, kind) / figure.measured - 1 for kind in COUNTERS}
        found["kind"] = figure.kind
        if not is_judged(row):
            found["errors"] = errors
            continue
        kind = {"peak_active": "peak_allocated"}.get(figure.kind, figure.kind)
        found["error"] = errors[kind]
        if kind != "peak_allocated":  # which has no band
            low, high = figure.low - figure.spread, figure.high + figure.spread
            found["within"] = low <= figure.measured <= high
    return found


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one source; wrong: a run that ran `does_not_fit`, one that ran out `fits`."""
    verdicts = Counter(one["verdict"] for one in rows)
    wrong = [
        one for one in rows if one["verdict"] == ("fits" if one["ran_out"] else "does_not_fit")
    ]
    found: dict[str, Any] = {
        "read": len(rows),
        "said_whole": sum(one["same_as_the_row"] for one in rows),
        "counters": sorted({one["kind"] for one in rows if "kind" in one}),
        "verdicts": verdicts,
        "wrong": len(wrong),
    }
    if errors := [abs(one["error"]) for one in rows if "error" in one]:
        found |= {"median": statistics.median(errors), "worst": max(errors)}
        if banded := [one["within"] for one in rows if "within" in one]:
            found["within"] = sum(banded)
    if apart := [one["errors"] for one in rows if "errors" in one]:
        found["signed"] = {k: statistics.median(one[k] for one in apart) for k in COUNTERS}
    return found


def table(groups: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: judged rows, a line a source."""
    errors = {
        name: (f"{one['median']:.1%}", f"{one['worst']:.1%}", one.get("within", "no band"))
        for name, one in groups.items()
        if "median" in one
    }
    return _lines(groups, ("median", "worst", "in the band"), errors)


def table_apart(groups: dict[str, dict[str, Any]]) -> list[str]:
    """Markdown: rows that judge nothing, their median signed error against each counter."""
    errors = {
        name: tuple(f"{one['signed'][k]:+.1%}" for k in COUNTERS)
        for name, one in groups.items()
        if "signed" in one
    }
    return _lines(groups, ("of allocated", "of reserved", "of the device"), errors)


def _lines(
    groups: dict[str, dict[str, Any]], heads: tuple[str, ...], errors: dict[str, tuple[object, ...]]
) -> list[str]:
    """Of the sources that have errors, which stand under `heads`."""
    lines = [
        f"| files | runs of | counter | read | refused | {' | '.join(heads)}"
        " | fits | at risk | does not fit | no verdict | wrong |",
        f"|{'---|' * 13}",
    ]
    return lines + [_line(name, groups[name], *errors[name]) for name in sorted(errors)]


def _line(name: str, one: dict[str, Any], *errors: object) -> str:
    tool, _, source = name.removesuffix(APART).partition(": ")
    said = [one["verdicts"].get(v, 0) for v in ("fits", "at_risk", "does_not_fit", "unproven")]
    cells = [
        tool, source, ", ".join(one["counters"]), one["read"], sum(one["refused"].values()),
        *errors, *said, one["wrong"],
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def limits(groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Over all judged rows: what the predictor is held to."""
    rows = [r for one in groups.values() for r in one["rows"].values() if "errors" not in r]
    errors = [r["error"] for r in rows if "error" in r]
    sizes, out = sorted(map(abs, errors)), [r for r in rows if r["ran_out"]]
    return {
        "figures": len(errors), "median": statistics.median(sizes),
        "p90": memory_errors.quantile(sizes, 0.9), "worst": sizes[-1],
        "bias": statistics.fmean(errors), "within": sum(r.get("within", False) for r in rows),
        "banded": sum("within" in r for r in rows),
        "ran_out": len(out), "ran_out_right": sum(r["verdict"] == "does_not_fit" for r in out),
        "wrong": sum(one["wrong"] for one in groups.values() if "signed" not in one),
        "no_verdict": sum(r["verdict"] == "unproven" for r in rows),
    }  # fmt: skip


def say_limits(groups: dict[str, dict[str, Any]]) -> str:
    """One line of the docs."""
    one = limits(groups)
    return (
        f"Over the {one['figures']} judged figures: median {one['median']:.1%}, 90 % within"
        f" {one['p90']:.1%}, worst {one['worst']:.1%}, bias {one['bias']:+.1%}, {one['within']} of"
        f" {one['banded']} in their band; {one['ran_out_right']} of {one['ran_out']} that ran out"
        f" of memory are said not to fit; {one['wrong']} verdicts wrong,"
        f" {one['no_verdict']} missing."
    )


def main() -> None:
    groups: dict[str, dict[str, Any]] = {}
    for row in read_corpus(published_files.CORPUS):
        if not published_files.is_told(row):
            continue
        tool = f"{row.recipe.framework} in {published_files.TOOLS[row.recipe.framework]}'s keys"
        source = f"{tool}: {memory_errors.repository(row)}{'' if is_judged(row) else APART}"
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
    print("\n".join([*table(groups), say_limits(groups), *table_apart(groups)]))


if __name__ == "__main__":
    main()
