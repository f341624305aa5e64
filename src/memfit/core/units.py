"""Quantities: parsed once at the border, base units inside, shown once at the other border.

Inside memfit every quantity is in base units: bytes, seconds, FLOP, tokens, US dollars. Memory is
shown in binary units (GiB = 2**30 bytes), bandwidth and FLOP/s in decimal ones. This is the only
module in which the factors appear.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf

from memfit.core.errors import InvalidRequest

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
PFLOP_DAY = 8.64e19  # FLOP: 10**15 FLOP/s for 86,400 s
HOUR, DAY = 3600.0, 86400.0

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"K": KIB, "M": MIB, "G": GIB, "T": TIB}
_BYTES = {"B": 1.0} | {f"{p}iB": n for p, n in _BINARY.items()}
_BYTES |= {f"{p}B": _DECIMAL[p] for p in "kMGTP"}
_BYTES |= {f"{p}i": n for p, n in _BINARY.items()}  # as Kubernetes writes them
_BYTES |= {
    f"{p}byte{s}": n
    for p, n in {
        "": 1.0, "kilo": 1e3, "mega": 1e6, "giga": 1e9, "tera": 1e12,
        "kibi": KIB, "mebi": MIB, "gibi": GIB, "tebi": TIB,
    }.items()
    for s in ("", "s")
}  # fmt: skip
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": HOUR, "d": DAY}
_SECONDS |= {
    f"{word}{many}": seconds
    for word, seconds in (
        ("microsecond", 1e-6), ("millisecond", 1e-3), ("sec", 1.0), ("second", 1.0), ("min", 60.0),
        ("minute", 60.0), ("hr", HOUR), ("hour", HOUR), ("day", DAY), ("week", 7 * DAY),
    )
    for many in ("", "s")
}  # fmt: skip
_FLOPS = {
    f"{p}{unit}": _DECIMAL[p]
    for p in ("", "M", "G", "T", "P", "E")
    for unit in ("FLOP/s", *(("FLOPS", "FLOPs/s") * bool(p)))
}
_LARGE = {p: _DECIMAL[p] for p in ("", "M", "G", "T", "P", "E")} | {"Z": 1e21, "Y": 1e24}
_FLOP = {f"{p}FLOP{s}": factor for p, factor in _LARGE.items() for s in ("", "s")}
_FLOP |= {  # a rate over a while: 10 TFLOP-seconds are what 10 TFLOP/s compute in one second
    f"{p}{unit}-{while_}": factor * seconds
    for p, factor in _LARGE.items()
    for unit in ("FLOP", "FLOPS", "FLOP/s", *("F" * bool(p)))
    for while_, seconds in {
        "second": 1.0, "seconds": 1.0, "s": 1.0, "hour": HOUR, "hours": HOUR, "h": HOUR,
        "day": DAY, "days": DAY, "d": DAY,
    }.items()
}  # fmt: skip
_RATE = {f"{u}/s": f for u, f in _BYTES.items()}
_MONEY = {
    f"{p}{unit}": n
    for p, n in {"": 1.0, "k": 1e3, "M": 1e6}.items()
    for unit in ("$", " USD", " dollar", " dollars", " US dollars")
}
_MONEY |= {unit.strip(): n for unit, n in _MONEY.items()}
_POWER = {"W": 1.0, "kW": 1e3, "watt": 1.0, "watts": 1.0, "kilowatt": 1e3, "kilowatts": 1e3}
_CARBON = {"kg/kWh": 1.0, "g/kWh": 1e-3}
_COUNT = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_COUNT |= {"thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12}

# commas stand between groups of three digits; elsewhere they may be a decimal sign, or a slip
_NUMBER = r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)(?:\.\d*)?(?:[eE][+-]?\d+)?"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*(.*?)\s*", re.DOTALL)
_DOLLARS = re.compile(rf"\s*(?:(?:US)?\s*\$|USD)\s*({_NUMBER})\s*([kKmM]?)\s*(?:USD)?\s*")
# signs that case alone tells apart: of bits, which many write of bytes, and of a rate of compute
_EXACT = {
    id(_BYTES): re.compile(r"b|[KMGTP]i?b"),
    id(_RATE): re.compile(r"b/s|[KMGTP]i?b/s"),
    id(_FLOP): re.compile(r"\w?flops", re.IGNORECASE),
}


def _find_unit(text: str, units: Mapping[str, float]) -> float | None:
    """The factor of a unit as it is written, else but for case; None where that is not one unit.

    `Gb` is the sign of gigabits and is often written for gigabytes, so that it is neither.
    """
    if text in units:
        return units[text]
    exact = _EXACT.get(id(units))
    if exact is not None and exact.fullmatch(text):
        return None
    found = {units[unit] for unit in units if unit.lower() == text.lower()}
    return found.pop() if len(found) == 1 else None


def _parse(text: object, what: str, units: Mapping[str, float], example: str) -> float:
    """Read "number unit" or raise InvalidRequest naming the text and an example that works."""
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    factor = _find_unit(match[2], units) if match else None
    if match is None or factor is None:
        shown = f"`{text}`" if text != "" else "an empty text"
        own = match and re.fullmatch(r"\d{1,3}(\.\d+)?", match[1])  # the user's own number
        if match and own and re.fullmatch(r"[A-Za-z]*", match[2]):
            example = f"{match[1]} {example.split(maxsplit=1)[-1]}"
        hint = f"write {what} with its unit, for example `{example}`"
        raise InvalidRequest(f"cannot read {shown} as {what}", hint=hint)
    value = float(match[1].replace(",", "").replace("_", ""))
    if value < 0:
        raise InvalidRequest(f"{what} is negative: `{text}`", hint=f"for example `{example}`")
    if (found := value * factor) == inf:
        raise InvalidRequest(f"{what} is beyond all numbers: `{text}`", hint=f"such as `{example}`")
    return found


def parse_bytes(text: object) -> int:
    """`"72 GiB"`, `"72 gib"` -> 77309411328. GiB is 2**30, GB and gb are 10**9.

    Raises InvalidRequest for a bare number, and for `Gb`, which is a sign of bits.
    """
    return round(_parse(text, "a memory size", _BYTES, "72 GiB"))


def parse_seconds(text: object) -> float:
    """`"48 h"`, `"48 hours"`, `"2 Days"` -> 172800.0 seconds; `m` is neither minutes nor months."""
    return _parse(text, "a duration", _SECONDS, "48 h")


def parse_usd(text: object) -> float:
    """`"5000 USD"`, `"$5,000"`, `"5k USD"`, `"5000 dollars"` -> 5000.0; no other currency."""
    if isinstance(text, str) and (match := _DOLLARS.fullmatch(text)):
        text = f"{match[1]} {match[2]}$"
    return _parse(text, "an amount of money", _MONEY, "5000 USD")


def parse_flops(text: object) -> float:
    """`"989 TFLOP/s"`, `"989 tflops"` -> 9.89e14 FLOP per second (dense)."""
    return _parse(text, "a compute rate", _FLOPS, "989 TFLOP/s")


def parse_flop(text: object) -> float:
    """`"1e21 FLOP"` or `"11.6 PFLOP-days"` -> FLOP."""
    return _parse(text, "an amount of compute", _FLOP, "1e21 FLOP")


def parse_bandwidth(text: object) -> float:
    """`"3.35 TB/s"` -> 3.35e12 bytes per second."""
    return _parse(text, "a bandwidth", _RATE, "3.35 TB/s")


def parse_watts(text: object) -> float:
    """`"700 W"` -> 700.0."""
    return _parse(text, "a power", _POWER, "700 W")


def parse_carbon(text: object) -> float:
    """`"0.4 kg/kWh"` or `"56 g/kWh"` -> kg of CO2 equivalents per kWh."""
    return _parse(text, "a carbon intensity", _CARBON, "0.4 kg/kWh")


def parse_count(text: object) -> float:
    """`"7B"`, `"1.4 T"`, `"50 million"`, `"20_000"` or a number -> a count (parameters, tokens)."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        text = str(text)
    return _parse(text, "a count", _COUNT, "7B")


