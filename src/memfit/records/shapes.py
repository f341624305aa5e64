"""Shapes of micro-batches: what data can ask of a step, and which shapes bound all of them.

A step's memory depends on its rows' documents, since attention runs once a document, or takes room
for each (varlen). With rows of `tokens` tokens, a document of l tokens costs f(l), which is convex:
what a kernel keeps grows with l or with l squared, and a CUDA block or a padded statistic (32
positions in the efficient kernel) costs something of its own. So of all rows with as many
documents, none longer than `longest`, the most unequal one costs the most: as many of `longest` as
fit, one rest, the others of one token. In the number of documents the cost of these rows is convex
too: the fewest or the most decide.
"""

from __future__ import annotations

from msgspec.structs import replace

from memfit.core.errors import InvalidRequest
from memfit.records import Record
from memfit.records.recipe import Recipe

MOST_DOCUMENTS = 1024  # of one micro-batch on a GPU; each is a kernel call in every block


class BatchShape(Record, frozen=True, kw_only=True):
    """One micro-batch without its tokens."""

    rows: int
    tokens: int  # of one row
    documents: tuple[tuple[int, ...], ...] | None = None  # lengths in each row; None = one a row


class RowBounds(Record, frozen=True, kw_only=True):
    """The largest figures over all micro-batches of a data set, each on its own."""

    tokens: int  # of a row, padding counted
    documents: int  # of a micro-batch; padding is one; 0 = not packed
    longest: int  # tokens of one document

    def covers(self, other: RowBounds) -> bool:
        """Whether what holds within these bounds holds within the other's."""
        return (
            self.tokens >= other.tokens
            and self.documents >= other.documents
            and self.longest >= other.longest
        )

    def __str__(self) -> str:
        rows = f"rows of at most {self.tokens} tokens"
        if not self.documents:
            return rows
        return (
            f"{rows}, at most {self.documents} documents a micro-batch,"
            f" none longer than {self.longest} tokens"
        )


def bounds_of(recipe: Recipe) -> RowBounds:
    """What a recipe is taken to see where no data is named: `Recipe.worst_documents`."""
    rows = recipe.worst_documents or ()
    return RowBounds(
        tokens=recipe.own_row,
        documents=sum(len(row) for row in rows),
        longest=recipe.sequence_length,  # a row of one document needs no more than one of two
    )


def holds(recipe: Recipe, certified: RowBounds, own: RowBounds) -> bool:
    """Whether a certificate within some bounds holds for data within its own.

    On a CPU a further document adds nothing (no blocks, no padding), once outputs are joined at
    all; `math` holds the most with the fewest documents there.
    """
    if recipe.device.startswith("cpu") and (recipe.attention == "math" or certified.documents > 1):
        own = replace(own, documents=min(own.documents, certified.documents))
    return certified.covers(own)


def bounding_shapes(recipe: Recipe, bounds: RowBounds) -> tuple[BatchShape, ...]:
    """Micro-batches of which one needs at least as much memory as any within the bounds.

    Raises InvalidRequest when there are more documents than a certificate can follow. On a CPU
    documents beyond the second add nothing: no blocks, no padding.
    """
    rows, width, longest = recipe.micro_batch, bounds.tokens, bounds.longest
    if not bounds.documents:
        return (BatchShape(rows=rows, tokens=width),)
    fewest = rows * -(-width // longest)
    most = max(fewest, bounds.documents)
    if recipe.device.startswith("cpu"):
        most = min(most, max(2, fewest))
    elif most > MOST_DOCUMENTS and recipe.attention != "varlen":
        raise InvalidRequest(
            f"a micro-batch of the data holds {most} documents, and a certificate follows"
            f" {MOST_DOCUMENTS} at most: each is a kernel call of its own in every block",
            hint="use `attention: varlen`, which calls its kernel once, `packing: false`, a smaller"
            " `micro_batch` or a shorter `sequence_length`",
        )
    counts = [most] if recipe.attention != "math" else sorted({fewest, most})
    return tuple(
        BatchShape(rows=rows, tokens=width, documents=_spread(count, rows, width, longest))
        for count in counts
    )


def evaluation_shapes(recipe: Recipe, bounds: RowBounds) -> tuple[BatchShape, ...]:
    """The same for a forward without gradients, the longest document last.

    There nothing is saved, and what a long document takes meanwhile is on top of all outputs.
    """
    return tuple(
        replace(shape, documents=tuple(row[::-1] for row in shape.documents or ()) or None)
        for shape in bounding_shapes(recipe, bounds)
    )


def _spread(count: int, rows: int, width: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """`count` documents in rows of `width`: the last rows keep the fewest."""
    least, made = -(-width // longest), []
    spare = max(0, count - rows * least)
    for _ in range(rows):
        more = min(spare, width - least)
        spare -= more
        made.append(most_unequal(width, longest, least + more))
    return tuple(made)


def most_unequal(width: int, longest: int, count: int) -> tuple[int, ...]:
    """The parts of `width` that differ most: `count` parts of 1 to `longest`."""
    whole = (
        width // longest
        if longest == 1
        else min(width // longest, (width - count) // (longest - 1))
    )
    others, left = count - whole, width - whole * longest
    rest = (left - others + 1, *([1] * (others - 1))) if others else ()
    return (*([longest] * whole), *rest)
