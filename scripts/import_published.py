"""Write rows of the corpus from published measurements.

    python scripts/import_published.py published.jsonl [--out measurements/published.jsonl]

Each line of the input is one published run (model's sizes, hardware, configuration, what was
measured, source). A source's translator in `scripts/published/` turns it into a request, the
request into a recipe; what cannot be expressed is counted by reason and printed, never guessed.
The same command reads rows that nobody has seen yet: then `memfit accuracy OUT` judges them.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from published import UNITS, NotExpressible, Published, Translated

from memfit.corpus import Row, Source, read_rows, split_of, write_rows
from memfit.errors import Error
from memfit.nouns import from_data
from memfit.plan.foreign import read_foreign
from memfit.request import Request
from memfit.results import Measurement

ROOT = Path(__file__).parent.parent
# how a row's `source` begins -> module of `scripts/published` that reads it
TRANSLATORS = {
    "MooreThreads/SimuMax": "simumax",
    "MLCommons": "mlcommons",
    "FlagOpen/FlagPerf": "flagperf",
    "bigscience-workshop/bigscience": "bigscience",
    "NVIDIA-NeMo/Megatron-Bridge": "megatron_bridge",
    "huggingface/nanotron": "nanotron",
    "pytorch/torchtitan": "torchtitan",
    "pytorch/ao": "torchtitan",
    "pytorch/torchtune": "torchtune",
    "NVIDIA-NeMo/Automodel": "automodel",
    "LambdaLabsML": "lambdalabs",
    "Lightning-AI/litgpt": "litgpt",
    "QwenLM/Qwen": "qwen",
    "huggingface/peft": "peft",
    "modelscope/ms-swift": "ms_swift",
    "deepspeedai/DeepSpeed": "deepspeed",
    "AnswerDotAI/fsdp_qlora": "fsdp_qlora",
    "stas00/ml-engineering": "stas00",
}


def translate(published: Published) -> Translated:
    """The request of a published row; raises NotExpressible."""
    source = published["source"]
    for start, module in TRANSLATORS.items():
        if source.startswith(start):
            try:
                return importlib.import_module(f"published.{module}").translate(published)
            except ModuleNotFoundError as error:
                if error.name != f"published.{module}":
                    raise
    raise NotExpressible(f"no translator for rows of `{source.split(' ')[0]}`")


def measurements(published: Published, kind: str) -> dict[str, Measurement]:
    """The printed figures; half a unit of the last printed digit is their spread."""
    measured, found = published["measured"], {}
    printed = measured.get("peak_mem_gb")
    if printed is not None:
        unit = UNITS[measured["peak_mem_unit"]]
        digits = len(repr(printed).partition(".")[2].rstrip("0")) if printed % 1 else 0
        found[f"memory.{kind}"] = Measurement(
            value=printed * unit, unit="B", spread=unit * 0.5 / 10**digits,
            counter=f"{measured['peak_mem_kind']}; printed in {measured['peak_mem_unit']}",
        )  # fmt: skip
    seconds = measured.get("step_time_s") or published["derived"].get("step_time_s")
    if seconds and "time" in published["usable_for"]:
        said = "printed" if measured.get("step_time_s") else "from the printed throughput"
        found["time.step_seconds"] = Measurement(value=seconds, unit="s", counter=said)
    return found


def make_row(published: Published) -> Row:
    """A row of the corpus; raises NotExpressible."""
    translated = translate(published)
    try:
        request = from_data(translated.request, Request, where=published["id"])
        recipe = read_foreign(request)[0]
    except Error as error:
        raise NotExpressible(error.message) from error
    group = published.get("dup_group") or ""
    return Row(
        id=f"published-{published['id']}",
        source=Source(
            name=published["source"], url=published["url_or_path"], year=published["year"],
            confidence=published["confidence"], group=group, notes=published["notes"],
        ),
        recipe_digest=recipe.digest,
        recipe=recipe,
        measurements=measurements(published, translated.kind),
        out_of_memory=bool(published["measured"].get("oom")),
        split=split_of(group or published["id"]),
        environment={
            "framework": str(published["config"].get("framework")),
            "device": published["hardware"]["gpu"],
            "devices": str(published["hardware"]["n_gpus"]),
            "device_memory_gb": str(published["hardware"].get("mem_gb")),
        },
    )  # fmt: skip


def about_memory(published: Published) -> bool:
    """Whether a row says something about memory that its collector found usable."""
    measured = published["measured"]
    return bool(measured.get("oom")) or "memory" in published.get("usable_for", ())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "measurements" / "published.jsonl")
    asked = parser.parse_args()
    lines = [json.loads(x) for x in asked.file.read_text(encoding="utf-8").splitlines() if x]
    rows: list[Row] = []
    refused: Counter[tuple[str, str]] = Counter()
    others = [r for f in beside(asked.out) for r in read_rows(f)]
    for published in filter(about_memory, lines):
        try:
            row = make_row(published)
            if any(same_run(row, other) for other in others):
                raise NotExpressible("the same run stands in another file of the corpus")
            rows.append(row)
        except NotExpressible as reason:
            refused[published["source"].split(" ")[0], str(reason)] += 1
    write_rows(asked.out, rows)
    write_refusals(asked.out, refused)
    print(f"{len(rows)} rows in {asked.out}, {refused.total()} not expressible:")
    for (source, reason), count in refused.most_common():
        print(f"  {count:4d}  {source}: {reason}")


def beside(out: Path) -> list[Path]:
    """The other files of the corpus in the same folder."""
    return sorted(f for f in out.parent.glob("*.jsonl") if f.name != out.name)


def same_run(one: Row, other: Row) -> bool:
    """Whether two rows print one figure of one recipe, each to its own digits."""
    if one.recipe_digest != other.recipe_digest:
        return False
    both = [(one.memory[k], other.memory[k]) for k in one.memory.keys() & other.memory.keys()]
    return any(abs(a.value - b.value) <= a.spread + b.spread for a, b in both)


def write_refusals(out: Path, refused: Counter[tuple[str, str]]) -> None:
    """Beside the rows: what could not be expressed, for `memfit accuracy` to say."""
    listed: list[dict[str, Any]] = [
        {"source": source, "reason": reason, "rows": count}
        for (source, reason), count in sorted(refused.items())
    ]
    out.with_suffix(".refused.json").write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    main()
