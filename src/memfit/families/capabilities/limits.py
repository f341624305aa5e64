"""What a model's class excludes, whatever the device: one table for plan and trainer."""

from __future__ import annotations

from memfit.core.errors import InvalidRequest
from memfit.families import find_family
from memfit.objectives import find_objective
from memfit.records.model import Architecture
from memfit.records.request import Request


def own_kernels(a: Architecture) -> tuple[str, ...]:
    """The only attention kernels that compute this model; empty where every kernel does."""
    return ("math",) if a.alibi or a.sinks or a.attention_cap else ()


def choose_packing(request: Request, a: Architecture) -> bool:
    """Return whether rows are filled with whole documents: as requested, else where supported.

    Pairs are compared row by row, a sampled answer has a row of its own, alibi counts distances
    over a whole row, linear attention carries its state over it, and the ring of memfit's own step
    attends to whole rows.
    """
    if request.task.packing != "auto":
        return request.task.packing
    parallel = request.parallel if request.is_own else "auto"
    ring = parallel != "auto" and parallel.cp > 1
    objective = find_objective(request.task.objective)
    whole_rows = a.alibi or a.recurrent or ring
    return not (objective.compares or objective.samples or whole_rows)


def check_limits(
    name: str, a: Architecture, *, attention: str, packing: bool, loss: str, tokens: int,
    offload: str,
) -> None:  # fmt: skip
    """Raise InvalidRequest where a recipe asks what the model's class cannot do exactly.

    attention, loss and offload may be `auto`; tokens: of a row.
    """
    if a.windowed(tokens) and not find_family(a.family).windows:
        raise InvalidRequest(
            f"rows of {tokens} tokens are longer than the sliding window of {a.sliding_window}"
            f" tokens of `{name}`, whose class does not tell attention which blocks slide",
            hint=f"use a sequence_length of at most {a.sliding_window}",
        )
    if a.alibi and attention not in ("auto", *own_kernels(a)):
        raise InvalidRequest(
            f"`attention: {attention}` knows no bias by distance, which `{name}` adds to its"
            " scores (alibi)",
            hint="use `attention: math`",
        )
    if a.sinks and attention not in ("auto", *own_kernels(a)):
        raise InvalidRequest(
            f"`attention: {attention}` knows no attention sinks, which `{name}` has",
            hint="use `attention: math`",
        )
    if a.attention_cap and attention not in ("auto", *own_kernels(a)):
        raise InvalidRequest(
            f"`attention: {attention}` cannot keep scores below a cap, as `{name}` does"
            f" (`attn_logit_softcapping: {a.attention_cap:g}`)",
            hint="use `attention: math`",
        )
    if attention == "varlen":
        _check_varlen(name, a, packing=packing)
    if a.alibi and packing:
        raise InvalidRequest(
            f"`packing: true`, but the class of `{name}` counts distances over the whole row and"
            " cannot keep documents apart",
            hint="use `packing: false`, which a request calls `task.packing`",
        )
    if a.recurrent:
        _check_recurrent(name, packing=packing, offload=offload)
    if a.scores and loss == "chunked":
        raise InvalidRequest(
            f"`loss: chunked` is of logits, and `{name}` makes one score of a row",
            hint="use `loss: plain`, or leave it on `auto`",
        )
    if a.head_bias and loss == "chunked":
        raise InvalidRequest(
            f"`loss: chunked` takes no bias in the head, and `{name}` has one (`lm_head.bias`)",
            hint="use `loss: plain`",
        )


def _check_recurrent(name: str, *, packing: bool, offload: str) -> None:
    if packing:
        raise InvalidRequest(
            f"`packing: true`, but linear attention of `{name}` carries its state over the whole"
            " row, and torch's code of it cannot begin anew with a document",
            hint="use `packing: false`, which a request calls `task.packing`",
        )
    if offload == "activations":
        raise InvalidRequest(
            f"`offload: activations` is not described for linear attention, which `{name}` has",
            hint="use `offload: none`, or `recompute: full`",
        )


def _check_varlen(name: str, a: Architecture, *, packing: bool) -> None:
    if not packing:
        raise InvalidRequest(
            "`attention: varlen` is for packed rows, whose documents it is told, and rows are not"
            " packed",
            hint="use `attention: flash`, or `task.packing: true`",
        )
    if not find_family(a.family).hands_on_documents:
        raise InvalidRequest(
            f"`attention: varlen` needs to be told in each block where documents begin, which the"
            f" backbone of `{name}` (`{a.family}`) does not hand on",
            hint="use `attention: flash`",
        )
