"""What a number becomes in each format that training stores it in: exact, in pure Python.

Floats round to the nearest value, ties to even, as IEEE 754 and torch's casts do. Block formats
(int8, int4, nf4, fp4) store a small code times a scale that a block of numbers shares.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

from memfit.core.errors import InvalidRequest
from memfit.records import Record


class FormatRow(Record, frozen=True, kw_only=True):
    """One number in one format. `None` means that the format has no such thing."""

    name: str
    bits: int
    sign: int  # bits of each part; a table or an integer has no exponent
    exponent: int
    mantissa: int
    maximum: float  # the largest finite value (of a block format: the scale)
    smallest_normal: float | None
    smallest_subnormal: float | None
    scale: float | None  # of a block format: the largest magnitude of the block
    step: float | None  # distance between neighbouring values at x; None beyond the range
    encoding: str  # the stored bits, parts separated by spaces; "" for a code in a table
    stored: float  # infinite beyond the range (null in JSON): see `shown`
    shown: str  # `stored` as text, exact where that is short
    absolute_error: float
    relative_error: float  # of x; 0 when x is 0
    note: str


class _Float(Record, frozen=True, kw_only=True):
    """A binary floating-point format with subnormals."""

    name: str
    bits: int
    exponent: int
    mantissa: int
    maximum: float  # with infinities (IEEE 754) the highest exponent is theirs
    saturates: bool = False  # no infinity: beyond the maximum lies the maximum
    note: str

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def lowest(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias


def _ieee(name: str, bits: int, exponent: int, mantissa: int, note: str) -> _Float:
    """A format whose highest exponent holds infinity and nan, as in IEEE 754."""
    top = math.ldexp(2 - 2.0**-mantissa, (1 << (exponent - 1)) - 1)
    return _Float(
        name=name, bits=bits, exponent=exponent, mantissa=mantissa, maximum=top, note=note
    )


FLOATS = (
    _ieee("fp64", 64, 11, 52, "what Python computes in"),
    _ieee("fp32", 32, 8, 23, "master weights, Adam's states"),
    _ieee("tf32", 19, 8, 10, "inside matrix units only: memory holds fp32"),
    _ieee("bf16", 16, 8, 7, "fp32's range with 2 to 3 digits"),
    _ieee("fp16", 16, 5, 10, "65520 and more is infinity, hence loss scaling"),
    _Float(
        name="fp8_e4m3",
        bits=8,
        exponent=4,
        mantissa=3,
        maximum=448.0,
        saturates=True,
        note="no infinity: clamped to 448 here, as torch 2.13 does; other casts give nan",
    ),
    _ieee("fp8_e5m2", 8, 5, 2, "fp16's range, for gradients; 61440 and more is infinity"),
)

# NormalFloat4: quantiles of a normal distribution over [-1, 1] (QLoRA, 2305.14314, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
# e2m1 of the OCP microscaling formats 1.0 (2023), section 5.3.3; not bitsandbytes' own `fp4`.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = (*(-v / 6 for v in reversed(_E2M1[1:])), *(v / 6 for v in _E2M1))

Code = tuple[Fraction, bool]  # a value in [-1, 1], and whether a tie goes to it


@cache
def _integers(top: int) -> tuple[Code, ...]:
    return tuple((Fraction(n, top), n % 2 == 0) for n in range(-top, top + 1))


@cache
def _e2m1() -> tuple[Code, ...]:
    positive = [(Fraction(v) / 6, i % 2 == 0) for i, v in enumerate(_E2M1)]
    return (*((-value, even) for value, even in reversed(positive[1:])), *positive)


@cache
def _nf4() -> tuple[Code, ...]:
    return tuple((Fraction(value), False) for value in NF4)


class _Block(Record, frozen=True, kw_only=True):
    """A format of codes that share a scale: the value is a code times it."""

    name: str
    bits: int
    sign: int
    exponent: int
    mantissa: int
    codes: Callable[[], tuple[Code, ...]]
    note: str


BLOCKS = (
    _Block(
        name="int8", bits=8, sign=1, exponent=0, mantissa=7, codes=lambda: _integers(127),
        note="scale / 127 apart; -128 is not used",
    ),
    _Block(
        name="int4", bits=4, sign=1, exponent=0, mantissa=3, codes=lambda: _integers(7),
        note="scale / 7 apart; -8 is not used",
    ),
    _Block(
        name="nf4", bits=4, sign=0, exponent=0, mantissa=4, codes=_nf4,
        note="16 quantiles of a normal distribution",
    ),
    _Block(
        name="fp4", bits=4, sign=1, exponent=2, mantissa=1, codes=_e2m1,
        note="e2m1: 0 0.5 1 1.5 2 3 4 6, times scale / 6",
    ),
)  # fmt: skip


def formats(x: float, *, scale: float | None = None) -> tuple[FormatRow, ...]:
    """`x` in every format, widest first.

    `scale` is the largest magnitude of the block that x is stored with; None takes x alone, which
    a block format stores exactly. Raises InvalidRequest: x is
    not finite, or scale is not above 0.
    """
    if not math.isfinite(x):
        raise InvalidRequest(f"`{x}` is not a finite number", hint="for example 3.14159265")
    if scale is not None and not 0 < scale < math.inf:
        raise InvalidRequest(f"`scale: {scale}` is not above 0", hint="the block's largest |x|")
    floats = tuple(_float_row(x, kind) for kind in FLOATS)
    return (*floats, _integer_row(x), *(_block_row(x, scale, kind) for kind in BLOCKS))


def round_to(x: float, kind: _Float) -> tuple[float, float | None]:
    """The nearest value of a format, ties to even, and the distance between its neighbours there.

    Beyond the maximum: what the format holds there, and no distance.
    """
    exponent = math.frexp(x)[1] - 1 if x else kind.lowest
    quantum = max(exponent, kind.lowest) - kind.mantissa
    try:  # both ldexp are exact: x has 53 bits, and quanta reach from 2**-1074 to 2**971
        nearest = math.ldexp(round(math.ldexp(x, -quantum)), quantum)
    except OverflowError:
        nearest = math.copysign(math.inf, x)
    if abs(nearest) > kind.maximum:
        return math.copysign(kind.maximum if kind.saturates else math.inf, x), None
    return math.copysign(nearest, x), math.ldexp(1.0, quantum)


def encode(value: float, kind: _Float) -> str:
    """The bits of a value of the format: `sign exponent mantissa`."""
    top = (1 << kind.exponent) - 1
    sign = "1" if math.copysign(1.0, value) < 0 else "0"
    if math.isinf(value):
        code, rest = top, 0
    else:
        exponent = max(math.frexp(value)[1] - 1 if value else kind.lowest, kind.lowest)
        units = int(math.ldexp(abs(value), kind.mantissa - exponent))  # exact: value is stored
        normal = units >> kind.mantissa
        code = exponent + kind.bias if normal else 0
        rest = units - (normal << kind.mantissa)
    return f"{sign} {code:0{kind.exponent}b} {rest:0{kind.mantissa}b}"


def _float_row(x: float, kind: _Float) -> FormatRow:
    stored, step = round_to(x, kind)
    return FormatRow(
        name=kind.name,
        bits=kind.bits,
        sign=1,
        exponent=kind.exponent,
        mantissa=kind.mantissa,
        maximum=kind.maximum,
        smallest_normal=math.ldexp(1.0, kind.lowest),
        smallest_subnormal=math.ldexp(1.0, kind.lowest - kind.mantissa),
        scale=None,
        step=step,
        encoding=encode(stored, kind),
        note=kind.note,
        **_error(x, stored),
    )


def _block_row(x: float, scale: float | None, kind: _Block) -> FormatRow:
    shared = Fraction(scale if scale is not None else abs(x) or 1.0)
    codes = kind.codes()
    wanted = Fraction(x) / shared
    above = bisect_right(codes, wanted, lo=1, hi=len(codes) - 1, key=lambda code: code[0])
    pair = codes[above - 1], codes[above]
    nearest = min(pair, key=lambda code: (abs(code[0] - wanted), not code[1]))[0]
    inside = abs(wanted) <= 1
    how = "scale is the block's largest magnitude" if scale else "x alone in its block, so exact"
    return FormatRow(
        name=kind.name,
        bits=kind.bits,
        sign=kind.sign,
        exponent=kind.exponent,
        mantissa=kind.mantissa,
        maximum=float(shared),
        smallest_normal=None,
        smallest_subnormal=None,
        scale=float(shared),
        step=float((pair[1][0] - pair[0][0]) * shared) if inside else None,
        encoding="",
        note=f"{kind.note}; {how}",
        **_error(x, float(nearest * shared)),
    )


def _integer_row(x: float) -> FormatRow:
    """int8 as the type itself: the nearest whole number, ties to even, that eight bits hold."""
    stored = min(max(round(x), -128), 127)
    return FormatRow(
        name="int8, no scale",
        bits=8,
        sign=1,
        exponent=0,
        mantissa=7,
        maximum=127.0,
        smallest_normal=None,
        smallest_subnormal=None,
        scale=None,
        step=1.0 if -128 <= x <= 127 else None,
        encoding=f"{stored & 0xFF:08b}",
        note="whole numbers from -128 to 127, values beyond are clipped; training stores int8 with"
        " a scale, as in the row below",
        **_error(x, float(stored)),
    )


def _error(x: float, stored: float) -> dict[str, Any]:
    """The stored value and its distance from x, computed exactly and rounded once."""
    if math.isinf(stored):
        return {
            "stored": stored,
            "shown": repr(stored),
            "absolute_error": math.inf,
            "relative_error": math.inf,
        }
    exact = f"{Decimal(stored):f}"
    distance = abs(Fraction(stored) - Fraction(x))
    return {
        "stored": stored,
        "shown": exact if len(exact) <= 26 else repr(stored),
        "absolute_error": float(distance),
        "relative_error": float(distance / abs(Fraction(x))) if x else 0.0,
    }
