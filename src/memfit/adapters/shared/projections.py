"""The modules of a model that can have an adapter, and a check of `lora.targets` against them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from memfit.core.errors import InvalidRequest, did_you_mean
from memfit.records.model import SCORE, Model

ROUTERS = (".mlp.gate.weight", ".mlp.router.weight")  # modules of their own kind, not Linear
ENTERING = (".project_in.weight",)  # OPT's, between its embeddings and its blocks
JOINED = ("gate_proj", "up_proj", "down_proj")  # experts have them, joined with all others


def choose_targets(
    targets: str | Sequence[str], model: Model, usual: Sequence[str]
) -> tuple[str, ...]:
    """A request's targets in the recipe's words; usual: those of the family, for `auto`."""
    if targets == "all-linear":
        return all_linear(model)
    return tuple(usual if targets == "auto" else targets)


def all_linear(model: Model) -> tuple[str, ...]:
    """Every projection but the head, as peft's `all-linear`: last parts of names, in order.

    Raises InvalidRequest for a mixture of experts, whose experts are no projections of their own.
    """
    if model.architecture.experts.count:
        names = ", ".join(n for n in _last_parts(model) if n not in (*JOINED, "lm_head"))
        raise InvalidRequest(
            f"`lora.targets: all-linear` of `{model.name}`, whose experts peft would adapt too, all"
            " of a layer as one",
            hint=f"name projections of attention: `lora.targets: [{names}]`",
        )
    head = {w.name.rpartition(".")[0] for w in model.weights if w.part == "head"}
    return _last_parts(model, without=head)


def matches(module: str, targets: tuple[str, ...]) -> bool:
    """As peft does: the whole name, or its last parts."""
    return any(module == target or module.endswith(f".{target}") for target in targets)


def check_targets(model: Model, targets: tuple[str, ...], key: str = "lora.targets") -> None:
    """Raise InvalidRequest unless each target names at least one projection, and nothing else.

    key: what messages call the targets.
    """
    last_parts = sorted(_last_parts(model))
    known = f"projections of `{model.name}`: {', '.join(last_parts)}"
    if not targets:
        raise InvalidRequest(f"`{key}` is empty: nothing would be trained", hint=known)
    projections = set(_projections(model))
    modules = {w.name.rpartition(".")[0] for w in model.weights}
    joined = [t for t in targets if t.rpartition(".")[2] in JOINED]
    if joined and model.architecture.experts.count:
        raise InvalidRequest(
            f"`{key}`: `{joined[0]}` of `{model.name}`, whose experts peft would adapt with"
            " it, all of a layer as one",
            hint="adapt the projections of attention: q_proj, k_proj, v_proj, o_proj",
        )
    for target in targets:
        hits = {m for m in modules if matches(m, (target,))}
        if not hits or hits - projections:
            near = did_you_mean(target, last_parts)
            raise InvalidRequest(
                f"`{key}`: `{target}` matches no projection of `{model.name}`",
                hint=f"did you mean {near}? {known}" if near else known,
            )


def _projections(model: Model) -> list[str]:
    return [
        w.name.rpartition(".")[0]
        for w in model.weights
        if len(w.shape) == 2
        and w.name != SCORE  # which is trained whole
        and (w.part != "embedding" or w.name.endswith(ENTERING))
        and w.name.endswith(".weight")  # experts' biases, all of a layer as one, are matrices too
        and not w.name.endswith(ROUTERS)
    ]


def _last_parts(model: Model, without: Collection[str] = ()) -> tuple[str, ...]:
    names = (m.rpartition(".")[2] for m in _projections(model) if m not in without)
    return tuple(dict.fromkeys(names))
