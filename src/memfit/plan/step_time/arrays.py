"""Choices that work for Python numbers and for numpy arrays alike, without importing numpy."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Any, TypeVar, get_type_hints

Nested = TypeVar("Nested", bound=tuple[Any, ...])
Number = Any  # a float, an int or a numpy array of them
PLAIN = frozenset((bool, float, int))  # asked first: most are, and it costs a tenth


def _plural(a: Number, b: Number = 0) -> bool:
    return bool(getattr(a, "ndim", 0) or getattr(b, "ndim", 0))


def where(condition: Number, then: Number, otherwise: Number) -> Number:
    """`then` where the condition holds. Both must be computable: nothing is evaluated lazily."""
    if condition.__class__ in PLAIN or not _plural(condition):
        return then if condition else otherwise
    import numpy

    return numpy.where(condition, then, otherwise)


def larger(a: Number, b: Number) -> Number:
    """The larger of two, element by element."""
    if (a.__class__ in PLAIN and b.__class__ in PLAIN) or not _plural(a, b):
        return a if a >= b else b
    import numpy

    return numpy.maximum(a, b)


def smaller(a: Number, b: Number) -> Number:
    """The smaller of two, element by element."""
    if (a.__class__ in PLAIN and b.__class__ in PLAIN) or not _plural(a, b):
        return a if a <= b else b
    import numpy

    return numpy.minimum(a, b)


def ceil_div(a: Number, b: Number) -> Number:
    """The quotient, rounded up."""
    return -(-a // b)


def log2(a: Number) -> Number:
    """Logarithm to the base of two of what is at least 1."""
    if not _plural(a):
        import math

        return math.log2(a)
    import numpy

    return numpy.log2(a)


def beside(a: Number, b: Number) -> Number:
    """Seconds of two things that run side by side: near the larger, above it where they are close.

    The fourth root of the sum of fourth powers: two equal parts take 1.19 of one, as neither hides
    behind the other perfectly.
    """
    return (a**4 + b**4) ** 0.25


def rounded(a: Number) -> Number:
    """The nearest whole number, halves to the even one: what `round` does."""
    if not _plural(a):
        return round(a)
    import numpy

    return numpy.rint(a).astype(numpy.int64)


def say(template: str, *values: Number) -> str:
    """`template.format(*values)`; of arrays, which nobody reads in words, the template itself."""
    return template if any(map(_plural, values)) else template.format(*values)


def everywhere(condition: Number) -> bool:
    """Whether a condition holds for every element."""
    return bool(condition.all() if _plural(condition) else condition)


@cache
def _records(kind: type[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The records that are the fields of a record."""
    return tuple(get_type_hints(kind).values())


@cache
def list_names(kind: type[tuple[Any, ...]]) -> tuple[str, ...]:
    """The numbers' names of a record of records, which are distinct."""
    return tuple(name for record in _records(kind) for name in record._fields)


def list_numbers(nested: tuple[Any, ...]) -> dict[str, Number]:
    """The numbers of a record of records by their names."""
    return dict(zip(list_names(type(nested)), chain(*nested), strict=True))


def gather(kind: type[Nested], numbers: Mapping[str, Number]) -> Nested:
    """A record of records, made of numbers by their names; a name that none has is a TypeError."""
    if unknown := numbers.keys() - set(list_names(kind)):
        raise TypeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(*(
        record(**{name: numbers[name] for name in record._fields if name in numbers})
        for record in _records(kind)
    ))  # fmt: skip


@cache
def _places(kind: type[tuple[Any, ...]]) -> dict[str, str]:
    """The field whose record has a number, by the number's name."""
    hints = get_type_hints(kind).items()
    return {name: field for field, record in hints for name in record._fields}


def change(nested: Nested, /, **numbers: Number) -> Nested:
    """The same record of records but for these numbers, whichever of its records has them."""
    places, changed = _places(type(nested)), dict[str, dict[str, Number]]()
    for name, number in numbers.items():
        if name not in places:
            raise TypeError(f"{type(nested).__name__} has no {name}")
        changed.setdefault(places[name], {})[name] = number
    records: Any = nested
    return records._replace(  # type: ignore[no-any-return]
        **{field: getattr(nested, field)._replace(**own) for field, own in changed.items()}
    )
