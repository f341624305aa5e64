"""predicted, certified and measured of one run folder, joined on the recipe's digest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from memfit.accuracy.plausible import check_run
from memfit.adapters import find_adapter
from memfit.catalog import find_device
from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import exists, read_text
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import find_fullest, predict_peak
from memfit.records import N, read_json
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.results import Certificate, Comparison, Measurement, Plan, Report, Run

MEMORY = ("peak_allocated", "peak_reserved", "device_total")
# the first prefix that a comparison's name has gives the title under which it is shown
SECTIONS = (
    ("memory.phase.", "Memory by instant"),
    ("memory.kind.", "Memory by kind at the peak"),
    ("memory.rank.", "Memory by rank at its own peak"),
    ("memory.", "Memory"),
    ("time.", "Time"),
)
TIME = {
    "step_seconds": "s",
    "tokens_per_second": "tokens/s",
    "mfu": "fraction of peak",
    "hfu": "fraction of peak",
}
# parts of an iteration that samples answers, as a run measures them, and the phases of a plan
PARTS = {"rollout": ("switch", "prefill", "decode"), "update": ("update",)}
WAITING = ("links", "pipeline")  # streams of a predicted step in which no rank computes
SECONDS = "seconds."  # of the parts of an iteration that samples answers
RANKS = 8  # that are shown: of more, those that held the most
SAMPLE = "sample.txt"


def read_report(folder: Path) -> Report:
    """Join plan.json with certificate.json and run.json where they exist.

    Raises InvalidRequest: no plan, or files of different recipes.
    """
    if not exists(folder / "plan.json"):
        raise InvalidRequest(
            f"`{folder}` holds no plan.json",
            hint="name the folder of a run: `memfit train request.yaml --folder runs/first`",
        )
    plan = read_json(folder / "plan.json", Plan)
    certificate = _read(folder / "certificate.json", Certificate)
    run = _read(folder / "run.json", Run)
    for name, other in (("certificate.json", certificate), ("run.json", run)):
        if other is not None and other.recipe_digest != plan.recipe_digest:
            raise InvalidRequest(
                f"`{folder / name}` is of recipe {other.recipe_digest}, "
                f"plan.json of {plan.recipe_digest}",
                hint="the folder mixes two runs; train again in an empty one",
            )
    sample = folder / SAMPLE
    text = read_text(sample) if sample.exists() else ""
    return join(plan, certificate, run, sample=text)


def join(
    plan: Plan, certificate: Certificate | None, run: Run | None, *, sample: str = ""
) -> Report:
    """Three results of one recipe as one report."""
    recipe = plan.recipe
    refused = _refuse_time(plan, run) if run else ""
    return Report(
        recipe_digest=plan.recipe_digest,
        title=f"{recipe.model.name}, {recipe.method} {recipe.precision} on {recipe.placed_on}",
        comparisons=tuple(compare(plan, certificate, run, timed=not refused)),
        plan=plan,
        certificate=certificate,
        run=run,
        sample=sample,
        refused=refused,
    )


def _refuse_time(plan: Plan, run: Run) -> str:
    """Why the measured seconds cannot be, and what to do; "" where they can."""
    try:
        check_run(plan, run)
    except InvalidRequest as error:
        return f"{error.message}; {error.hint}"
    return ""


def _read(path: Path, kind: type[N]) -> N | None:
    return read_json(path, kind) if path.exists() else None


def compare(
    plan: Plan, certificate: Certificate | None, run: Run | None, *, timed: bool = True
) -> Iterator[Comparison]:
    """Every quantity that at least one source states: memory first, then time.

    timed: whether the run's seconds are measurements.
    """
    found: dict[str, Measurement] = run.measurements if run else {}
    if not timed:
        found = {name: m for name, m in found.items() if not name.startswith("time.")}
    for name in MEMORY:
        yield from _row(
            f"memory.{name}",
            "bytes",
            getattr(plan.memory, name),
            getattr(certificate.memory, name) if certificate else None,
            _value(found, f"memory.{name}"),
        )
    yield from _phases(plan, certificate, run)
    yield from _kinds(plan, certificate, run)
    yield from _ranks(plan, certificate, run)
    for name, unit in TIME.items():
        measured = _value(found, f"time.{name}")
        if name in ("mfu", "hfu"):
            measured = _utilisation(plan, name, _value(found, "time.tokens_per_second"))
        yield from _row(f"time.{name}", unit, getattr(plan.time, name), None, measured)
    for part, phases in PARTS.items():
        measured = _value(found, f"rate.{part}") if timed else None
        name = f"time.{part}_tokens_per_second"
        yield from _row(name, "tokens/s", _predict_rate(plan, phases), None, measured)
    if plan.recipe.parallel.world > 1:
        name = "time.exposed_communication_seconds"
        yield from _row(name, "s", _predict_waiting(plan), None, _value(found, name))


def _predict_rate(plan: Plan, phases: tuple[str, ...]) -> float | None:
    """Tokens a second of phases together, of those that the last of them samples or learns from;
    None where no answers are sampled. Rates compare what seconds cannot: lengths are bounds."""
    rows = {row.phase: row for row in plan.time.phases}
    if phases[-1] not in rows:
        return None
    seconds = sum(rows[phase].seconds or 0.0 for phase in phases)
    return rows[phases[-1]].tokens / seconds if seconds else None


def _predict_waiting(plan: Plan) -> float | None:
    """Seconds of a step in which a rank only waits for others; None where its time is unknown."""
    spans = plan.timeline.spans
    return sum(s.duration for s in spans if s.stream in WAITING) if spans else None


def _utilisation(plan: Plan, name: str, rate: float | None) -> float | None:
    """MFU or HFU of the measured tokens a second: a token's FLOP as planned, over the same peak.

    Of tokens and not of steps: rows that are shorter than planned have less FLOP.
    """
    share, predicted = getattr(plan.time, name), plan.time.tokens_per_second
    if share is None or not predicted or not rate:
        return None
    return float(share * rate / predicted)


def _value(found: dict[str, Measurement], name: str) -> float | None:
    return found[name].value if name in found else None


def _phases(plan: Plan, certificate: Certificate | None, run: Run | None) -> Iterator[Comparison]:
    predicted = {p: plan.ledger.total(p) for p in plan.ledger.phases}
    certified = certificate.phases if certificate else {}
    measured = run.phases if run else {}
    for phase in Phase:
        yield from _row(
            f"memory.phase.{phase}",
            "bytes",
            predicted.get(phase),
            certified.get(phase),
            measured.get(phase),
        )


def _kinds(plan: Plan, certificate: Certificate | None, run: Run | None) -> Iterator[Comparison]:
    """By kind, every source at the same phase: the peak's, as the latest source has it."""
    sources = [s.ledger if s else None for s in (plan, certificate, run)]
    phase = peak_phase(plan, certificate, run)
    held = [_by_kind(ledger, phase) for ledger in sources]
    for kind in Kind:
        if any(sums and kind in sums for sums in held):
            values = [None if sums is None else sums.get(kind, 0) for sums in held]
            yield from _row(f"memory.kind.{kind}", "bytes", *values)


