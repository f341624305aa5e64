"""Write rows of the corpus from published measurements.

    python scripts/import_published.py published.jsonl [--out measurements/published.jsonl]

Each line of the input is one published run (model's sizes, hardware, configuration, what was
measured, source). A source's translator in `scripts/published/` turns it into a request, the
request into a recipe; what cannot be expressed is counted by reason and printed, never guessed.
A row may carry memory, the time of a step, or both; a reason says which of them was lost.
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

from memfit.accuracy.corpus import Row, Source, read_rows, split_of, write_rows
from memfit.core.errors import Error
from memfit.plan.frameworks import find_framework
from memfit.plan.request.defaults import read_defaults
from memfit.records import from_data
from memfit.records.recipe import Recipe
from memfit.records.request import Request
from memfit.records.results import Measurement

AGREES = 0.03  # tokens of a step by its configuration and by the printed throughput
PRINTED = ("step_time_s", "tokens_per_s_per_gpu", "tokens_per_s_total", "samples_per_s")
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, IndexError)
ROOT = Path(__file__).parent.parent
# how a row's `source` begins -> module of `scripts/published` that reads it
TRANSLATORS = {
    "MooreThreads/SimuMax": "simumax",
    "MLCommons": "mlcommons",
    "FlagOpen/FlagPerf": "flagperf",
    "bigscience-workshop/bigscience": "bigscience",
    "NVIDIA-NeMo/Megatron-Bridge": "megatron_bridge",
    "NVIDIA/NeMo": "megatron_bridge",
    "AMD-AGI/Primus": "megatron_bridge",
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
    "mosaicml/llm-foundry": "llm_foundry",
    "Narayanan": "megatron_papers",
    "Smith et al.": "megatron_papers",
    "yanring/Megatron-MoE-ModelZoo": "moe_zoo",
    "foundation-model-stack/fms-fsdp": "small_trainers",
    "Dao-AILab/flash-attention": "small_trainers",
    "karpathy/llm.c": "small_trainers",
    "jzhang38/TinyLlama": "small_trainers",
    "NVIDIA/JAX-Toolbox": "small_trainers",
    "InternLM/InternEvo": "internevo",
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


def half_a_digit(printed: float) -> float:
    """Half a unit of the last printed digit."""
    digits = len(repr(printed).partition(".")[2].rstrip("0")) if printed % 1 else 0
    return 0.5 / 10**digits


def measure_memory(published: Published, kind: str, unit: int = 0) -> dict[str, Measurement]:
    """The printed peak; {} where there is none. unit: bytes, where the row's is not to be taken."""
    measured = published["measured"]
    printed = measured.get("peak_mem_gb")
    if printed is None:
        return {}
    unit = unit or UNITS[measured["peak_mem_unit"]]
    said = f"{measured['peak_mem_kind']}; printed in {measured['peak_mem_unit']}"
    spread = unit * half_a_digit(printed)
    return {
        f"memory.{kind}": Measurement(value=printed * unit, unit="B", spread=spread, counter=said)
    }


def measure_time(published: Published, recipe: Recipe) -> dict[str, Measurement]:
    """Seconds of an optimizer step, printed or as the printed throughput makes them.

    Raises NotExpressible where the recipe's tokens and the row's time and throughput do not agree.
    """
    measured, derived = published["measured"], published["derived"]
    seconds = measured.get("step_time_s") or derived.get("step_time_s")
    if not seconds:
        raise NotExpressible("neither a step's time nor a throughput that gives it")
    rate = measured.get("tokens_per_s_per_gpu") or derived.get("tokens_per_s_per_gpu")
    tokens = recipe.global_batch * recipe.sequence_length
    done = (rate or tokens / seconds / recipe.parallel.world) * seconds * recipe.parallel.world
    if not 1 - AGREES < done / tokens < 1 + AGREES:
        raise NotExpressible(f"its step has {tokens} tokens, its throughput {done:.0f}")
    printed = measured.get("step_time_s")
    said = "printed" if printed else "from the printed throughput"
    figure = next((measured[k] for k in PRINTED if measured.get(k)), 0)
    spread = seconds * half_a_digit(figure) / figure if figure else 0.0
    return {"time.step_seconds": Measurement(value=seconds, unit="s", spread=spread, counter=said)}


def measurements(
    published: Published, translated: Translated, recipe: Recipe
) -> tuple[dict[str, Measurement], dict[str, str]]:
    """The figures that a row carries, and for each use that it lost the reason."""
    found: dict[str, Measurement] = {}
    lost = {"memory": translated.memory_lost, "time": translated.time_lost}
    if about_memory(published) and not translated.memory_lost:
        found |= measure_memory(published, translated.kind, translated.unit)
    if about_time(published) and not translated.time_lost:
        try:
            found |= measure_time(published, recipe)
        except NotExpressible as reason:
            lost["time"] = str(reason)
    return found, {use: why for use, why in lost.items() if why and use in uses(published)}


def read_row(published: Published) -> tuple[Row, dict[str, str]]:
    """`make_row` of data that nobody has seen: a field of another kind refuses that row alone."""
    try:
        return make_row(published)
    except UNREADABLE as error:
        what = f"{type(error).__name__}: {error}"
        raise NotExpressible(f"a field that its translator cannot read ({what})") from error


