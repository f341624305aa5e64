"""Write rows of the corpus from peft's comparison of its methods on MetaMathQA.

    python scripts/import_peft.py peft_metamathqa.json [--out measurements/peft_metamathqa.jsonl]

Each record of the input is one experiment of method_comparison/MetaMathQA on an L40S: its name, the
optimizer, whether autocast was on, rows and tokens of a batch, trained parameters, then reserved
memory (average and peak) and allocated memory (average) in GiB, and tokens a second.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from import_published import ROOT, write_refusals
from published import NotExpressible, Published
from published.peft import experiment, metamath

from memfit.accuracy.corpus import Row, Source, split_of, write_rows
from memfit.core.errors import Error
from memfit.core.units import GIB
from memfit.plan.request.defaults import read_defaults
from memfit.records import from_data
from memfit.records.request import Request
from memfit.records.results import Measurement

SOURCE = "huggingface/peft method_comparison/MetaMathQA/results"
URL = "https://github.com/huggingface/peft"


def make_row(record: list[Any]) -> Row:
    """A row of the corpus; raises NotExpressible."""
    name = str(record[0])
    row: Published = experiment(record)
    try:
        recipe = read_defaults(from_data(metamath(row), Request, source=name))[0]
    except Error as error:
        raise NotExpressible(error.message) from error
    reserved = Measurement(
        value=float(record[7]) * GIB, unit="B", spread=0.005 * GIB,
        counter="torch.cuda.max_memory_reserved, less what was reserved at the start",
    )  # fmt: skip
    group = f"peft-metamath-{name.replace('/llama-3.2-3B', '')}"
    return Row(
        id=f"metamath-{name}".replace("/", "-"),
        source=Source(name=SOURCE, url=URL, confidence="medium", group=group),
        recipe_digest=recipe.digest,
        recipe=recipe,
        measurements={"memory.peak_reserved": reserved},
        split=split_of(group),
        environment={"framework": "HF/PEFT", "device": "L40S-48GB", "devices": "1"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    out = ROOT / "measurements" / "peft_metamathqa.jsonl"
    parser.add_argument("--out", type=Path, default=out)
    asked = parser.parse_args()
    rows: list[Row] = []
    refused: Counter[tuple[str, str, str]] = Counter()
    for record in json.loads(asked.file.read_text(encoding="utf-8")):
        try:
            rows.append(make_row(record))
        except NotExpressible as reason:
            refused[SOURCE, str(reason), "memory"] += 1
    write_rows(asked.out, rows)
    write_refusals(asked.out, refused)
    print(f"{len(rows)} rows in {asked.out}, {refused.total()} not expressible:")
    for (_, reason, _), count in refused.most_common():
        print(f"  {count:4d}  {reason}")


if __name__ == "__main__":
    main()
