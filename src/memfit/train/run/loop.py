"""The run: from a certified recipe to a trained model in a folder, however often it is stopped.

folder/run.json      what was measured; written at the start, with each checkpoint, at the end
       log.jsonl     one object a step
       ranks/        the same two of every other rank
       checkpoints/  the last two, or `run.keep` of them, and the best if the run selects one
       model/        the result
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from memfit import catalog
from memfit.allocator.heap import keeps_freed
from memfit.core.errors import DoesNotFit, InvalidRequest, RunFailed
from memfit.families import read_model
from memfit.optimizers.shared.groups import set_rate
from memfit.records import read_json
from memfit.records.habits.continued import check_continues, name_lineage
from memfit.records.ledger import ROLLOUT, Phase
from memfit.records.recipe import Recipe
from memfit.records.request import Request
from memfit.records.results import Certificate, OutOfMemory, Run
from memfit.records.shapes import BatchShape, bounding_shapes, evaluation_shapes
from memfit.train.checkpoint.export import FOLDER as MODEL
from memfit.train.checkpoint.export import check_model, save_model
from memfit.train.checkpoint.files import FOLDER as CHECKPOINTS
from memfit.train.checkpoint.files import (
    LOGGED,
    Keep,
    check_digest,
    checkpoint_state,
    find_damage,
    folder_of,
    newest_checkpoint,
    remove_unfinished,
)
from memfit.train.checkpoint.sharded import Saver
from memfit.train.checkpoint.whole import load_checkpoint, save_checkpoint
from memfit.train.data.prepare import build_samplers, read_data
from memfit.train.data.sampler import Micro
from memfit.train.distributed.dealt import received
from memfit.train.distributed.ranks import MoreRanks, Ranks, explained_loss
from memfit.train.habits.callbacks import Callbacks
from memfit.train.habits.continuing import describe_continuation
from memfit.train.habits.metrics import Metrics, check_metrics
from memfit.train.habits.non_finite import check_figures, check_skips, find_broken
from memfit.train.habits.samples import check_samples, choose_samples
from memfit.train.habits.stopping import check_best, read_evaluations
from memfit.train.habits.trackers import open_trackers
from memfit.train.measure.counters import (
    Meter,
    count_beside,
    count_targets,
    run_step,
    start_device,
    synthetic_micro,
)
from memfit.train.measure.resident import Resident, settle_heap
from memfit.train.model.quantised import count_outliers
from memfit.train.model.weights import fill_weights
from memfit.train.rl.online import (
    digest_rewards,
    evaluate_iteration,
    learning_of,
    take_iteration,
)
from memfit.train.rl.rehearsal import rehearse
from memfit.train.run.certified import find_excess, find_other_version
from memfit.train.run.evaluation import (
    evaluate_held_out,
    evaluate_rounding,
    name_all_rewards,
    sample_answers,
)
from memfit.train.run.guard import Interrupts, explained_out_of_memory, locked
from memfit.train.run.logs import Log, read_log
from memfit.train.run.oom_report import describe_shortage, find_alive
from memfit.train.run.progress import Facts, Moment, Progress, Silent
from memfit.train.run.session import (
    EXPOSED,
    WATCHED_FIRST,
    Cadence,
    Session,
    evaluation_tokens,
    write_run,
)
from memfit.train.step.build import Built, build_optimizer
from memfit.train.step.reference_log_probs import give_reference
from memfit.train.step.scaling import was_skipped
from memfit.train.step.schedule import learning_rate

__all__ = ["Cadence", "Progress", "train"]

UNTOUCHED = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ACCUMULATE)  # weights and states


def train(
    recipe: Recipe,
    request: Request,
    folder: Path,
    *,
    certificate: Certificate | None = None,
    predicted_seconds: float | None = None,
    progress: Progress | None = None,
    cadence: Cadence | None = None,
    cache: Path | None = None,
    override: bool = False,
    ranks: Ranks | None = None,
) -> Run:
    """Run the recipe on the request's data; the same call goes on where an earlier one stopped.

    A finished run is returned as it is. ranks: the processes of the run, each of which calls this.
    `predicted_seconds` is of one step. override: train under a certificate that does not hold here,
    or says that it does not fit.
    Raises InvalidRequest: data, weights or tokenizer that cannot be used, a folder of another
    recipe, a certificate that does not hold; DoesNotFit; RunFailed: out of memory, a loss that is
    not finite, a full disk, Ctrl-C — what was saved is intact.
    """
    if recipe.steps < 1:
        raise InvalidRequest(
            "the recipe has no steps", hint="set `task.steps`, `task.epochs` or `task.tokens`"
        )
    if certificate is not None:
        check_digest("recipe", certificate.recipe_digest, recipe.digest, folder)
        if not override:
            _check_certificate(certificate)
    ranks = ranks or Ranks()
    first = ranks.rank == 0
    device = catalog.find_device(recipe.device)
    if device.is_cpu:
        settle_heap(recipe)
    counted = _count_resident(recipe, certificate) if device.is_cpu else None
    with (
        locked(folder) if first else nullcontext(),
        Interrupts() as interrupts,
        counted or nullcontext(),
        ExitStack() as opened,
    ):
        lost: list[str] = []
        before = _read_before(folder, recipe, lost.append)
        data = read_data(request, recipe.model, cache)
        if before is not None:
            check_digest("data", before.environment.get("data", ""), data.training.digest, folder)
            longer = before.recipe.course != recipe.course
            if longer:
                check_continues(before.recipe, recipe, before.steps_done)
            elif before.finished and (folder / MODEL).is_dir():
                check_model(folder)
                return before
        cadence = cadence or Cadence(**msgspec.structs.asdict(request.run))
        check_best(recipe, cadence, held_out=data.held_out is not None)
        check_metrics(recipe, cadence.metrics, held_out=data.held_out is not None)
        check_samples(recipe, cadence, held_out=data.held_out is not None)
        check_skips(recipe, cadence)
        training, held_out = build_samplers(request, recipe, data, ranks.rank)
        bounds = training.bounds()
        held_out_bounds = held_out.bounds_once() if held_out else None
        if certificate is not None and not override:
            _check_holds(find_excess(recipe, certificate, bounds, held_out_bounds))
        learning = opened.enter_context(learning_of(recipe, training, data.tokenizer, ranks))
        session = Session(
            recipe=recipe,
            folder=folder,
            data=data,
            training=training,
            bounds=bounds,
            held_out=held_out,
            held_out_bounds=held_out_bounds,
            meter=Meter(
                start_device(recipe, device), compiled=recipe.compile == "blocks", resident=counted
            ),
            progress=progress if progress is not None and first else Silent(),
            ranks=ranks,
            cadence=cadence,
            certificate=certificate,
            interrupts=interrupts,
            learning=learning,
            rewards_digest=digest_rewards(recipe.reward),
            warnings=list(before.warnings) if before else [],
            continued=list(before.continued) if before else [],
        )
        _note_before(session, before)
        _open_habits(session)
        for text in (*lost, *ranks.notes, *_find_other_rewards(session, before)):
            session.warn(text)
        _warn_of_verdict(session)
        for note in training.notes:
            session.progress.note(note)
        with explained_loss():
            return _run(session, predicted_seconds)


def _count_resident(recipe: Recipe, certificate: Certificate | None) -> Resident:
    """What counts a CPU's pages, and gives free ones back that are more than is certified."""
    bounded = certificate is not None and keeps_freed(recipe.allocator)
    return Resident(most=certificate.memory.total_high if certificate and bounded else None)