def _fill(request: dict[str, Any]) -> dict[str, Any]:
    """The same with full rows, where a source says nothing of padding."""
    if "padded" not in find_framework(request["framework"]).knobs:
        return request
    return {**request, "options": {"padded": False, **request.get("options", {})}}


def make_row(published: Published) -> tuple[Row, dict[str, str]]:
    """A row of the corpus, and the uses that it lost with their reasons; raises NotExpressible."""
    try:
        translated = translate(published)
    except KeyError as key:
        raise NotExpressible(f"`{key.args[0]}` is not stated") from key
    try:
        request = from_data(_fill(translated.request), Request, source=published["id"])
        recipe = read_defaults(request)[0]
    except Error as error:
        raise NotExpressible(error.message) from error
    found, lost = measurements(published, translated, recipe)
    out_of_memory = bool(published["measured"].get("oom")) and "memory" not in lost
    if not found and not out_of_memory:
        raise NotExpressible("; ".join(dict.fromkeys(lost.values())) or "it prints no figure")
    group = published.get("dup_group") or ""
    row = Row(
        id=f"published-{published['id']}",
        source=Source(
            name=published["source"], url=published["url_or_path"], year=published["year"],
            confidence=translated.confidence or published["confidence"], group=group,
            notes=" ".join(filter(None, (published["notes"].strip(), translated.assumed))),
        ),
        recipe_digest=recipe.digest,
        recipe=recipe,
        measurements=found,
        out_of_memory=out_of_memory,
        split=split_of(group or published["id"]),
        environment=environment(published),
    )  # fmt: skip
    return row, lost


def environment(published: Published) -> dict[str, str]:
    """Software and machines as the row names them."""
    hardware = published["hardware"]
    said = {
        "framework": published["config"].get("framework"),
        "device": hardware["gpu"],
        "devices": hardware["n_gpus"],
        "device_memory_gb": hardware.get("mem_gb"),
    }
    optional = {
        "devices_per_node": hardware.get("gpus_per_node"),
        "interconnect": hardware.get("interconnect"),
        "attention": published["config"].get("attention"),
    }
    stated = {key: value for key, value in optional.items() if value}
    return {key: str(value) for key, value in (said | stated).items()}


def about_memory(published: Published) -> bool:
    """Whether a row says something about memory that its collector found usable."""
    measured = published["measured"]
    return bool(measured.get("oom")) or "memory" in published.get("usable_for", ())


def about_time(published: Published) -> bool:
    """Whether a row says how long a step took, in a way that its collector found usable."""
    return "time" in published.get("usable_for", ())


def uses(published: Published) -> tuple[str, ...]:
    """What a row may judge."""
    asked = {"memory": about_memory(published), "time": about_time(published)}
    return tuple(use for use, wanted in asked.items() if wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "measurements" / "published.jsonl")
    asked = parser.parse_args()
    lines = [json.loads(x) for x in asked.file.read_text(encoding="utf-8").splitlines() if x]
    rows: list[Row] = []
    refused: Counter[tuple[str, str, str]] = Counter()
    files = [f for f in beside(asked.out) if f.resolve() != asked.file.resolve()]
    others = [r for f in files for r in read_rows(f)]
    for published in filter(uses, lines):
        try:
            row, lost = read_row(published)
            if any(same_run(row, other) for other in others):
                raise NotExpressible("the same run stands in another file of the corpus")
            rows.append(row)
        except NotExpressible as reason:
            lost = dict.fromkeys(uses(published), str(reason))
        refused.update((published["source"].split(" ")[0], why, use) for use, why in lost.items())
    write_rows(asked.out, rows)
    write_refusals(asked.out, refused)
    timed = sum("time.step_seconds" in row.measurements for row in rows)
    print(f"{len(rows)} rows in {asked.out}, {timed} with a time; {refused.total()} uses lost:")
    for (source, reason, use), count in refused.most_common():
        print(f"  {count:4d}  {use}, {source}: {reason}")


def beside(out: Path) -> list[Path]:
    """The other files of the corpus, where the rows go there; another folder may hold anything."""
    if out.resolve().parent != (ROOT / "measurements").resolve():
        return []
    return sorted(f for f in out.parent.glob("*.jsonl") if f.name != out.name)


def same_run(one: Row, other: Row) -> bool:
    """Whether two rows print one figure of one recipe, each to its own digits."""
    if one.recipe_digest != other.recipe_digest:
        return False
    both = [(one.memory[k], other.memory[k]) for k in one.memory.keys() & other.memory.keys()]
    return any(abs(a.value - b.value) <= a.spread + b.spread for a, b in both)


def write_refusals(out: Path, refused: Counter[tuple[str, str, str]]) -> None:
    """Beside the rows: what could not be expressed (source, reason, use), for `memfit accuracy`."""
    listed: list[dict[str, Any]] = [
        {"source": source, "reason": reason, "rows": count, "use": use}
        for (source, reason, use), count in sorted(refused.items())
    ]
    out.with_suffix(".refused.json").write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    main()
