"""The rules of thumb held against measured runs: how far each is off, and which way.

A rule gives bytes for the whole model; they are divided among the devices that share its weights
(tensor and pipeline parallel ranks, and the data-parallel ones where ZeRO-3 cuts weights), which is
how people use it. `make docs` writes the result to `catalog/folklore.json`, so that `memfit rules`
shows it without reading the corpus.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec

from memfit.accuracy.corpus import Row
from memfit.accuracy.memory_errors import Accuracy, Compared
from memfit.base_formats import find_base_format
from memfit.families import read_model
from memfit.records import Record, from_data

FILE = Path(__file__).parents[1] / "catalog" / "folklore.json"
FULL, ADAPTED, QUANTISED = "full training", "LoRA over 16-bit weights", "LoRA over 4-bit weights"


class Judged(Record, frozen=True, kw_only=True):
    """One rule over the runs that it speaks of; errors are rule / measured - 1."""

    rule: str
    runs: str  # which runs
    figures: int
    median: float  # of absolute errors
    bias: float  # the mean of signed errors
    too_low: int  # figures where the rule asks for less than was measured
    lowest: float
    lowest_row: str
    highest: float
    highest_row: str


# rule -> (runs it speaks of, bytes a parameter)
BYTES: dict[str, tuple[str, float]] = {
    "train-states": (FULL, 16), "train-18": (FULL, 18), "train-24": (FULL, 24),
    "train-80": (FULL, 80), "load-16bit": (ADAPTED, 2), "load-4bit": (QUANTISED, 0.5),
}  # fmt: skip


def runs_of(row: Row) -> str:
    """Which of the rules' kinds of run a row is; empty for others."""
    recipe = row.recipe
    if recipe.method == "full":
        return FULL
    if recipe.method != "lora":
        return ""
    base = find_base_format(recipe.base_format)
    kinds = {(16, False): ADAPTED, (4, True): QUANTISED}
    return "" if base.unknown else kinds.get((base.bits, base.quantised), "")


def sharing(row: Row) -> int:
    """Devices that share one copy of the weights."""
    p = row.recipe.parallel
    return p.tp * p.pp * (p.dp_shard if p.zero == 3 else 1)


def judge(rows: Iterable[Row], found: Accuracy) -> tuple[Judged, ...]:
    """Every rule over the headline figures of the corpus."""
    by_id = {row.id: row for row in rows}
    figures = [c for c in found.compared if c.headline]
    made = []
    for rule, (runs, each) in BYTES.items():
        errors = _errors(figures, by_id, runs, each)
        if errors:
            made.append(_judged(rule, runs, errors))
    return tuple(made)


def _errors(
    figures: Iterable[Compared], rows: dict[str, Row], runs: str, each: float
) -> list[tuple[float, str]]:
    errors = []
    for figure in figures:
        row = rows[figure.id]
        if runs_of(row) == runs:
            says = each * read_model(row.recipe.model).parameters / sharing(row)
            errors.append((says / figure.measured - 1, figure.id))
    return sorted(errors)


def _judged(rule: str, runs: str, errors: list[tuple[float, str]]) -> Judged:
    sizes = [error for error, _ in errors]
    return Judged(
        rule=rule,
        runs=runs,
        figures=len(errors),
        median=round(statistics.median(map(abs, sizes)), 4),
        bias=round(statistics.fmean(sizes), 4),
        too_low=sum(error < 0 for error in sizes),
        lowest=round(sizes[0], 4),
        lowest_row=errors[0][1],
        highest=round(sizes[-1], 4),
        highest_row=errors[-1][1],
    )


def read_judged() -> dict[str, Judged]:
    """What the corpus says of each rule, by its name."""
    data = msgspec.json.decode(FILE.read_bytes())
    judged = [from_data(one, Judged, source=str(FILE)) for one in data]
    return {one.rule: one for one in judged}


def say(judged: Judged) -> str:
    """The sentence that screens and pages show."""
    return (
        f"over {judged.figures} measured figures of {judged.runs} the rule is off by"
        f" {judged.median:.0%} in the median, {judged.bias:+.0%} on average; it asks for less than"
        f" was measured in {judged.too_low}, from {judged.lowest:+.0%} ({judged.lowest_row})"
        f" to {judged.highest:+.0%} ({judged.highest_row})"
    )
