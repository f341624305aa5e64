"""How high one update of a low-bit AdamW rises, by sizes alone.

Written with the local variables of torchao's `single_param_adam` and of the functions that it
calls (torchao/optim/adam.py, subclass_8bit.py, subclass_4bit.py, subclass_fp8.py,
quant_utils.py), so that each tensor lives as long as it does there.
"""

from __future__ import annotations

from functools import lru_cache

from memfit.meta.meter import Meter
from memfit.meta.tensor import Tensor, empty
from memfit.records import Record
from memfit.records.ledger import Kind


class Code(Record, frozen=True, kw_only=True):
    """How a moment is stored: a code an element, a scale a block, a table of the codes' values."""

    bits: int
    block: int  # elements that share a scale
    dtype: str  # of the codes; two share a byte when bits is 4
    entries: int  # of the table; 0 without one

    def covers(self, numel: int) -> bool:
        """Return whether a tensor is quantised: small and ragged ones keep their dtype."""
        return self.bits < PLAIN and numel >= SMALLEST and numel % self.block == 0


PLAIN = 16  # bits of moments that are not coded: those of their parameter's dtype
SMALLEST = 4096  # elements; torchao/optim/adam.py: _AdamBase._new_buffer


@lru_cache(maxsize=1024)
def rise(
    numel: int, dtype: str, code: Code, *, cuda: bool, blocks: bool, rounded: bool = False
) -> int:
    """Bytes at the worst moment of one update, above parameter, gradient and state.

    cuda: scalars are on the host and not counted. blocks: as the caching allocator rounds them.
    rounded: bf16 weights are rounded by chance.
    """
    meter = Meter(cuda=blocks)
    run_update(meter, numel, dtype, code, scalars=not cuda, rounded=rounded)
    live = top = 0
    for event in meter.events:
        live += meter.held(event) if event >= 0 else -meter.held(~event)
        top = max(top, live)
    return top


def run_update(
    meter: Meter, numel: int, dtype: str, code: Code, *, scalars: bool, rounded: bool = False
) -> None:
    """Let one update's tensors come and go on a meter; scalars: those on the host count too."""
    update = _Update(meter, numel, code, scalars=scalars)
    update.run(narrow=dtype != "float32", rounded=rounded and dtype == "bfloat16")


class _Update:
    """torchao's functions; what they return in place is None, as are scalars on the host."""

    def __init__(self, meter: Meter, numel: int, code: Code, *, scalars: bool) -> None:
        self.meter, self.numel, self.code, self.scalars = meter, numel, code, scalars

    def make(self, dtype: str = "float32", numel: int | None = None) -> Tensor:
        """Return a new flat tensor of `numel` elements, or of the parameter's."""
        shape = (self.numel if numel is None else numel,)
        return empty(self.meter, shape, dtype, Kind.TEMPORARY)

    def scalar(self) -> Tensor | None:
        """A 0-dim tensor made from the step count or the learning rate, which are on the host."""
        return empty(self.meter, (), "float32", Kind.TEMPORARY) if self.scalars else None

    def run(self, *, narrow: bool, rounded: bool) -> None:
        """single_param_adam; narrow: parameter and gradient are in 16 bits."""
        scalars = [self.scalar()]  # the learning rate
        wide = [self.make(), self.make()] if narrow else []
        decay = self._decay()
        del wide[:1]
        scalars += [self._correction(), self._correction()]
        mean = self._lerp(narrow=narrow, squared=False)
        square = self._lerp(narrow=narrow, squared=True)
        if self.code.covers(self.numel):
            self._store()
            self._store()
        root = self.make()
        corrected = self.scalar()
        quotient = self.make()
        del root, corrected
        denominator = self.make()
        del quotient
        direction = self.make()
        scaled = self.make()
        del direction
        step = self.make()
        del scaled
        updated = self.make()
        del decay, step
        if rounded:
            self._round()
        del mean, square, denominator, updated, scalars, wide

    def _round(self) -> None:
        """_fp32_to_bf16_sr: 16 bits by chance against the 16 that are cut off."""
        chance, fraction, below = (self.make("int32") for _ in range(3))
        up = self.make("bool")
        above = self.make("int32")
        chosen = self.make("int32")
        del up, above
        narrow = self.make("bfloat16")
        del chance, fraction, below, chosen, narrow

    def _decay(self) -> Tensor:
        factor = self.scalar()
        product = self.make()
        del factor
        result = self.make()
        del product
        return result

    def _correction(self) -> Tensor | None:
        power = self.scalar()
        result = self.scalar()
        del power
        return result

    def _lerp(self, *, narrow: bool, squared: bool) -> Tensor:
        """state.float().lerp(gradient or its square, 1 - beta)."""
        quantised = self.code.covers(self.numel)
        state = self.make() if narrow and not quantised else None
        square = self.make() if squared else None
        if quantised:
            state = self._dequantise()
        result = self.make()
        del state, square
        return result

    def _dequantise(self) -> Tensor:
        code = self.code
        if not code.entries:
            values = self.make()
            return self._scaled(values)
        unpacked = None
        if code.bits == 4:
            high, low = (self.make(code.dtype, self.numel // 2) for _ in range(2))
            unpacked = self.make(code.dtype)
            del high, low
        index = self.make("int32")
        values = self.make()
        del index
        result = self._scaled(values)
        del values, unpacked
        return result

    def _scaled(self, values: Tensor) -> Tensor:
        result = self.make()
        del values
        return result

    def _store(self) -> None:
        """state.copy_(value): scale each block, then find each element's code."""
        code, blocks = self.code, self.numel // self.code.block
        magnitude = self.make()
        largest = self.make(numel=blocks)
        del magnitude
        scale = self.make(numel=blocks)
        del largest
        if not code.entries:
            largest, scale = scale, self.make(numel=blocks)
            del largest
        scaled = self.make()
        if not code.entries:
            codes = self.make(code.dtype)
            del scaled, codes
            return
        codes = self._search()
        if code.bits == 4:
            del scaled
            shifted = self.make(code.dtype, self.numel // 2)
            packed = self.make(code.dtype, self.numel // 2)
            del shifted, packed
        del codes, scale

    def _search(self) -> Tensor:
        """quantize_8bit_with_qmap: a binary search in the table, then the nearer neighbour."""
        reached = self.make("bool")
        codes = self.make("int64")
        del reached
        for _ in range(self.code.bits - 1):
            probe = self.make("int64")
            value = self.make()
            del probe
            reached = self.make("bool")
            del value
            more = self.make("int64")
            del reached, more
        next_code = self.make("int64")
        above = self.make("int64")
        del next_code
        down, up, residual = self.make(), self.make(), self.make()
        gap = self.make()
        half = self.make()
        del gap
        nearer = self.make("bool")
        del half
        chosen = self.make("int64")
        del nearer, codes
        result = self.make(self.code.dtype)
        del chosen, above, down, up, residual
        return result