def _open_habits(session: Session) -> None:
    """The user's own functions and the prompts that are answered, all of which may be refused."""
    cadence, held_out, bounds = session.cadence, session.held_out, session.held_out_bounds
    first = session.ranks.rank == 0
    session.callbacks = Callbacks(cadence.callbacks if first else (), session.folder, session.warn)
    session.metrics = Metrics(cadence.metrics, cadence.best_by, session.warn)
    if held_out is None or bounds is None:
        return
    if session.metrics:
        session.metrics.rehearse(next(held_out.all_once()).labels)
    if cadence.samples:
        tokenizer = session.data.tokenizer
        session.samples = choose_samples(held_out.corpus, cadence, bounds, tokenizer)


def _note_before(session: Session, before: Run | None) -> None:
    """What an earlier start of the run says of how this one goes on."""
    if before is None:
        return
    if before.recipe.course != session.recipe.course:
        session.go_on(describe_continuation(before.recipe, session.recipe, before.steps_done))
    else:
        session.ended_before = before.steps_done, before.ended_early


def _find_other_rewards(session: Session, before: Run | None) -> Iterator[str]:
    """Goes on with reward functions that are no longer those that the run began with."""
    then = before.environment.get("rewards", "") if before else ""
    if then and then != session.rewards_digest:
        reward = session.recipe.reward
        files = ", ".join((*reward.files, *filter(None, (reward.adapter_folder,))))
        yield f"`{files}` changed since this run began: answers are judged otherwise from here on"


