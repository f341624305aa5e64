"""A token is drawn for each row, without data: what train/generation/sampling.py holds."""

from __future__ import annotations

from memfit import meta
from memfit.meta import Tensor
from memfit.meta.elementwise import like
from memfit.records import Record
from memfit.records.reinforcement import Rollout


class Drawing(Record, frozen=True, kw_only=True):
    """What sizes it."""

    heated: bool = False  # whether a temperature divides logits
    penalised: bool = False  # whether tokens that a row has are made less likely
    top_k: int = 0  # 0: all
    by_share: bool = False  # whether the likeliest tokens of a share stay (top-p)
    by_chance: bool = False  # whether the likeliest token says which are too unlikely (min-p)

    @classmethod
    def of(cls, rollout: Rollout) -> Drawing:
        """A recipe's."""
        return cls(
            heated=rollout.temperature != 1.0, penalised=rollout.repetition_penalty != 1.0,
            top_k=rollout.top_k, by_share=rollout.top_p < 1.0, by_chance=rollout.min_p > 0,
        )  # fmt: skip


def draw_tokens(logits: Tensor, drawing: Drawing) -> None:
    """(rows, vocab) -> a token a row."""
    meter, (rows, _) = logits.meter, logits.shape
    numbers = None if meter.cuda else meta.empty(meter, (rows,), "float64")
    wide = meta.cast(logits, "float32")
    plain = meta.scale(wide) if drawing.heated else wide
    total = meta.empty(meter, (rows,), "float32")
    highest = meta.empty(meter, (rows, 1), "float32")
    apart = like(plain)
    del highest, apart
    bent = _penalise(wide) if drawing.penalised else plain
    tokens = _pick(_keep_likely(bent, drawing))
    chosen = meta.empty(meter, (rows, 1), "float32")
    meta.empty(meter, (rows,), "float32")
    del numbers, wide, plain, bent, total, tokens, chosen


def _pick(scores: Tensor) -> Tensor:
    """(rows, vocab) -> (rows, 1), from cumulated chances."""
    meter, (rows, vocab) = scores.meter, scores.shape
    highest = meta.empty(meter, (rows, 1), "float32")
    apart = like(scores)
    del highest
    weights = like(apart)
    del apart
    summed = meta.empty(meter, (rows, vocab), "float64")
    del weights
    moved = meta.empty(meter, (rows,), "float64") if meter.cuda else None
    aim = meta.empty(meter, (rows, 1), "float64")
    del moved
    tokens = meta.empty(meter, (rows, 1), "int64")
    del summed, aim
    return tokens


def _penalise(logits: Tensor) -> Tensor:
    """Of tokens that a row has; the temperature divides the result, 1 too."""
    positive = like(logits, dtype="bool")
    less, more = like(logits), like(logits)
    everywhere = like(logits)
    del positive, less, more
    bent = like(everywhere)
    del everywhere
    return like(bent)


def _keep_likely(scores: Tensor, drawing: Drawing) -> Tensor:
    """The scores, with those left out that top-k, top-p or min-p leave out."""
    meter, (rows, vocab) = scores.meter, scores.shape
    limited = 0 < drawing.top_k < vocab
    if not (limited or drawing.by_share or drawing.by_chance):
        return scores
    held = []
    least = None if limited else meta.empty(meter, (rows, 1), "float32")
    if limited or drawing.by_share:
        shape = rows, drawing.top_k if limited else vocab
        held.append(meta.empty(meter, shape, "float32"))
        meta.empty(meter, shape, "int64")  # places, which nobody reads
    if drawing.by_share:
        held += _find_share(held[0])
        least = meta.empty(meter, (rows, 1), "float32")
    if drawing.by_chance:
        held.append(meta.empty(meter, (), "float32"))
        least = meta.empty(meter, (rows, 1), "float32")
    left_out = like(scores, dtype="bool")
    narrowed = like(scores)
    del left_out, held, least
    return narrowed


def _find_share(ordered: Tensor) -> list[Tensor]:
    """Chances of ordered scores, those before each, and which one is the last of the share."""
    meter, rows = ordered.meter, ordered.shape[0]
    chances = like(ordered)
    summed = like(chances)
    before = like(summed)
    del summed
    within = like(before, dtype="bool")
    count = meta.empty(meter, (rows, 1), "int64")
    del within
    last = meta.empty(meter, (rows, 1), "int64")
    del count
    return [chances, before, last]
