"""The search over a step that is simulated: one candidate at a time, the fastest first.

Estimates rank the candidates and bounds leave out what cannot win; what is chosen is predicted
exactly, by its own replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import inf
from typing import Any

from msgspec.structs import replace

from memfit.allocator.heap import KEEPING
from memfit.base_formats import is_quantised
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.families.capabilities.added import can_select, check_selective
from memfit.objectives import find_objective
from memfit.optimizers.shared.offloaded import why_not_offloaded
from memfit.parallelism.context import KERNELS
from memfit.parallelism.limits import refuse, why_no_mesh
from memfit.parallelism.tensor import why_no_shared_products
from memfit.plan.budget.limits import find_excess, find_unjudged
from memfit.plan.memory.predicted_memory import predict_rollout
from memfit.plan.memory.tape import keeps_tape
from memfit.plan.request.meshes import (
    check_batch,
    check_described,
    describe_mesh,
    list_dealt,
    list_divided,
    list_meshes,
    list_shared,
)
from memfit.plan.request.precision import list_last_storage, list_storage
from memfit.plan.request.problem import (
    Problem,
    allowed,
    find_kernels,
    first_recipe,
    list_chunks,
    list_micro_batches,
    why_not_in_backward,
)
from memfit.plan.search.candidate import Candidate
from memfit.plan.search.choice import Choice, Explorer, Found, Rough, assemble
from memfit.plan.search.estimate import Estimate, applies
from memfit.plan.search.explained import list_considered, predict_levers
from memfit.plan.search.least_recompute import Climb, Ranking, settle_fastest
from memfit.plan.search.levers import head_extra
from memfit.plan.simulate.recompute import (
    find_recompute,
    ladder,
)
from memfit.plan.step_time.predicted_time import predict_timeline
from memfit.records.recipe import Method, Parallel
from memfit.records.reinforcement import find_adapter_folder, pair_losses
from memfit.records.request import find_weights
from memfit.records.results import Plan

TIGHT = "no recipe keeps a margin: this one needs the least (`limits.tight: true` uses all)"
# Times the most that is predicted: where as much is usable, a heap may keep what is freed.
ROOM = 1.25
GAIN = 0.9  # of the seconds of a mesh that cuts weights alone: what another has to take less than
PROOFS = 8  # recipes replayed in turn, until one fits by its own replay


class BestFirst(Explorer):
    """See `Explorer`: candidates are predicted one at a time, and bounds choose which."""

    def find_best(self, problem: Problem) -> Found:
        """See `Explorer.find_best`."""
        check_described(problem.request)
        failed: list[Candidate] = []
        return _first_that_fits(problem, failed) or _nearest(problem, failed)

    def find_fitting(self, problem: Problem) -> Found | None:
        """See `Explorer.find_fitting`."""
        check_described(problem.request)
        return _first_that_fits(problem, [])

    def find_roughly(self, problem: Problem, ratio: float) -> Rough:
        """See `Explorer.find_roughly`; `limits.time` and `limits.cost` are left alone.

        Where some blocks must be recomputed to fit, as many as a bound says: perhaps too few.
        """
        check_described(problem.request)
        problem = replace(problem, assumed_ratio=ratio, rough=True, brief=True)
        failed: list[Candidate] = []
        for start in _preferences(problem):
            best = _fastest_in_flight(start, failed)
            if best is not None:
                return Rough(best.recipe, best.about, best.needs, best.seconds, fits=True)
        if not failed:
            raise InvalidRequest("no candidate is left", hint="see `memfit plan --why`")
        nearest = _least_of(failed)
        return Rough(nearest.recipe, nearest.about, nearest.needs, nearest.seconds, fits=False)

    def predict(self, problem: Problem, *, levers: bool) -> Plan:
        """See `Explorer.predict`.

        A mesh that is left on `auto` cuts the model among all devices, and the plan says so.
        """
        stated, request = _keep_freed(_stated(problem)), problem.request
        notes: tuple[str, ...] = ()
        if request.parallel == "auto" and request.devices > 1:
            notes = (f"parallel {describe_mesh(list_meshes(request)[0])} (not asked for)",)
        choice = _choose(stated, notes)
        considered = list_considered(stated, [])
        return assemble(problem, choice, considered, predict_levers(stated) if levers else ())


def _nearest(problem: Problem, failed: list[Candidate]) -> Found:
    """The candidate that needs the least, where none keeps a margin."""
    if not failed:  # a batch of too few rows for all devices, and no mesh that shares products
        check_batch(problem.request, Parallel(dp_shard=problem.request.devices))
    nearest = _least_of(failed)
    choice = _choose(nearest)
    if choice.memory.verdict != "does_not_fit":
        choice = choice._replace(assumptions=(TIGHT,))
    return Found(assemble(problem, choice, list_considered(nearest, failed)), choice)


def _least_of(failed: Sequence[Candidate]) -> Candidate:
    """The first that needs the least; none is predicted whose weights and states are more."""
    bounds = [(c.needs_at_least, number) for number, c in enumerate(failed)]
    best: tuple[float, int, int] = inf, 0, 0
    for bound, number in sorted(bounds):
        if bound > best[0]:
            break
        best = min(best, (failed[number].needs, failed[number].about, number))
    return failed[best[2]]


def _keep_freed(candidate: Candidate) -> Candidate:
    """The same with a heap that keeps what is freed: on a CPU with room for it, where nothing of
    it is stated. A step then takes half the time or more of it, and learns the same."""
    problem, recipe = candidate.problem, candidate.recipe
    open_ = problem.device.is_cpu and not problem.request.allocator
    if not open_ or not _has_room(candidate) or not keeps_tape(recipe):
        return candidate
    keeping = candidate.but(allocator=KEEPING)
    return keeping if _has_room(keeping) else candidate


def _has_room(candidate: Candidate) -> bool:
    high, usable = candidate.needed.high, candidate.problem.usable
    return high is not None and usable is not None and ROOM * high <= usable


def _choose(candidate: Candidate, assumptions: tuple[str, ...] = ()) -> Choice:
    """What is predicted of a candidate."""
    if candidate.recipe.allocator == KEEPING and not candidate.problem.request.allocator:
        assumptions += (f"allocator {KEEPING} (there is room for what it keeps; not asked for)",)
    return Choice(
        recipe=candidate.recipe, model=candidate.model, totals=candidate.totals,
        memory=candidate.memory, ledger=candidate.ledger,
        on_host=candidate.on_host, assumptions=assumptions, is_long=candidate.is_long,
    )  # fmt: skip


def _first_that_fits(problem: Problem, failed: list[Candidate]) -> Found | None:
    """The fastest of the first method and precision under which anything fits.

    failed: takes what was tried of the others. Raises DoesNotFit where all that fits exceeds
    `limits.time` or `limits.cost`.
    """
    excess: DoesNotFit | None = None
    for start in _preferences(problem):
        tried: list[Candidate] = []
        best = _fastest_in_flight(start, tried)
        if best is not None:
            best = _keep_freed(best)
            choice = _choose(best)
            plan = assemble(problem, choice, list_considered(best, tried))
            over = find_excess(plan)
            if over is None:
                notes = (*plan.assumptions, *find_unjudged(plan))
                return Found(replace(plan, assumptions=notes), choice)
            excess = excess or over
        failed += tried
    if excess is not None:
        raise excess
    return None


def _fastest_of_meshes(start: Candidate, tried: list[Candidate]) -> Candidate | None:
    """The fastest that fits on any mesh of the request's devices; the first of equal ones.

    Weights alone are cut where that fits. Ranks share products, rows or blocks where nothing else
    fits, or where that is faster by `GAIN`: their collectives stand in the way of every product,
    and predictions of them were seen to be less sure.
    """
    request = start.problem.request
    length = start.recipe.sequence_length
    groups = [list_meshes(request), list_shared(request)]
    divided = (
        *list_divided(request, length), *list_dealt(request, start.model.architecture),
    )  # fmt: skip
    best: Candidate | None = None
    for meshes in groups:
        for mesh in meshes:
            one = _on_mesh(start, mesh)
            slowest = inf if best is None else best.seconds
            best = (one and _fastest_that_fits(one, tried, slowest)) or best
        if best is not None:
            break
    others = [*groups[1], *divided] if best is None or best.recipe.parallel.tp == 1 else divided
    if best is None:
        return _fastest_divided(start, divided, tried) if _can_hold(start) else None
    if not predict_timeline(best.totals, best.recipe, start.problem.device).spans:
        return best  # nominal rates rank what is alike, and not meshes
    return _fastest_divided(start, others, tried, GAIN * best.seconds) or best


def _fastest_divided(
    start: Candidate, meshes: Sequence[Parallel], tried: list[Candidate],
    slowest: float = inf,
) -> Candidate | None:  # fmt: skip
    """The fastest that fits on these meshes and takes less than `slowest` seconds.

    Seconds come first: recomputing never makes a step faster, so that bytes are computed only for
    meshes on which a step without it is fast enough.
    """
    fast: list[tuple[float, Candidate]] = []
    for mesh in meshes:
        one = _on_mesh(start, mesh)
        least = None if one is None else min((c.seconds for c in _combinations(one)), default=None)
        if one is not None and least is not None and least < slowest:
            fast.append((least, one))
    best: Candidate | None = None
    for least, one in sorted(fast, key=lambda pair: pair[0]):
        if least >= slowest:
            break
        found = _fastest_that_fits(one, tried, slowest, faster_alone=True)
        if found is not None:
            best, slowest = found, found.seconds
    return best


def _can_hold(start: Candidate) -> bool:
    """Whether all devices together could hold what no mesh and no exact knob changes."""
    usable, recipe, problem = start.problem.usable, start.recipe, start.problem
    if usable is None or recipe.offload != "none" or recipe.optimizer.in_backward:
        return True
    whole = replace(recipe, parallel=Parallel(dp_shard=problem.request.devices))
    return Estimate(start.model, whole, problem.device).least <= usable


def _on_mesh(start: Candidate, mesh: Parallel) -> Candidate | None:
    """The same on this mesh; None where its ranks cannot share products, rows or blocks so."""
    problem, request, a = start.problem, start.problem.request, start.model.architecture
    if mesh.tp * mesh.cp * mesh.pp * mesh.ep == 1 or request.parallel != "auto":
        return start.but(parallel=mesh)
    changes: dict[str, Any] = {"parallel": mesh}
    if mesh.tp > 1 and request.lean == "auto":
        changes["lean"] = ()
    if mesh.cp > 1 and request.attention == "auto":
        if KERNELS[0] not in find_kernels(problem, start.recipe.precision):
            return None
        changes["attention"] = KERNELS[0]
    found = start.but(**changes)
    within = request.optimizer.in_backward is True
    recipe = replace(
        found.recipe, loss=_stated_loss(request.loss),
        accumulation=request.global_batch // (mesh.dp * request.least_rows),
        optimizer=replace(found.recipe.optimizer, in_backward=within),
    )  # fmt: skip
    selective = find_recompute(request.recompute, a.layers).selective
    refused = why_no_mesh(recipe, start.model.name, a)
    if refused or (selective and (mesh.tp > 1 or not can_select(a, recipe))):
        return None
    return found


def _preferences(problem: Problem) -> Iterator[Candidate]:
    """Method and storage, the most faithful first; on the first mesh of those to choose from.

    Pure bf16 comes after everything that learns as fp32 states do, adapters included.
    """
    request = problem.request
    methods: list[Method] = ["full", "lora"] if request.method == "auto" else [request.method]
    if is_quantised(request.base_format):
        methods = ["lora"]  # nothing else trains beside a quantised base
    elif request.method == "auto" and find_weights(request, problem.reference) == "random":
        methods = ["full"]  # an adapter on random weights has nothing to adapt
    objective = request.task.objective
    needs_adapter = (
        find_objective(objective).values
        or bool(find_adapter_folder(request.reward.funcs))
        or request.preference.reference == "adapter-off"
        or bool(pair_losses(objective))
    )
    if request.method == "auto" and needs_adapter:
        methods = ["lora"]
    first = list_meshes(request)[0]
    if request.parallel == "auto":  # whichever it becomes, see `_on_mesh`
        first = Parallel(dp_shard=request.devices)
    if request.method == "auto" and (first.tp > 1 or first.pp > 1):
        methods = ["full"]  # ranks that share products, and stages, have no adapters
    device = problem.device
    tried = [(m, storage) for m in methods for storage in list_storage(request, device, m)]
    tried += [(m, storage) for m in methods for storage in list_last_storage(request, device)]
    for method, (precision, optimizer) in tried:
        if allowed(problem, precision):
            own = _with_optimizer(problem, optimizer)
            recipe = first_recipe(own, method=method, precision=precision, parallel=first)
            yield Candidate.of(own, recipe)


def _fastest_in_flight(start: Candidate, tried: list[Candidate]) -> Candidate | None:
    """The fastest that fits with the most answers in flight at once that anything fits with.

    An answer does not depend on how many are sampled beside it, so that fewer learn the same and
    take longer. Where an update needs more than sampling, fewer answers make nothing fit.
    """
    problem, rollout = start.problem, start.recipe.rollout
    usable = problem.usable
    if not start.recipe.samples or problem.request.rollout.rows != "auto" or usable is None:
        return _fastest_of_meshes(start, tried)
    rows = answers = start.recipe.own_rows
    while rows:
        own = start.but(rollout=replace(rollout, rows=0 if rows == answers else rows))
        sampling = predict_rollout(own.model, own.recipe, problem.device)
        rows //= 2
        if sampling > usable and rows:
            continue
        failed: list[Candidate] = []
        best = _fastest_of_meshes(own, failed)
        tried += failed
        if best is not None or (failed and _least_of(failed).about > sampling):
            return best
    return None


def _with_optimizer(problem: Problem, name: str) -> Problem:
    """The problem of a request that names this optimizer; "" leaves it as it is."""
    if not name:
        return problem
    optimizer = replace(problem.request.optimizer, name=name)
    return replace(problem, request=replace(problem.request, optimizer=optimizer))


def _chunks(start: Candidate, tokens: int) -> list[int]:
    """Chunk sizes of the loss to try; 0 is the plain loss."""
    request = start.problem.request
    stated, chunk = request.loss, request.loss_chunk
    if start.recipe.parallel.tp > 1:
        arguments = start.model.name, start.model.architecture
        recipe = replace(start.recipe, loss=_stated_loss(stated))
        refuse(why_no_shared_products(recipe, *arguments))
        return [0]
    extra = head_extra(start.model)
    if extra and stated == "chunked":
        raise InvalidRequest(
            f"`loss: chunked` needs a head without bias or adapter, and this one has `{extra}`",
            hint="use `loss: plain`"
            + (", or leave the head out of `lora.targets`" if "lora_" in extra else ""),
        )
    if stated == "plain" or extra:
        return [0]
    chunks = [chunk] if chunk else list_chunks(tokens, adapted=start.recipe.adapted)
    return chunks if stated == "chunked" else [0, *chunks]


def _stated_loss(stated: str) -> str:
    return "plain" if stated == "auto" else stated


def _combinations(start: Candidate) -> Iterator[Candidate]:
    """Every micro-batch and loss, with the least recompute allowed."""
    problem = start.problem
    batch = problem.request.global_batch // start.recipe.parallel.dp
    first = find_recompute(problem.request.recompute, problem.model.architecture.layers)
    if first.selective:
        check_selective(problem.reference.name, problem.model.architecture, start.recipe)
    for micro in list_micro_batches(problem.request, start.recipe.parallel):
        for chunk in _chunks(start, micro * start.recipe.own_row):
            for when, offload in product(_when(start, micro), _offloads(start)):
                found = start.but(
                    offload=offload,
                    micro_batch=micro,
                    accumulation=batch // micro,
                    loss="chunked" if chunk else "plain",
                    loss_chunk=chunk,
                    **first.knobs,
                    optimizer=replace(start.recipe.optimizer, in_backward=when),
                )
                if not why_not_offloaded(found.recipe, cpu=problem.device.is_cpu):
                    yield found


def _offloads(start: Candidate) -> tuple[str, ...]:
    """What may wait in the host's memory; a CPU's own is that."""
    stated, problem = start.problem.request.offload, start.problem
    if stated != "auto":
        return (stated,)
    if problem.device.is_cpu or problem.request.ranks > 1:
        return ("none",)
    places = ["none"]
    places += ["activations"] * (problem.model.architecture.layers > 1)
    places += ["optimizer"] * (not start.recipe.samples)
    return tuple(places)


def _when(start: Candidate, micro: int) -> tuple[bool, ...]:
    """Whether weights may be updated within backward, and whether they must be."""
    request = start.problem.request
    in_backward = request.optimizer.in_backward
    stated = replace(request, micro_batch=micro, precision=start.recipe.precision)
    shared = start.recipe.parallel.tp * start.recipe.parallel.pp > 1
    if in_backward is False or shared or why_not_in_backward(stated) is not None:
        return () if in_backward is True else (False,)
    return (True,) if in_backward is True else (False, True)


def _fastest_that_fits(
    start: Candidate, tried: list[Candidate], slowest: float, *, faster_alone: bool = False
) -> Candidate | None:
    """Best first over the exact knobs; for each micro-batch and loss the least recompute that fits.

    slowest: seconds of one on another mesh; only what is faster than it is found. faster_alone:
    what cannot be faster is not tried, and not shown beside what is found.

    More recompute never makes a step faster, so once a combination is slower than the best found,
    neither it nor any later one can win. Estimates rank; what is chosen is predicted exactly.
    """
    known = not start.recipe.compares and start.recipe.offload == "none"
    p = start.recipe.parallel
    known = known and p.tp == p.cp == p.pp == p.ep == 1
    if applies(start.model) and known:  # it knows one forward a micro-batch, kept on the device
        start.estimate = Estimate(start.model, start.recipe, start.problem.device)
    combinations = list(_combinations(start))
    if faster_alone:
        combinations = [c for c in combinations if c.seconds < slowest]
    paths = ladder(start.problem.request.recompute, start.model.architecture, start.recipe)
    most = [c.but(**paths[0][-1].knobs) for c in combinations]
    usable = start.problem.usable
    tried += [*combinations, *most]
    if start.estimate is not None and usable is not None and start.estimate.least > usable:
        # all gradients beside all states are too much
        combinations = [c for c in combinations if c.holds_less]
        most = [c for c in most if c.holds_less]
        if not combinations:
            return None
    if faster_alone and start.estimate is None and not _least_fits(most):
        return None
    ranking = Ranking(combinations, paths)
    if start.problem.rough:
        found = next(iter(ranking), None)
        return found.candidate if found and found.candidate.seconds < slowest else None
    brief = start.problem.brief
    ranked: Iterable[Climb] = ranking
    if next(iter(ranking if brief else ranking.listed()), None) is None:
        # an estimate may be a little high: ask of the smallest itself
        possible = (c for c in most if not c.is_hopeless)
        smallest = min(possible, key=lambda c: c.needs, default=None)
        ranked = [] if smallest is None else [Climb(smallest, paths[0], len(paths[0]) - 1)]
    best = settle_fastest(start, ranked, slowest, trades=len(paths) > 1)
    for _ in range(PROOFS):
        if best is None or best.proved:
            break  # else its replay has told what others reserve: choose again
        best = settle_fastest(start, ranked, slowest, trades=len(paths) > 1)
    if best is None or not brief:
        others = (least.candidate for least in ranking.listed() or ranked)
        tried += [c for c in others if best is None or not c.is_like(best)]
    return best


def _least_fits(most: Sequence[Candidate]) -> bool:
    """Whether one of those with the fewest rows fits, where as much as can be is recomputed."""
    rows = min((c.recipe.micro_batch for c in most), default=0)
    return any(c.fits for c in most if c.recipe.micro_batch == rows)


def _stated(problem: Problem) -> Candidate:
    """The one configuration of a request; raises InvalidRequest where it leaves several."""
    request = problem.request
    check_described(request)
    stated = {
        "method": request.method, "precision": request.precision, "recompute": request.recompute,
        "loss": request.loss, "micro_batch": request.micro_batch,
    }  # fmt: skip
    if left := [key for key, value in stated.items() if value == "auto"]:
        raise InvalidRequest(
            f"`predict` takes one stated configuration, but {', '.join(left)} is left on `auto`",
            hint="state it, or let `memfit plan` decide",
        )
    if request.parallel == "auto":
        check_batch(request, Parallel(dp_shard=request.devices))
    return next(_combinations(next(_preferences(problem))))
