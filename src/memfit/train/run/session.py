"""One process's share of a run: what it knows, and run.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from memfit.adapters import find_adapter
from memfit.core.errors import RunFailed
from memfit.families import read_model
from memfit.parallelism.shards import fullest_rank
from memfit.records import from_data, to_data, write_json
from memfit.records.habits import RunRequest, count_every
from memfit.records.ledger import Phase
from memfit.records.recipe import Recipe
from memfit.records.results import Certificate, Measurement, Run
from memfit.records.shapes import RowBounds
from memfit.train.checkpoint.sharded import Saver
from memfit.train.data.prepare import Data
from memfit.train.data.sampler import Sampler
from memfit.train.distributed.ranks import Ranks
from memfit.train.distributed.stragglers import Waiting
from memfit.train.habits.callbacks import Callbacks
from memfit.train.habits.metrics import Metrics
from memfit.train.habits.non_finite import NonFinite
from memfit.train.habits.samples import Samples
from memfit.train.habits.stopping import PREFIX, Judged, judge
from memfit.train.habits.time_left import Due, TimeBeside
from memfit.train.measure.counters import Meter, time_measurements
from memfit.train.rl.learn import Learning
from memfit.train.rl.prompts import PromptRows
from memfit.train.run.drift import Watcher
from memfit.train.run.guard import Interrupts
from memfit.train.run.logs import read_log
from memfit.train.run.machine import describe_environment
from memfit.train.run.progress import Progress
from memfit.train.run.rollout_figures import curve_of, measure_rollouts, show_answers

WATCHED_FIRST = 3  # steps
EXPOSED = "exposed_communication_seconds"  # in a step's line of the log
COUNTED = "torch.profiler: a collective runs and nothing computes; median of steps looked at"
EVALUATED = 0.15  # held-out tokens read in all, over tokens trained on: a twentieth of the time


class Cadence(RunRequest, frozen=True, kw_only=True):
    """How a run goes on around its steps: what a request says, and what it does not.

    evaluate_tokens of 0: all after the last step, and before it what a twentieth of the run's time
    allows; all each time where evaluations are compared.
    """

    # many ranks: checkpoints are copied to the host and written while training goes on
    asynchronous: bool | None = None  # None: on GPUs
    watch_every: int = 20  # CPU: a step whose tensors are all counted; the first three are, too.
    # Many ranks: at least so many between two steps whose collectives are looked at


@dataclass(kw_only=True)
class Session:
    """One process's share of a run."""

    recipe: Recipe
    folder: Path
    data: Data
    training: Sampler | PromptRows
    bounds: RowBounds
    held_out: Sampler | None
    held_out_bounds: RowBounds | None
    meter: Meter
    progress: Progress
    cadence: Cadence
    certificate: Certificate | None
    interrupts: Interrupts
    learning: Learning | None = None  # of objectives that sample answers
    ranks: Ranks = field(default_factory=Ranks)
    saver: Saver | None = None  # of many ranks
    skipped: int = 0  # steps of this process whose gradients were not finite
    warnings: list[str] = field(default_factory=list)
    continued: list[str] = field(default_factory=list)  # how it went on beyond its end, each time
    rewards_digest: str = ""  # of the user's own reward functions
    log_digest: str = ""  # of log.jsonl up to `done`, as the checkpoint there says
    done: int = 0  # steps whose result is complete
    begun: int = 0  # of these, those before this start
    saved: int = 0  # the step of the newest checkpoint of this start
    ended_early: str = ""  # why the run ends before its last step
    ended_before: tuple[int, str] = (0, "")  # steps of an earlier start, and why it ended there
    # step and value of each evaluation, where they are compared
    evaluated: list[tuple[int, float]] = field(default_factory=list)
    outliers: tuple[float, float] | None = None  # of int8: mean and largest share of columns
    received: float = 0.0  # of dealt experts: a rank's most rows over those of an even routing
    callbacks: Callbacks = field(init=False)  # the user's own, or of other packages
    metrics: Metrics = field(init=False)  # the same
    samples: Samples | None = None  # prompts that are answered while it trains
    beside: TimeBeside = field(init=False)
    watcher: Watcher = field(init=False)
    waiting: Waiting = field(init=False)
    non_finite: NonFinite = field(init=False)

    def __post_init__(self) -> None:
        self.beside = TimeBeside(_find_due(self))
        self.non_finite = NonFinite(self.cadence.skip_non_finite)
        place = self.recipe.parallel.stage_place(self.ranks.rank)
        self.watcher = Watcher(self.certificate, place)
        self.waiting = Waiting(
            self.ranks,
            first=WATCHED_FIRST,
            every=self.cadence.watch_every,
            groups=self.recipe.parallel.pp,
        )

    @property
    def judged(self) -> Judged:
        """What the evaluations so far say; nothing unless they are compared."""
        return judge(self.evaluated, self.cadence)

    @property
    def sampler(self) -> Sampler:
        """The batches of an objective that samples no answers."""
        assert isinstance(self.training, Sampler)
        return self.training

    @property
    def home(self) -> Path:
        """Where this process writes what is its own: the run folder, or its rank's within it."""
        return self.ranks.home(self.folder)

    def gather(self, *values: float) -> list[tuple[float, ...]]:
        """The numbers of all ranks that read rows of their own, in their order: of those that
        share products, one's; of those that share a row's tokens, their sums; of stages, the last
        one's, which has the loss."""
        parallel = self.recipe.parallel
        last = -parallel.dp * parallel.cp * parallel.tp
        apart = self.ranks.gather(*values)[last :: parallel.tp]
        if parallel.cp == 1:
            return apart
        starts = range(0, len(apart), parallel.cp)
        return [tuple(map(sum, zip(*apart[at : at + parallel.cp], strict=True))) for at in starts]

    def every(self, stated: float) -> int:
        """Steps between two of what happens so often; see `RunRequest`."""
        return count_every(stated, self.recipe.steps)

    def go_on(self, text: str) -> None:
        """Say on the screen and in run.json how a run goes on beyond its end."""
        self.continued.append(text)
        self.progress.note(text)

    def warn(self, text: str) -> None:
        """Tell the user now, and whoever reads run.json."""
        if text not in self.warnings:
            self.warnings.append(text)
        self.progress.note(f"warning: {text}")

    def note_outliers(self, found: tuple[float, float] | None) -> None:
        """Keep the shares for run.json, and warn of what no certificate has counted on."""
        self.outliers = found
        allowed = self.recipe.quantisation.outlier_share
        if found is not None and found[1] > allowed:
            self.warn(
                f"a projection had {found[1]:.2%} of its columns in 16 bits for their outliers, and"
                f" the certificate counts on {allowed:.2%}: raise `quantisation.outlier_share`"
            )

    def note_routing(self, most: float) -> None:
        """Keep for run.json how uneven the routing was, and warn of what no certificate counts on.

        most: rows that this rank received for its experts over those of an even routing.
        """
        self.received = max(self.received, most)
        allowed = self.recipe.parallel.received
        if most > allowed:
            self.warn(
                f"rank {self.ranks.rank} received {most:.2f}x the tokens of an even routing for its"
                f" experts, and the certificate counts on {allowed:g}x: raise"
                " `parallel.ep_imbalance`"
            )

    def compare(self) -> None:
        """Warn of what is above the certificate by now, naming who holds it."""
        for warning in self.watcher.look(self.meter.counters(), self.done):
            self.warn(warning)


