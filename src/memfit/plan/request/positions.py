"""Rows longer than a model's positions: which models can have them, and what to know of them."""

from __future__ import annotations

from memfit import families
from memfit.core.errors import InvalidRequest
from memfit.records.model import Architecture


def check_positions(name: str, a: Architecture, length: int) -> None:
    """Raise InvalidRequest for rows that reach past a model's table of positions.

    Positions that are computed (rotary ones, and biases by distance) go on for ever.
    """
    if length > a.max_sequence and families.find_family(a.family).ends:
        raise InvalidRequest(
            f"`task.sequence_length: {length}` is longer than the {a.max_sequence} positions of"
            f" `{name}`, which are a table: it has no row for a later token",
            hint=f"use at most {a.max_sequence}",
        )


def describe_positions(name: str, a: Architecture, length: int) -> tuple[str, ...]:
    """A sentence on rows that are longer than any the model was trained on; () for shorter ones."""
    if length <= a.max_sequence:
        return ()
    note = f"rows of {length:,} tokens, though `{name}` was trained on at most {a.max_sequence:,}"
    if a.alibi:
        return (f"{note}: its bias by distance goes on beyond them, untrained",)
    factor = -(-length // a.max_sequence)
    key = (
        f"{{rope_type: yarn, factor: {factor}, original_max_position_embeddings: {a.max_sequence}}}"
    )
    if a.family == "phi3":  # whose class knows one way alone, with factors that were trained
        key = "{rope_type: longrope, ...}"
    return (f"{note}: `rope_scaling: {key}` in its config.json extends them (same bytes, seconds)",)


def describe_parts(a: Architecture) -> tuple[str, ...]:
    """Sentences on what of a model is planned, and by whose code, where either could be taken to be
    otherwise."""
    lines = []
    family = families.find_family(a.family)
    if family.text_of:
        lines.append("the text model alone, without a vision tower")
    if family.unread:
        names = ", ".join(f"`{start}*`" for start in family.unread)
        lines.append(f"weights named {names} are not read: transformers' class has none of them")
    if a.recurrent:
        lines.append(
            "linear attention by torch's own operations, which transformers runs without the"
            " packages flash-linear-attention and causal-conv1d; what their kernels hold is not"
            " described"
        )
    return tuple(lines)