def _ranks(plan: Plan, certificate: Certificate | None, run: Run | None) -> Iterator[Comparison]:
    """Each rank's own peak, beside what is predicted of that rank; one of them is certified."""
    if run is None or not run.ranks:
        return
    model = find_adapter(plan.recipe).adapt(read_model(plan.recipe.model), plan.recipe)
    device = find_device(plan.recipe.device)
    certified, _ = find_fullest(model, plan.recipe, device)
    measured = {rank: max(phases.values(), default=0) for rank, phases in enumerate(run.ranks)}
    for rank in sorted(sorted(measured, key=lambda rank: -measured[rank])[:RANKS]):
        yield from _row(
            f"memory.rank.{rank}",
            "bytes",
            predict_peak(model, plan.recipe, device, rank),
            certificate.memory.peak_allocated if certificate and rank == certified else None,
            measured[rank],
        )


def peak_phase(plan: Plan, certificate: Certificate | None, run: Run | None) -> Phase:
    """The phase of the largest peak, by measurement, else certificate, else prediction."""
    for source in (run, certificate):
        if source is not None and source.ledger.entries:
            return source.ledger.peak_phase
    return plan.ledger.peak_phase


def _by_kind(ledger: Ledger | None, phase: Phase) -> dict[Kind, int] | None:
    """None where the source says nothing of this phase, which is not the same as zero bytes."""
    if ledger is None or phase not in ledger.phases:
        return None
    return ledger.by_kind(phase)


def _row(
    name: str,
    unit: str,
    predicted: float | None,
    certified: float | None,
    measured: float | None,
) -> Iterator[Comparison]:
    if predicted is None and certified is None and measured is None:
        return
    truth = certified if measured is None else measured
    yield Comparison(
        name=name,
        unit=unit,
        predicted=predicted,
        certified=certified,
        measured=measured,
        error_predicted=signed_error(predicted, truth),
        error_certified=signed_error(certified, measured),
    )


def signed_error(claimed: float | None, actual: float | None) -> float | None:
    """claimed / actual - 1; None without both, and None of a share of nothing."""
    if claimed is None or actual is None:
        return None
    if claimed == actual:
        return 0.0
    return claimed / actual - 1 if actual else None


def sections(comparisons: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    """Comparisons under the title of the first prefix that their name has, in screen order."""
    found: dict[str, list[Comparison]] = {title: [] for _, title in SECTIONS}
    for row in comparisons:
        title = next(title for prefix, title in SECTIONS if row.name.startswith(prefix))
        found[title].append(row)
    order = ["Memory", *(title for _, title in SECTIONS if title != "Memory")]
    return [(title, found[title]) for title in order if found[title]]


def warnings_of(report: Report) -> tuple[str, ...]:
    """Return the report's warnings: refused seconds, then those of the run."""
    refused = (f"measured seconds are not shown: {report.refused}",) if report.refused else ()
    return refused + (report.run.warnings if report.run else ())


def phase_seconds(run: Run) -> dict[str, Measurement]:
    """Measured seconds of each part of an iteration, by its name; empty of other runs."""
    return {
        name.removeprefix(SECONDS): m
        for name, m in run.measurements.items()
        if name.startswith(SECONDS)
    }
