"""Write rows of the corpus from Megatron-LM's golden values.

    python scripts/import_golden.py megatron_golden.csv [--out measurements/megatron_golden.jsonl]

Each line of the input is one functional test of Megatron-LM on one machine: the peak that
`torch.cuda.max_memory_allocated` reported, what was allocated after a step, the seconds of an
iteration. `scripts/published/megatron_golden.py` turns a test's name and arguments into a request.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from pathlib import Path

from import_published import ROOT, write_refusals
from published import NotExpressible
from published.megatron_golden import translate

from memfit.accuracy.corpus import Row, Source, split_of, write_rows
from memfit.core.errors import Error
from memfit.core.units import GIB
from memfit.plan.request.defaults import read_defaults
from memfit.records import from_data
from memfit.records.request import Request
from memfit.records.results import Measurement

SOURCE = "NVIDIA/Megatron-LM tests/functional_tests/test_cases golden values"
URL = "https://github.com/NVIDIA/Megatron-LM"


def make_row(case: dict[str, str]) -> Row:
    """A row of the corpus; raises NotExpressible."""
    where = f"{case['case']} {case['hw']}"
    try:
        recipe = read_defaults(from_data(translate(case).request, Request, source=where))[0]
    except Error as error:
        raise NotExpressible(error.message) from error
    found = {
        "memory.peak_allocated": Measurement(
            value=float(case["mem_max_GiB"]) * GIB, unit="B", spread=0.0005 * GIB,
            counter="torch.cuda.max_memory_allocated",
        )
    }  # fmt: skip
    if case["mem_alloc_GiB"]:
        found["memory.allocated_after_step"] = Measurement(
            value=float(case["mem_alloc_GiB"]) * GIB, unit="B", spread=0.0005 * GIB,
            counter="torch.cuda.memory_allocated after a step",
        )  # fmt: skip
    if case["iter_s"]:
        found["time.step_seconds"] = Measurement(
            value=float(case["iter_s"]), unit="s", counter="Megatron-LM's iteration timer"
        )
    return Row(
        id=f"golden-{case['case']}-{case['hw']}".replace("/", "-"),
        source=Source(name=SOURCE, url=URL, confidence="high", group=case["case"]),
        recipe_digest=recipe.digest,
        recipe=recipe,
        measurements=found,
        split=split_of(case["case"]),
        environment={"machine": case["hw"]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "measurements" / "megatron_golden.jsonl")
    asked = parser.parse_args()
    rows: list[Row] = []
    refused: Counter[tuple[str, str, str]] = Counter()
    with asked.file.open(encoding="utf-8", newline="") as file:
        for case in csv.DictReader(file):
            try:
                rows.append(make_row(case))
            except NotExpressible as reason:
                refused["NVIDIA/Megatron-LM golden values", str(reason), "memory"] += 1
    write_rows(asked.out, rows)
    write_refusals(asked.out, refused)
    print(f"{len(rows)} rows in {asked.out}, {refused.total()} not expressible:")
    for (_, reason, _), count in refused.most_common():
        print(f"  {count:4d}  {reason}")


if __name__ == "__main__":
    main()