def _check_certificate(certificate: Certificate) -> None:
    """Refuse one that was made with other libraries, or that says no."""
    _check_holds(find_other_version(certificate))
    if certificate.memory.verdict == "does_not_fit":
        raise DoesNotFit(
            f"certified: does not fit ({certificate.memory.because})",
            hint="raise `limits.memory`; `--anyway` trains all the same, this once",
        )


def _check_holds(stale: str) -> None:
    if stale:
        raise InvalidRequest(
            f"the certificate does not hold: {stale}",
            hint="`memfit train` certifies again by itself",
        )


def _warn_of_verdict(session: Session) -> None:
    """Training goes on under a certificate that promises nothing, but never in silence."""
    made = session.certificate
    if made is None or made.memory.verdict not in ("at_risk", "does_not_fit"):
        return
    verdict = made.memory.verdict.replace("_", " ")
    session.warn(f"the certificate says: {verdict} ({made.memory.because})")


def _read_before(folder: Path, recipe: Recipe, warn: Callable[[str], None]) -> Run | None:
    """run.json of an earlier start, maybe on other ranks; InvalidRequest of another recipe."""
    file = folder / "run.json"
    if not file.exists():
        return None
    try:
        before = read_json(file, Run)
    except InvalidRequest as error:  # checkpoints say what they are of by themselves
        warn(f"run.json is damaged and will be written anew: {error.message}")
        return None
    if name_lineage(before.recipe) != name_lineage(recipe):
        check_digest("recipe", before.recipe_digest, recipe.digest, folder)
    return before


def _run(session: Session, predicted_seconds: float | None) -> Run:
    if session.ranks.rank == 0:
        remove_unfinished(session.folder)
    moment = "the rehearsal of the worst batch"
    with explained_out_of_memory(
        session.home, moment, _diagnosis(session, None, moment), lambda: _newest(session)
    ):
        built, session.done = _prepare(session)
    session.begun = session.done
    write_run(session, session.done, finished=False)
    certified = session.certificate.memory.peak_allocated if session.certificate else None
    session.progress.begin(Facts(session.recipe.steps, session.done, predicted_seconds, certified))
    try:
        with Log(session.home, session.done, digest=session.log_digest) as log:
            if not session.ranks.rank:
                names = session.cadence.trackers
                trackers = open_trackers(names, session.folder, session.done, session.warn)
                log.follow(trackers.write, trackers.close)
                log.follow(session.callbacks.write)
            if log.damage and not session.ranks.rank:  # others may have joined later
                session.warn(log.damage)
            session.evaluated = _read_evaluated(session)
            if session.ended_before[0] == session.done:
                session.ended_early = session.ended_before[1]
            for index in range(session.done, session.recipe.steps):
                if session.judged.stops:
                    session.ended_early = _describe_stop(session)
                _stop_if_requested(session, built, log, index)
                if session.ended_early:
                    session.progress.note(session.ended_early)
                    break
                moment = f"step {index + 1}"
                with explained_out_of_memory(
                    session.home, moment, _diagnosis(session, built, moment),
                    partial(_rescue, session, built, log),
                ):  # fmt: skip
                    _advance(session, built, log, index)
        if session.saver is not None:
            session.saver.finish()
        _take_best(session, built)
        _export(session, built)
        return write_run(session, session.done, finished=True)
    finally:
        session.progress.end()