def show_bytes(n: float, *, digits: int = 2) -> str:
    """Binary units: `show_bytes(3 * 2**29)` -> `1.50 GiB`."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(n) >= factor:
            return f"{n / factor:.{digits}f} {unit}"
    return f"{n:.0f} B"


def show_gib(n: float, *, digits: int = 2) -> str:
    """Always GiB, for columns that are compared: `show_gib(2**29)` -> `0.50 GiB`."""
    return f"{n / GIB:.{digits}f} GiB"


def show_seconds(s: float) -> str:
    """The two largest units: `show_seconds(93784)` -> `1 d 2 h`."""
    if s < 1:
        return f"{s * 1e3:.3g} ms" if s >= 1e-3 else f"{s * 1e6:.3g} us"
    if s < 60:
        return f"{s:.3g} s"
    if s < HOUR:
        return f"{int(s // 60)} min {int(s % 60)} s"
    if s < DAY:
        return f"{int(s // HOUR)} h {int(s % HOUR // 60)} min"
    return f"{int(s // DAY)} d {int(s % DAY // HOUR)} h"


def show_count(n: float) -> str:
    """Decimal words: `show_count(8_030_261_248)` -> `8.03B`."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(n) >= factor:
            return f"{n / factor:.3g}{unit}" if abs(n) < 100 * factor else f"{n / factor:.0f}{unit}"
    return f"{n:.0f}"


def show_flops(n: float) -> str:
    """`show_flops(9.89e14)` -> `989 TFLOP/s`."""
    for unit, factor in (("EFLOP/s", 1e18), ("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if abs(n) >= factor:
            return f"{n / factor:.4g} {unit}"
    return f"{n:.4g} FLOP/s"


def show_bandwidth(n: float) -> str:
    """`show_bandwidth(3.35e12)` -> `3.35 TB/s`."""
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6)):
        if abs(n) >= factor:
            return f"{n / factor:.4g} {unit}"
    return f"{n:.4g} B/s"


def show_gb(n: float) -> str:
    """Decimal, as rules of thumb and data sheets count: `show_gb(28e9)` -> `28 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(n) >= factor:
            return f"{n / factor:.4g} {unit}"
    return f"{n:.0f} B"