def _find_due(session: Session) -> Due:
    """What the run does beside its steps."""
    recipe, cadence, held_out = session.recipe, session.cadence, session.held_out
    everything = 0 if held_out is None else int(held_out.corpus.lengths.sum())
    return Due(
        steps=recipe.steps,
        save_every=session.every(cadence.save_every),
        evaluate_every=0 if held_out is None else session.every(cadence.evaluate_every),
        sample=min(evaluation_tokens(session) or everything, everything),
        whole=min(cadence.evaluate_tokens or everything, everything),
        step_tokens=recipe.global_batch * recipe.sequence_length,
    )


def evaluation_tokens(session: Session) -> int:
    """Held-out tokens of an evaluation during training: at least one global batch; in a long run,
    what a twentieth of its time allows. All (0) where evaluations are compared with the last."""
    recipe, cadence = session.recipe, session.cadence
    if cadence.evaluate_tokens or cadence.best_by:
        return cadence.evaluate_tokens
    batch = recipe.global_batch * recipe.sequence_length
    times = -(-recipe.steps // session.every(cadence.evaluate_every))
    return max(batch, round(EVALUATED * batch * recipe.steps / times))


def _describe_held_out(session: Session, row: dict[str, Any]) -> str:
    """What an evaluation read, and how far another sample as large may lie."""
    unit = "pairs" if session.recipe.prefers else "tokens"
    if session.recipe.rates:
        unit = "answers"
    count = row["evaluation_targets"]
    read = f"all {count:,}" if row["evaluation_whole"] else f"a fixed sample of {count:,}"
    error = row.get("evaluation_error")
    return f"{read} held-out {unit}" + (f", standard error {error:.2g}" if error else "")


def _counted(session: Session) -> dict[str, Any]:
    """What depends on the data's values, and what was certified for it."""
    found: dict[str, Any] = {}
    if session.outliers is not None:
        counter = "columns that LLM.int8's kernels found outliers in, over all columns"
        mean, most = session.outliers
        found["quantisation.outlier_share"] = _measured(mean, "of columns", counter)
        found["quantisation.largest_outlier_share"] = _measured(
            most,
            "of columns",
            f"the same of one projection and micro-batch, at most; certified for"
            f" {session.recipe.quantisation.outlier_share:.2%}",
        )
    if session.received:
        found["experts.largest_imbalance"] = _measured(
            session.received, "x",
            "the most rows that this rank received for its experts over an even routing's;"
            f" certified for {session.recipe.parallel.received:g}",
        )  # fmt: skip
    return found


def write_run(session: Session, done: int, *, finished: bool) -> Run:
    """Write run.json from the log and the counters; of ranks, each its own.

    The first one's has the memory of the rank that is certified, and the peaks of all.
    """
    rows = [row for row in read_log(session.home) if row["step"] <= done]
    plain = [row for row in rows if not row["watched"]] or rows
    found = session.meter.measurements()
    found |= time_measurements([r["seconds"] for r in plain], [r["tokens"] for r in plain])
    evaluations = [(r["step"], r["evaluation_loss"]) for r in rows if "evaluation_loss" in r]
    total = sum(r["seconds"] for r in rows)
    waits = [r[EXPOSED] for r in rows if EXPOSED in r]
    if waits:
        found[f"time.{EXPOSED}"] = _measured(median(waits), "s", COUNTED, len(waits))
    found["time.total_seconds"] = _measured(total, "s", "perf_counter, all steps", len(rows))
    found |= _counted(session)
    unit = "nats/pair" if session.recipe.prefers else "nats/token"
    if session.recipe.rates:
        unit = "of an answer"
    if session.recipe.samples:
        unit = "policy loss"
    evaluated = [r for r in rows if "evaluation_loss" in r]
    held_out = _describe_held_out(session, evaluated[-1]) if evaluated else ""
    losses = tuple((r["step"], r["loss"]) for r in rows if r["loss"] is not None)
    if losses:
        found["loss.final"] = _measured(losses[-1][1], unit, "the last step's batch")
    if evaluations:
        error = evaluated[-1].get("evaluation_error", 0.0)
        measured = _measured(evaluations[-1][1], unit, held_out)
        found["loss.evaluation"] = replace(measured, spread=error)
    found |= _measure_metrics(session, evaluated, held_out)
    found |= _measure_rewards(rows, held_out, "answers" if session.recipe.rates else "pairs")
    found |= measure_rollouts(rows, plain)
    if (judged := session.judged).best:
        name = f"best.{session.cadence.best_by}"
        of = held_out or "greedy answers to all held-out prompts"
        found[name] = _measured(judged.value, "of an evaluation", f"step {judged.best}; {of}")
    if rows and "loss_rounded" in rows[0] and evaluations:
        kind = session.recipe.qat
        for name, value, when in (
            ("before", rows[0]["loss_unrounded"], "before training, not rounded"),
            ("plainly_rounded", rows[0]["loss_rounded"], f"before training, rounded to {kind}"),
            ("trained_for_it", evaluations[-1][1], f"after training, rounded to {kind}"),
        ):
            found[f"qat.loss_{name}"] = _measured(value, unit, f"{held_out}; {when}")
    peaks = session.meter.peaks
    run = Run(
        recipe_digest=session.recipe.digest,
        recipe=session.recipe,
        measurements=found,
        phases={str(phase): peaks[phase] for phase in Phase if phase in peaks},
        ledger=session.meter.ledger,
        losses=losses,
        evaluations=tuple(evaluations),
        steps_done=done,
        finished=finished,
        environment={
            **describe_environment(session.meter.device),
            "data": session.data.training.digest,
            **({"rewards": session.rewards_digest} if session.rewards_digest else {}),
        },
        warnings=tuple(session.warnings),
        continued=tuple(session.continued),
        ended_early=session.ended_early,
        rewards=curve_of(rows, "reward"),
        divergences=curve_of(rows, "kl"),
        value_losses=curve_of(rows, "value_loss"),
        answers=show_answers(rows),
    )
    if session.ranks.size > 1:
        run = _with_others(session, run)
    try:
        session.home.mkdir(parents=True, exist_ok=True)
        write_json(session.home / "run.json", run)
    except OSError as error:
        raise RunFailed(
            f"could not write run.json in `{session.home}`: {error.strerror}",
            hint="free space there and start the same command again: it resumes",
        ) from None
    return run


def _with_others(session: Session, run: Run) -> Run:
    """The first rank's result, with the memory of the rank that its certificate is of."""
    texts = session.ranks.gather_texts(json.dumps(to_data(run)))
    if session.ranks.rank:
        return run
    others = [from_data(json.loads(text), Run, source="another rank's run.json") for text in texts]
    fullest = _find_fullest(session.recipe, others)
    theirs = {n: m for n, m in others[fullest].measurements.items() if n.startswith("memory.")}
    theirs |= _measure_waits(others)
    return replace(
        run,
        measurements=run.measurements | theirs,
        phases=others[fullest].phases,
        ledger=others[fullest].ledger,
        ranks=tuple(other.phases for other in others),
        warnings=tuple(dict.fromkeys(w for other in others for w in other.warnings)),
    )


def _measure_waits(runs: list[Run]) -> dict[str, Measurement]:
    """Of collectives that nothing covers: the ranks' mean, and who waits least and most."""
    name = f"time.{EXPOSED}"
    found = [run.measurements[name] for run in runs if name in run.measurements]
    if len(found) < len(runs):
        return {}
    each = [m.value for m in found]
    least, most = min(each), max(each)
    counter = (
        f"{COUNTED}; mean of {len(each)} ranks: rank {each.index(least)} {least:.3g} s, rank"
        f" {each.index(most)} {most:.3g} s"
    )
    return {name: _measured(sum(each) / len(each), "s", counter, found[0].n)}


def _find_fullest(recipe: Recipe, runs: list[Run]) -> int:
    """The rank that the certificate is of; of stages, the one that held the most."""
    if recipe.parallel.pp > 1:
        peaks = [max(run.phases.values(), default=0) for run in runs]
        return peaks.index(max(peaks))
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    return fullest_rank(model, recipe.parallel)[0]


def _measure_metrics(
    session: Session, evaluated: list[dict[str, Any]], held_out: str
) -> dict[str, Measurement]:
    """What the user's functions made of the last evaluation."""
    last = evaluated[-1] if evaluated else {}
    values = {f: last.get(f"{PREFIX}{f}") for f in session.metrics.figures}
    return {
        f"metric.{figure}": _measured(value, f"by `{session.metrics.figures[figure]}`", held_out)
        for figure, value in values.items()
        if value is not None
    }


def _measure_rewards(
    rows: list[dict[str, Any]], held_out: str, what: str
) -> dict[str, Measurement]:
    """Of pairs or rated answers: what the last step, and the last evaluation, put right and by how
    much."""
    found: dict[str, Measurement] = {}
    for prefix, name, counter in (
        ("", "final", f"the last step's {what}"), ("evaluation_", "evaluation", held_out),
    ):  # fmt: skip
        last = next((r for r in reversed(rows) if f"{prefix}reward_margin" in r), None)
        if last is not None:
            for key, unit in (("accuracy", "share of pairs"), ("margin", "nats")):
                if (value := last.get(f"{prefix}reward_{key}")) is None:
                    continue  # of rated answers, none is put right or wrong
                found[f"reward.{key}.{name}"] = _measured(value, unit, counter)
            if (mean := last.get(f"{prefix}cross_entropy")) is not None:
                found[f"cross_entropy.{name}"] = _measured(mean, "nats/token", counter)
    return found


def _measured(value: float, unit: str, counter: str, n: int = 1) -> Measurement:
    return Measurement(value=value, unit=unit, counter=counter, n=n)