def _read_evaluated(session: Session) -> list[tuple[int, float]]:
    """Evaluations of an earlier start, where they are compared."""
    if not session.cadence.best_by:
        return []
    rows = [row for row in read_log(session.home) if row["step"] <= session.done]
    return read_evaluations(rows, session.cadence.best_by)


def _describe_stop(session: Session) -> str:
    cadence, judged = session.cadence, session.judged
    return (
        f"`run.patience` ended the run after step {session.done}: {cadence.patience}"
        f" evaluations in turn were no better than step {judged.best}'s {cadence.best_by} of"
        f" {judged.value:.4f}"
    )


def _take_best(session: Session, built: Built) -> None:
    """Put the weights of the best evaluation back, of which the model is then written."""
    best = session.judged.best
    if best in (0, session.done):
        return
    folder = folder_of(session.folder / CHECKPOINTS, best)
    damage = session.ranks.from_first(lambda: find_damage(folder))
    if damage:
        session.warn(f"the best checkpoint `{folder}` is lost ({damage}): model/ is of the last")
        return
    load_checkpoint(folder, built, session.data.training.digest)
    session.progress.note(
        f"model/ is of step {best}, whose held-out {session.cadence.best_by} of"
        f" {session.judged.value:.4f} was the best"
    )


def _export(session: Session, built: Built) -> None:
    """Of many ranks, all take part, and the most that they hold meanwhile is counted."""

    def work() -> None:
        save_model(session.folder, built, session.data.tokenizer, session.ranks)

    if session.ranks.size == 1:
        work()
        return
    session.meter.watch(built, Phase.SAVE, work)
    session.compare()


def _diagnosis(session: Session, built: Built | None, moment: str) -> Callable[[str], OutOfMemory]:
    """What looks at the tensors that are alive when memory runs out."""

    def diagnose(message: str) -> OutOfMemory:
        meter = session.meter
        alive = meter.failed or find_alive(built, meter.phase, meter.device)
        return describe_shortage(
            alive, session.certificate, recipe_digest=session.recipe.digest, moment=moment,
            message=message,
        )  # fmt: skip

    return diagnose


def _rescue(session: Session, built: Built, log: Log) -> Path | None:
    """Save where the step that failed began, if it has changed nothing yet."""
    alone = session.ranks.size == 1  # the others do not know that this one fails
    if alone and session.done and session.meter.phase in untouched(session.recipe):
        built.optimizer.zero_grad(set_to_none=True)
        session.meter.failed = None
        with suppress(RunFailed, RuntimeError, MemoryError):
            _save(session, built, log, session.done)
    return _newest(session)


def untouched(recipe: Recipe) -> tuple[Phase, ...]:
    """Phases in which a step that fails has changed nothing: a rollout's second update has."""
    return ROLLOUT if recipe.policy.num_iterations > 1 else (*ROLLOUT, *UNTOUCHED)


def _newest(session: Session) -> Path | None:
    return newest_checkpoint(session.folder, session.warn)


def _agreed(session: Session) -> Path | None:
    """The same newest checkpoint on all ranks, read and checked by the first."""
    name = session.ranks.from_first(lambda: str(_newest(session) or ""))
    return Path(name) if name else None


def _prepare(session: Session) -> tuple[Built, int]:
    """Rehearse on the bounding batches, fill the weights, go back to the newest checkpoint."""
    recipe, meter = session.recipe, session.meter
    vocab = read_model(recipe.model).architecture.vocab

    def make(shapes: Sequence[BatchShape]) -> list[Micro]:
        return [synthetic_micro(recipe, vocab, shape) for shape in shapes]

    held_out = session.held_out_bounds
    if session.learning is not None:
        model = meter.rehearse_iterations(recipe, rehearse)
    else:
        model = meter.rehearse(
            recipe,
            make(bounding_shapes(recipe, session.bounds)),
            make(evaluation_shapes(recipe, held_out)) if held_out else (),
        )
    session.compare()
    meter.watch_load(model, lambda: fill_weights(model, recipe))
    built = Built(recipe, model, build_optimizer(recipe, model))
    give_reference(session, built)
    if session.ranks.size > 1:
        cuda, requested = meter.device.type == "cuda", session.cadence.asynchronous
        session.saver = Saver(
            session.folder,
            session.ranks,
            asynchronous=cuda if requested is None else requested,
        )
    found = _agreed(session)
    if found is None:
        return built, 0
    session.log_digest = str(checkpoint_state(found).get(LOGGED, ""))
    done = load_checkpoint(found, built, session.data.training.digest)
    session.progress.note(f"going on after step {done} from `{found}`")
    return built, done


