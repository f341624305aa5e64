"""Keys, values and states in slots, and attention of one new token a row with them, in bytes.

As train/generation/slots.py and train/generation/attending.py. The slots themselves are allocated
once, before any call of the model: what is here are views of them, of no bytes.
"""

from __future__ import annotations

from memfit.meta.attending.attention import scores_of
from memfit.meta.elementwise import add, autocast_lower, cast, scale, softmax_wide, tanh
from memfit.meta.meter import Meter
from memfit.meta.pieces import expand
from memfit.meta.tensor import Tensor, empty, row_major
from memfit.meta.views import concatenate, narrow, reshape, transpose


class Prefill:
    """A call over whole prompts: what they leave is copied to the slots."""

    def __init__(
        self, meter: Meter, prompts: int, longest: int, answers: int, tokens: int, dtype: str,
        *, gated: bool = False,
    ) -> None:  # fmt: skip
        """answers: that begin with these prompts; tokens: of a slot; dtype: of the slots; gated:
        whether gates are closed at padding."""
        self.meter, self.dtype = meter, dtype
        self.prompts, self.longest, self.answers, self.tokens = prompts, longest, answers, tokens
        self.lengths = empty(meter, (prompts,), "int64")
        self.places = tuple(empty(meter, (answers,), "int64") for _ in ("sources", "targets"))
        self.rings: dict[int, Tensor] = {}
        self.tails: dict[int, tuple[Tensor, Tensor]] = {}
        if gated:
            counted = empty(meter, (longest,), "int64")
            self.padding = empty(meter, (prompts, longest), "bool")
            del counted

    def store(self, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Write what the prompts leave; they attend with their own keys and values."""
        columns = min(self.tokens, window) if window else self.tokens
        filled = None
        for new in (key, value):
            if self.longest > columns:
                self._ring(columns)
                rows, heads, _, size = new.shape
                filled = empty(self.meter, (rows, heads, columns, size), new.dtype)
            else:
                filled = new
            self._write(filled, self.dtype)
        return key, value

    def store_tail(self, x: Tensor, columns: int) -> None:
        """Write the last columns of (prompts, channels, tokens)."""
        if columns not in self.tails:
            self.tails[columns] = self._tail(columns)
        self._write(empty(self.meter, (*x.shape[:2], columns), x.dtype), self.dtype)

    def store_state(self, x: Tensor) -> None:
        """Write what the prompts left of a state, (prompts, ...), in its own dtype."""
        self._write(x, x.dtype)

    def _write(self, filled: Tensor, dtype: str) -> None:
        picked = empty(self.meter, (self.answers, *filled.shape[1:]), filled.dtype)
        cast(picked, dtype)

    def _tail(self, columns: int) -> tuple[Tensor, Tensor]:
        before = empty(self.meter, (self.prompts, 1), "int64")
        counted = empty(self.meter, (columns,), "int64")
        place = empty(self.meter, (self.prompts, columns), "int64")
        del before, counted
        return place, empty(self.meter, place.shape, "bool")

    def _ring(self, columns: int) -> None:
        if columns in self.rings:
            return
        shape = (self.prompts, columns)
        last, place = empty(self.meter, (self.prompts, 1), "int64"), None
        place = empty(self.meter, (columns,), "int64")
        apart = empty(self.meter, shape, "int64")
        turned = empty(self.meter, shape, "int64")
        del apart
        self.rings[columns] = empty(self.meter, shape, "int64")
        del turned, last, place


class Decode:
    """A call over one new token of each row."""

    def __init__(
        self, meter: Meter, rows: int, reach: int, tokens: int, dtype: str, *, uneven: bool
    ) -> None:
        """reach: columns that attention reads at most; tokens: of a slot; dtype: of the slots."""
        self.meter, self.dtype, self.uneven = meter, dtype, uneven
        self.rows, self.reach, self.tokens = rows, reach, tokens
        self.positions = empty(meter, (rows,), "int64")
        self.nothing = empty(meter, (0,), dtype)  # whose storage stands for every slot's
        self.places: dict[tuple[int, int], Tensor] = {}
        self.masks: dict[tuple[int, str], Tensor] = {}

    def store(self, key: Tensor, value: Tensor, window: int) -> tuple[Tensor, Tensor]:
        """Write the new tokens; returns the columns in sight."""
        columns = min(self.tokens, window) if window else self.tokens
        heads = key.shape[1]
        if (heads, columns) not in self.places:
            self.places[heads, columns] = self._place(heads)
        for new in (key, value):
            flat = reshape(new, -1, new.shape[3])
            cast(flat, self.dtype)
            del flat
        reach = min(columns, self.reach)
        return self._slot(key, columns, reach), self._slot(value, columns, reach)

    def state(self, shape: tuple[int, ...], dtype: str = "") -> Tensor:
        """A state of all rows, (rows, ...), as a view; dtype: that of the slots where empty."""
        whole = self.rows, *shape
        storage = self.nothing.storage
        return Tensor(self.meter, whole, dtype or self.dtype, row_major(whole), storage)

    def _slot(self, new: Tensor, columns: int, reach: int) -> Tensor:
        _, heads, _, size = new.shape
        strides = row_major((self.rows, heads, columns, size))
        storage = self.nothing.storage
        return Tensor(self.meter, (self.rows, heads, reach, size), self.dtype, strides, storage)

    def _place(self, heads: int) -> Tensor:
        meter = self.meter
        row = empty(meter, (self.rows, 1), "int64")
        head = empty(meter, (heads,), "int64")
        inside = empty(meter, (self.rows, heads), "int64")
        times = empty(meter, (self.rows, heads), "int64")
        del inside
        column = empty(meter, (self.rows, 1), "int64")
        place = empty(meter, (self.rows, heads), "int64")
        del row, head, times, column
        return place

    def mask(self, columns: int, dtype: str) -> Tensor:
        """(rows, 1, 1, columns): which columns each row sees."""
        if (columns, dtype) not in self.masks:
            counted = empty(self.meter, (columns,), "int64")
            hidden = empty(self.meter, (self.rows, columns), "bool")
            del counted
            self.masks[columns, dtype] = empty(self.meter, (self.rows, columns), dtype)
            del hidden
        made = self.masks[columns, dtype]
        return made.viewed((self.rows, 1, 1, columns), (columns, columns, columns, 1))


def attend_slots(
    now: Decode, query: Tensor, key: Tensor, value: Tensor, *, capped: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """query (rows, heads, 1, size), key and value (rows, kv_heads, columns, size) -> (rows, 1,
    heads, size), written out; capped: scores are bent by a tanh; sinks: (heads,)."""
    rows, heads, _, size = query.shape
    kv_heads, columns = key.shape[1], key.shape[2]
    query = reshape(query, rows, kv_heads, heads // kv_heads, size)
    scores = _multiply(scale(query), transpose(key, 2, 3))
    if capped:
        scores = scale(tanh(scale(scores)))
    if now.uneven:
        scores = add(scores, now.mask(columns, scores.dtype))
    if sinks is not None:
        column = reshape(cast(sinks, scores.dtype), 1, kv_heads, -1, 1)
        scores = concatenate((scores, expand(column, *scores.shape[:3], 1)), 3)
    weights = softmax_wide(scores)
    if sinks is not None:
        weights = narrow(weights, 3, 0, columns)
    out = _multiply(cast(weights, value.dtype), value)
    return reshape(out, rows, 1, heads, value.shape[3])


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """`torch.matmul` of (rows, heads, m, k) and (rows, heads, k, n)."""
    low_b = autocast_lower(b)  # C++ evaluates the last first
    low_a = autocast_lower(a)
    return scores_of(low_a, low_b)
