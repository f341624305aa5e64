"""What predicted rates of decoding are worth: published tokens a second, predicted today.

The rows are of other engines, which read and multiply what memfit's loop does. Those that launch
every operation, as memfit does, make the range of a plan; loops in CUDA graphs are shown beside.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from memfit.accuracy.corpus import home
from memfit.base_formats import find_base_format
from memfit.core.errors import InvalidRequest
from memfit.plan.request.problem import first_recipe, read_problem
from memfit.plan.search.candidate import Candidate
from memfit.plan.step_time.adapters import PROJECTIONS
from memfit.plan.step_time.arrays import change
from memfit.plan.step_time.predicted_time import find_setting
from memfit.plan.step_time.rollouts.decode_range import DecodeErrors
from memfit.plan.step_time.rollouts.decoding import Decoding, Step, step_seconds, time_step
from memfit.records import Record, from_data
from memfit.records.recipe import Precision
from memfit.records.request import Hardware, LoraRequest, Request, Task

LEAST = 20  # rows that a range may rest on


class DecodeRow(Record, frozen=True, kw_only=True):
    """One published rate of decoding."""

    id: str
    source: str
    url: str
    year: int
    split: Literal["fit", "test"]  # constants may be read off `fit` rows alone
    device: str
    model: str  # of the catalogue
    precision: Precision
    base_format: str
    double_quantised: bool
    outlier_threshold: float  # of int8; 0: columns with outliers are multiplied as all others
    adapters: int  # beside so many projections of a block
    rank: int
    rows: int  # in flight
    prompt: int  # tokens
    completion: int
    tokens_per_second: float  # of all rows
    launches: Literal["host", "graph"]  # each operation by the host, or all as one CUDA graph
    cache: Literal["slots", "grown"]  # grown: copied whole at each step, by concatenation
    fused_rows: int | None  # of its bitsandbytes; None: as memfit's
    software: str
    notes: str = ""


class DecodeCompared(Record, frozen=True, kw_only=True):
    """One published rate and what is predicted for it."""

    row: DecodeRow
    predicted: float  # tokens/s

    @property
    def ratio(self) -> float:
        """Measured over predicted seconds."""
        return self.predicted / self.row.tokens_per_second


def read_decode_rows() -> tuple[DecodeRow, ...]:
    """All published rates; raises InvalidRequest where their file is not there."""
    path = home() / "decoding" / "published.jsonl"
    if not path.is_file():
        raise InvalidRequest(f"no rows: there is no `{path}`")
    lines = path.read_text(encoding="utf-8").splitlines()
    return tuple(from_data(json.loads(line), DecodeRow, source=str(path)) for line in lines)


def compare_decoding(rows: Sequence[DecodeRow]) -> tuple[DecodeCompared, ...]:
    """Predict every row."""
    return tuple(DecodeCompared(row=row, predicted=predict_rate(row)) for row in rows)


def predict_rate(row: DecodeRow) -> float:
    """Today's prediction of a row, tokens a second of all rows in flight."""
    decoding = _read(row)
    seconds = sum(
        _seconds(time_step(decoding, row.prompt + token), row, decoding)
        for token in range(1, row.completion)
    )
    return row.rows * (row.completion - 1) / seconds


def _seconds(step: Step, row: DecodeRow, decoding: Decoding) -> float:
    step = step._replace(waiting=0.0)  # engines that sample a whole batch at once
    if row.cache == "grown":
        step = step._replace(cache=3 * step.cache)  # read and written beside being read
    return step.on_device if row.launches == "graph" else step_seconds(step, decoding.device)


def _read(row: DecodeRow) -> Decoding:
    plain = not find_base_format(row.base_format).quantised
    request = Request(
        model=row.model, weights="random", method="lora", lora=LoraRequest(rank=row.rank or 8),
        base_format="bf16" if plain else row.base_format,
        task=Task(global_batch=1, sequence_length=row.prompt + row.completion, packing=False),
        hardware=Hardware(device=row.device),
    )  # fmt: skip
    problem = read_problem(request)
    recipe = first_recipe(problem, method="lora", precision="bf16")
    recipe = replace(
        recipe, precision=row.precision,
        base_format=row.base_format, micro_batch=row.rows,
        quantisation=replace(
            recipe.quantisation, double=row.double_quantised,
            outlier_threshold=row.outlier_threshold,
        ),
    )  # fmt: skip
    totals = Candidate.of(problem, recipe).totals
    setting = find_setting(totals, recipe, problem.device)
    machine = setting.machine  # whose host is not theirs: launches as fitted
    setting = setting._replace(machine=machine._replace(own=machine.own._replace(launch=0.0)))
    share = row.adapters / PROJECTIONS
    layout = change(
        setting.layout, micro_batch=1.0 * row.rows, sequence=1.0, adapters=share, adapted=share
    )
    fused = find_base_format(row.base_format).fused_rows(problem.device.compute_capability)
    return Decoding(
        setting._replace(layout=layout), recipe, totals.architecture,
        len(totals.matrices) / totals.architecture.layers, problem.device,
        fused if row.fused_rows is None else row.fused_rows,
    )  # fmt: skip


def decode_errors_of(found: Sequence[DecodeCompared]) -> DecodeErrors:
    """What `memfit plan` shows as the range of decoding: rows that no constant was read off."""
    ratios = sorted(c.ratio for c in found if c.row.split == "test" and c.row.launches == "host")
    if len(ratios) < LEAST:
        raise ValueError(f"{len(ratios)} rows are too few for a range")
    cuts = statistics.quantiles(ratios, n=20)
    return DecodeErrors(
        rows=len(ratios), low=round(cuts[0], 4), high=round(cuts[-1], 4),
        lowest=round(ratios[0], 4), highest=round(ratios[-1], 4),
        median=round(statistics.median(ratios), 4),
    )  # fmt: skip