def _advance(session: Session, built: Built, log: Log, index: int) -> None:
    """One step and what is due after it."""
    recipe, step = session.recipe, index + 1
    before = evaluate_rounding(session, built) if index == 0 else {}
    row = before | _take_step(session, built, index)
    session.beside.note_step(row["seconds"])
    last = step == recipe.steps
    due = last or step % session.every(session.cadence.evaluate_every) == 0
    evaluates = session.held_out is not None and due
    if due and session.learning is not None and session.learning.held_out:
        row |= evaluate_iteration(session, session.learning, built)
    if evaluates and session.held_out is not None:
        # the last one is reported: of all that is held out, unless so many tokens are stated
        tokens = session.cadence.evaluate_tokens if last else evaluation_tokens(session)
        started = time.perf_counter()
        row |= evaluate_held_out(session, built, session.held_out, tokens, session.metrics)
        row |= sample_answers(session, built, step)
        session.beside.note_evaluation(time.perf_counter() - started, last=last)
    check_figures(row)
    log.write(row)
    session.progress.show(
        Moment(
            step=step,
            loss=math.nan if row["loss"] is None else row["loss"],
            learning_rate=row["learning_rate"],
            seconds=row["seconds"],
            tokens_per_second=row["tokens"] / row["seconds"],
            memory=session.meter.peak,
            evaluation_loss=row.get("evaluation_loss"),
            reward_accuracy=row.get("reward_accuracy"),
            reward=row.get("reward"),
            length=row.get("length"),
            unjudged=row.get("unjudged"),
            skipped=session.skipped,
            beside=session.beside.after(step),
        )
    )
    if due and session.cadence.best_by:
        session.evaluated += read_evaluations([row], session.cadence.best_by)
    ends = last or session.judged.stops or session.judged.best == step
    if ends or step % session.every(session.cadence.save_every) == 0:
        started = time.perf_counter()
        _save(session, built, log, step)
        session.beside.note_save(time.perf_counter() - started)


def _take_step(session: Session, built: Built, index: int) -> dict[str, Any]:
    """Run step `index` and return its line of the log."""
    if session.learning is not None:
        return take_iteration(session, session.learning, built, index)
    recipe = session.recipe
    rate = learning_rate(recipe.optimizer, index, recipe.steps)
    set_rate(built.optimizer, rate)
    torch.manual_seed(_seed_of(recipe, index, session.ranks.rank))
    micros = session.sampler.sample(index)
    own = session.gather(count_targets(recipe, micros), count_beside(recipe, micros))
    counts = int(sum(targets for targets, _ in own)), int(sum(beside for _, beside in own))
    watched = session.meter.device.type == "cpu" and (
        index < WATCHED_FIRST or index % session.cadence.watch_every == 0
    )
    start = time.perf_counter()
    meter, waiting, finite = session.meter, session.waiting, session.non_finite
    run = partial(run_step, skips=bool(finite.allowed))
    looked = waiting.due(index)
    with waiting.look(meter.device) if looked else nullcontext():
        if watched or session.watcher.wants_names:
            result = meter.watch_step(built, lambda watch: run(built, micros, watch, counts))
        else:
            meter.failed = None
            result = run(built, micros, meter.mark(), counts)
    session.done = index + 1
    skipped = result.skipped or was_skipped(built.scaler, result.scale, index + 1)
    tokens = sum(micro.tokens for micro in micros)
    shares = session.gather(float(result.loss), float(tokens))
    loss, tokens = sum(share[0] for share in shares), int(sum(share[1] for share in shares))
    scaled = result.scale is not None
    known, norm = finite.judge(loss, result.grad_norm, index + 1, skipped=skipped, scaled=scaled)
    seconds = time.perf_counter() - start
    session.compare()
    row: dict[str, Any] = {"step": index + 1, "loss": known, "learning_rate": rate}
    if session.ranks.size > 1 or session.ranks.notes:
        row["ranks"] = session.ranks.size
    if norm is not None:
        row["grad_norm"] = norm
    if result.scale is not None:
        row |= {"loss_scale": float(result.scale), "skipped": skipped}
    elif skipped:
        row["skipped"] = True
    session.skipped += skipped
    if finite.warning:
        session.warn(finite.warning)
    if result.rewards is not None:
        row |= name_all_rewards(session, result.rewards, counts[0])
    if looked:
        row |= _tell_waits(session, index)
    return row | {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "memory_peak_allocated": session.meter.peak or None,  # a compiled step on a CPU: unknown
        "watched": watched or looked,
    }


