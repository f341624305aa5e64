"""Decide every `auto`: the fastest predicted recipe that fits.

Two kinds of knobs. *Exact* ones change memory and time but not what is learned (micro-batch at a
fixed global batch, recompute, chunked loss, the optimizer's implementation): among these the
fastest that fits wins. *Inexact* ones (method, precision) change the result: memfit keeps the
first of a fixed order of preference under which anything fits, and never gives one up for speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import msgspec

from memfit import __version__, units
from memfit.adapters import find_adapter
from memfit.errors import InvalidRequest
from memfit.model import Model
from memfit.plan.memory import predict_memory
from memfit.plan.problem import CHUNKS, Problem, divisors, first_recipe
from memfit.plan.time import describe_cost, describe_time, predict_timeline, relative_seconds
from memfit.plan.verdict import describe_lack, describe_memory, needs
from memfit.recipe import Method, Precision, Recipe
from memfit.request import RecomputeBlocks
from memfit.results import Considered, Memory, Plan

SHOWN = 5  # runners-up and rejected ones that a plan keeps


class Candidate:
    """One recipe and what is predicted of it, computed when first asked."""

    def __init__(self, problem: Problem, recipe: Recipe) -> None:
        self.problem, self.recipe = problem, recipe

    @cached_property
    def model(self) -> Model:
        """The model after the adapter: dtypes, trainable flags, extra rows."""
        return find_adapter(self.recipe).adapt(self.problem.model, self.recipe)

    @cached_property
    def memory(self) -> Memory:
        """Predicted memory and its verdict."""
        ledger = predict_memory(self.model, self.recipe, self.problem.device)
        usable, because = self.problem.usable, self.problem.usable_because
        return describe_memory(ledger, self.problem.device, usable, because)

    @cached_property
    def seconds(self) -> float:
        """Predicted step time, for ranking."""
        return relative_seconds(self.model, self.recipe, self.problem.device)

    @property
    def fits(self) -> bool:
        """Whether the verdict is `fits` (with an unknown limit everything does)."""
        return self.memory.verdict in ("fits", "unproven")

    def but(self, **changes: object) -> Candidate:
        """The same recipe with some knobs changed."""
        return Candidate(self.problem, msgspec.structs.replace(self.recipe, **changes))


def search(problem: Problem) -> Plan:
    """The plan of a request: its best recipe, or the nearest miss with verdict `does_not_fit`."""
    tried: list[Candidate] = []
    best: Candidate | None = None
    for start in _preferences(problem):
        best = _fastest_that_fits(start, tried)
        if best is not None:
            break
    chosen = best or min(tried, key=lambda c: needs(c.memory))
    return _plan(problem, chosen, tried)


def _preferences(problem: Problem) -> Iterator[Candidate]:
    """Method and precision, the most faithful first."""
    request = problem.request
    methods: list[Method] = ["full", "lora"] if request.method == "auto" else [request.method]
    if (
        request.method == "auto"
        and first_recipe(problem, method="full", precision="fp32").weights == "random"
    ):
        methods = ["full"]  # an adapter on random weights has nothing to adapt
    half = problem.device.is_cpu or bool(problem.device.flops.get("bf16"))
    precisions: list[Precision] = ["fp32"]
    if request.precision != "auto":
        precisions = [request.precision]
    elif half:
        precisions = ["fp32", "bf16-mixed", "bf16"] if problem.device.is_cpu else [
            "bf16-mixed", "bf16"]  # fmt: skip
    for method in methods:
        for precision in precisions:
            if _allowed(problem, precision):
                recipe = first_recipe(problem, method=method, precision=precision)
                yield Candidate(problem, recipe)


def _allowed(problem: Problem, precision: Precision) -> bool:
    """Whether the frozen format that the request fixes can go with this precision."""
    pair = (problem.request.base_format, precision)
    return pair not in (("bf16", "fp32"), ("fp32", "bf16"))


def _chunks(problem: Problem, tokens: int) -> list[int]:
    """Chunk sizes of the loss to try; 0 is the plain loss."""
    asked, chunk = problem.request.loss, problem.request.loss_chunk
    if asked == "plain":
        return [0]
    chunks = [chunk] if chunk else [c for c in CHUNKS if c < tokens] or [min(CHUNKS)]
    return chunks if asked == "chunked" else [0, *chunks]


def _blocks(problem: Problem) -> tuple[int, int]:
    """The least and the most blocks that may be recomputed."""
    asked, layers = problem.request.recompute, problem.model.architecture.layers
    if isinstance(asked, RecomputeBlocks):
        return asked.blocks, asked.blocks
    return {"none": (0, 0), "full": (layers, layers), "auto": (0, layers)}[asked]


def _combinations(start: Candidate) -> Iterator[Candidate]:
    """Every micro-batch and loss, with the least recompute allowed."""
    problem = start.problem
    batch, asked = problem.request.task.global_batch, problem.request.micro_batch
    for micro in divisors(batch) if asked == "auto" else [asked]:
        for chunk in _chunks(problem, micro * start.recipe.sequence_length):
            yield start.but(
                micro_batch=micro,
                accumulation=batch // micro,
                loss="chunked" if chunk else "plain",
                loss_chunk=chunk,
                recompute_blocks=_blocks(problem)[0],
            )


def _fastest_that_fits(start: Candidate, tried: list[Candidate]) -> Candidate | None:
    """Best first over the exact knobs; for each micro-batch and loss the least recompute that fits.

    Exact: more recompute never makes a step faster, so once a combination without recompute is
    slower than the best found, neither it nor any later one can win.
    """
    best: Candidate | None = None
    for plain in sorted(_combinations(start), key=lambda c: c.seconds):
        if best is not None and plain.seconds >= best.seconds:
            break
        found = _least_recompute(plain, tried)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
    return best


def _least_recompute(plain: Candidate, tried: list[Candidate]) -> Candidate | None:
    """The fewest recomputed blocks under which the combination fits: memory falls with each."""
    low, high = _blocks(plain.problem)
    tried.append(plain)
    if plain.fits:
        return plain
    most = plain.but(recompute_blocks=high)
    if high == low:
        return None
    tried.append(most)
    if not most.fits:
        return None
    best = most
    while high - low > 1:
        middle = (low + high) // 2
        candidate = plain.but(recompute_blocks=middle)
        if candidate.fits:
            high, best = middle, candidate
        else:
            low = middle
    tried.append(best)
    return best


def describe(recipe: Recipe, layers: int) -> str:
    """The knobs that the search turns, in one line."""
    recompute = {0: "none", layers: "full"}.get(
        recipe.recompute_blocks, f"{recipe.recompute_blocks}/{layers} blocks"
    )
    loss = f"chunked {recipe.loss_chunk}" if recipe.loss == "chunked" else "plain"
    return (
        f"{recipe.method} {recipe.precision}, micro-batch {recipe.micro_batch}, "
        f"recompute {recompute}, loss {loss}"
    )


def _row(
    candidate: Candidate, chosen: Candidate, *, because: str, changes: dict[str, object]
) -> Considered:
    memory = candidate.memory
    return Considered(
        label=describe(candidate.recipe, candidate.model.architecture.layers),
        changes=changes,
        peak_allocated=memory.peak_allocated,
        device_total=memory.device_total,
        relative_time=candidate.seconds / chosen.seconds,
        fits=candidate.fits,
        chosen=candidate is chosen,
        because=because,
    )


def _reason(candidate: Candidate, chosen: Candidate) -> str:
    """Why a candidate was not chosen."""
    if candidate is chosen:
        return "the fastest that fits" if chosen.fits else "the nearest miss"
    usable = candidate.memory.usable
    if not candidate.fits and usable is not None:
        over = needs(candidate.memory) - usable
        return f"needs {units.show_bytes(over)} more than there is"
    if candidate.seconds > chosen.seconds:
        return f"fits, {candidate.seconds / chosen.seconds - 1:.1%} slower"
    if candidate.seconds == chosen.seconds:
        return "fits, equally fast"
    return "fits and is faster, but changes what is learned"


def _considered(chosen: Candidate, tried: list[Candidate]) -> tuple[Considered, ...]:
    """The chosen one, then those that came nearest to it in time, whether they fit or not."""
    others = {c.recipe.digest: c for c in tried if c.recipe != chosen.recipe}
    near = sorted(others.values(), key=lambda c: (c.seconds, needs(c.memory)))
    fitting = [c for c in near if c.fits][:SHOWN]
    failing = [c for c in near if not c.fits][:SHOWN]
    rows = [chosen, *sorted([*fitting, *failing], key=lambda c: c.seconds)]
    return tuple(_row(c, chosen, because=_reason(c, chosen), changes={}) for c in rows)


def _levers(chosen: Candidate) -> tuple[Considered, ...]:
    """The chosen recipe with one knob turned: what each lever saves or costs."""
    recipe, layers = chosen.recipe, chosen.model.architecture.layers
    batch = recipe.global_batch
    smaller = [d for d in divisors(batch) if d < recipe.micro_batch][-1:]
    larger = [d for d in divisors(batch) if d > recipe.micro_batch][:1]
    changes: list[dict[str, object]] = [
        {"recompute_blocks": n} for n in (0, layers) if n != recipe.recompute_blocks
    ]
    changes += [{"micro_batch": m, "accumulation": batch // m} for m in (*smaller, *larger)]
    changes.append(
        {"loss": "plain", "loss_chunk": 0}
        if recipe.loss == "chunked"
        else {"loss": "chunked", "loss_chunk": 1024}
    )
    changes += [
        {"optimizer": msgspec.structs.replace(recipe.optimizer, implementation=i)}
        for i in ("foreach",)
        if i != recipe.optimizer.implementation
    ]
    rows = [(chosen.but(**change), change) for change in changes]
    rows += [
        (c, {"method": c.recipe.method, "precision": c.recipe.precision}) for c in _others(chosen)
    ]
    return tuple(
        _row(c, chosen, because=_reason(c, chosen), changes=_named(change)) for c, change in rows
    )


def _others(chosen: Candidate) -> list[Candidate]:
    """The chosen exact knobs under another precision or method."""
    recipe, problem = chosen.recipe, chosen.problem
    pairs: list[tuple[Method, Precision]] = []
    if recipe.precision != "bf16" and not (recipe.method == "full" and recipe.precision == "fp32"):
        pairs.append((recipe.method, "bf16"))
    if recipe.precision == "fp32":
        pairs.append((recipe.method, "bf16-mixed"))
    if recipe.method == "full" and recipe.weights == "pretrained":
        pairs.append(("lora", recipe.precision))
    kept = ("micro_batch", "accumulation", "recompute_blocks", "loss", "loss_chunk")
    found = []
    for method, precision in pairs:
        if not _allowed(problem, precision):
            continue
        other = first_recipe(problem, method=method, precision=precision)
        same = {k: getattr(recipe, k) for k in kept}
        found.append(Candidate(problem, msgspec.structs.replace(other, **same)))
    return found


def _named(change: dict[str, object]) -> dict[str, object]:
    """Knobs as the request names them."""
    named = {k: v for k, v in change.items() if k not in ("accumulation", "optimizer")}
    if "optimizer" in change:
        named["optimizer"] = getattr(change["optimizer"], "implementation", "")
    if named.get("loss_chunk") == 0:
        del named["loss_chunk"]
    return named


def _plan(problem: Problem, chosen: Candidate, tried: list[Candidate]) -> Plan:
    recipe, device = chosen.recipe, problem.device
    timeline = predict_timeline(chosen.model, recipe, device)
    time = describe_time(chosen.model, recipe, device, timeline)
    return Plan(
        recipe_digest=recipe.digest,
        request=problem.request,
        recipe=recipe,
        memory=chosen.memory,
        time=time,
        cost=describe_cost(time, device),
        ledger=predict_memory(chosen.model, recipe, device),
        timeline=timeline,
        considered=_considered(chosen, tried),
        levers=_levers(chosen),
        assumptions=problem.assumptions,
        versions={"memfit": __version__},
    )


def predict(problem: Problem) -> Plan:
    """The plan of a request that leaves nothing to decide; no search, no alternatives."""
    request = problem.request
    stated = {
        "method": request.method, "precision": request.precision, "recompute": request.recompute,
        "loss": request.loss, "micro_batch": request.micro_batch,
    }  # fmt: skip
    if left := [key for key, value in stated.items() if value == "auto"]:
        raise InvalidRequest(
            f"`predict` takes one stated configuration, but {', '.join(left)} is left on `auto`",
            hint="state it, or let `memfit plan` decide",
        )
    start = next(_preferences(problem))
    return _plan(problem, next(_combinations(start)), [])


def lack(plan: Plan) -> str:
    """Why a plan does not fit, in one sentence."""
    return describe_lack(plan.memory, plan.recipe.device)