def _tell_waits(session: Session, index: int) -> dict[str, float]:
    """Name the ranks that others wait for; the line's share of what this one waited."""
    for warning in session.waiting.tell(index):
        session.warn(warning)
    waits = session.waiting.waits
    assert waits is not None
    return {"communication_seconds": waits.communicating, EXPOSED: waits.exposed}


def _seed_of(recipe: Recipe, index: int, rank: int) -> int:
    """Dropout of a step is drawn from (seed, step) and the rank, so a checkpoint needs no generator
    state; without dropout ranks draw alike, as NEFTune's noise is one process's."""
    own = rank // recipe.parallel.tp if recipe.lora.dropout else 0
    facts = [recipe.seed, index, *([own] if own else [])]
    return int(np.random.SeedSequence(facts).generate_state(1, np.uint32)[0])


def _check_weights(session: Session, built: Built, step: int) -> None:
    broken = find_broken(built.model)
    if session.ranks.any(bool(broken)):
        raise RunFailed(
            f"`{broken or 'a weight of another rank'}` is not finite after step {step}: no"
            " checkpoint is made of it",
            hint="what is saved is from before; lower `optimizer.learning_rate`, or set"
            " `optimizer.clip_norm`",
        )


def _save(session: Session, built: Built, log: Log, step: int) -> None:
    """The log first: a checkpoint promises that every line up to it is on disk.

    Raises RunFailed where the weights are not finite: then an older checkpoint stays.
    """
    _check_weights(session, built, step)
    log.flush()
    session.note_outliers(count_outliers(built.model))
    session.note_routing(received.take())
    digest, saver = session.data.training.digest, session.saver
    keep = Keep(session.cadence.keep, session.judged.best)

    def save() -> None:
        if saver is None:
            save_checkpoint(session.folder, step, built, digest, keep)
        else:
            saver.save(step, built, digest, keep)

    session.meter.watch(built, Phase.SAVE, save)
    session.compare()
    session.saved = step
    if step < session.recipe.steps:
        session.ended_early = session.ended_early or session.callbacks.stop
    write_run(session, step, finished=False)


def _stop_if_requested(session: Session, built: Built, log: Log, done: int) -> None:
    """Save and raise where a signal or other ranks ask for it; where a callback of the first rank
    ends the run, save and let all ranks know."""
    room = done > session.begun and session.ranks.wants_more()
    why = session.ended_early or session.callbacks.stop
    wishes = (session.interrupts.requested, room, bool(why))
    found = session.ranks.gather(*map(float, wishes))
    stopping, moving, ending = (any(flags) for flags in zip(*found, strict=True))
    if ending:
        session.ended_early = session.ranks.from_first(lambda: why)
        if session.saved != done:
            _save(session, built, log, done)
    if session.ended_early or not (stopping or moving):
        return
    if done:
        _save(session, built, log, done)
        if session.saver is not None:
            session.saver.finish()
    if moving and not stopping:
        raise MoreRanks(f"step {done} is saved, and the run goes on with more ranks")
    raise RunFailed(
        f"interrupted after step {done} of {session.recipe.steps}"
        + ("; a checkpoint is saved" if done else ""),
        hint="start the same command again: it goes on from there",
    )
