"""Sizes that are not numbers yet: a forward over them is written down once for every shape.

`Unknowns` returns the rows and the tokens of a micro-batch as `Size`s. Arithmetic on them gives
polynomials; a comparison (is it 1? is it larger than the number of heads?) is decided by an example
and recorded as a condition. Where all conditions hold, another shape would have run the same
operations in the same order, so the log of one run is the log of both, number by formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, inf
from typing import Any, Union, cast

Monomial = tuple[int, ...]  # indices of unknowns, ascending, repeated for powers; () is 1
Terms = tuple[tuple[Monomial, int], ...]  # sorted; no zero coefficients
Number = Union[int, "Size"]
SIGNS = frozenset((-1, 0, 1))


class Range:
    """Which values a size may have."""

    def __init__(self) -> None:
        self.least: float = -inf
        self.most: float = inf
        self.without: set[int] = set()

    def demand(self, number: int, signs: set[int]) -> None:
        """Only values whose difference from a number has one of these signs."""
        if 0 not in signs:
            self.without.add(number)
        if -1 not in signs:
            self.least = max(self.least, number)
        if 1 not in signs:
            self.most = min(self.most, number)

    def holds(self, value: int) -> bool:
        """Whether a value is one of them."""
        return self.least <= value <= self.most and value not in self.without

    def __repr__(self) -> str:
        return f"{self.least} to {self.most} without {sorted(self.without)}"


class Unknowns:
    """Named numbers with an example of each, and the conditions that were tested on them."""

    def __init__(self, *examples: int) -> None:
        self.examples = list(examples)
        self.parts: list[tuple[Size, Number]] = []  # further unknowns: numerator // denominator
        self.conditions: dict[Size, Range] = {}
        self._known: dict[Terms, Size] = {}
        self._free = len(examples)  # the others may be 0

    def __getitem__(self, index: int) -> int:
        """The unknown of that index; it stands for an int wherever sizes are computed."""
        return cast(int, self.make({(index,): 1}))

    def make(self, terms: dict[Monomial, int]) -> Number:
        """The size with these terms; a plain number where nothing is unknown."""
        nonzero = tuple(sorted((m, c) for m, c in terms.items() if c))
        if not nonzero:
            return 0
        if len(nonzero) == 1 and not nonzero[0][0]:
            return nonzero[0][1]
        if nonzero not in self._known:
            self._known[nonzero] = Size(self, nonzero)
        return self._known[nonzero]

    def quotient(self, over: Size, under: Number) -> Number:
        """`over // under` as an unknown of its own, from 0 up."""
        if under <= 0:
            return over.__index__() // under.__index__()
        if over < 0:  # -(-n // m) is how one writes n / m rounded up
            return -self.quotient(cast(Size, -over + under - 1), under)
        pair = over, under
        if pair not in self.parts:
            self.parts.append(pair)
            self.examples.append(over.example // example(under))
        return self.make({(self._free + self.parts.index(pair),): 1})

    def evaluate(self, *values: int) -> list[int] | None:
        """All unknowns of another example; None where a condition does not hold there."""
        found = list(values)
        for over, under in self.parts:
            below = value_at(under, found)
            if below <= 0:
                return None
            found.append(over.at(found) // below)
        for size, allowed in self.conditions.items():
            if not allowed.holds(size.at(found)):
                return None
        return found

    def demand(self, size: Size, signs: frozenset[int]) -> None:
        """Keep that a size must have one of these signs: as a range of it without its constant."""
        flip = -1 if size.terms[-1][1] < 0 else 1
        constant = dict(size.terms).get((), 0)
        stem = cast(Size, (size - constant) * flip)
        allowed = self.conditions.setdefault(stem, Range())
        allowed.demand(-constant * flip, {sign * flip for sign in signs})

    def positive(self, monomial: Monomial) -> bool:
        """Whether a product is at least 1 everywhere: rows and tokens are, quotients may be 0."""
        return all(index < self._free for index in monomial)


class Size:
    """A polynomial of unknowns. Each exists once, so that equal ones are identical."""

    __slots__ = ("_answers", "_products", "_sums", "example", "terms", "unknowns")
    __hash__ = object.__hash__

    def __init__(self, unknowns: Unknowns, terms: Terms) -> None:
        self.unknowns = unknowns
        self.terms = terms
        self.example = self.at(unknowns.examples)
        self._products: dict[Any, Number] = {}
        self._sums: dict[Any, Number] = {}
        self._answers: dict[Any, bool] = {}

    def at(self, values: Sequence[int]) -> int:
        """Its value where the unknowns have these."""
        total = 0
        for monomial, coefficient in self.terms:
            for index in monomial:
                coefficient *= values[index]
            total += coefficient
        return total

    def __repr__(self) -> str:
        def name(index: int) -> str:
            return "bt"[index] if index < 2 else f"q{index}"

        words = ["*".join([str(c), *map(name, m)]) for m, c in self.terms]
        return " + ".join(words)

    # arithmetic

    def __add__(self, other: Number) -> Number:
        found = self._sums.get(other)
        if found is None:
            found = self._sums[other] = self._plus(other)
        return found

    def _plus(self, other: Number) -> Number:
        terms = dict(self.terms)
        for monomial, coefficient in terms_of(other):
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return self.unknowns.make(terms)

    __radd__ = __add__

    def __neg__(self) -> Size:
        return cast(Size, self * -1)

    def __sub__(self, other: Number) -> Number:
        return self + -other

    def __rsub__(self, other: Number) -> Number:
        return -self + other

    def __mul__(self, other: Number) -> Number:
        found = self._products.get(other)
        if found is None:
            found = self._products[other] = self._multiply(other)
        return found

    __rmul__ = __mul__

    def _multiply(self, other: Number) -> Number:
        terms: dict[Monomial, int] = {}
        for mine, a in self.terms:
            for its, b in terms_of(other):
                monomial = tuple(sorted(mine + its))
                terms[monomial] = terms.get(monomial, 0) + a * b
        return self.unknowns.make(terms)

    def __floordiv__(self, other: Number) -> Number:
        exact = self._divide(other)
        return self.unknowns.quotient(self, other) if exact is None else exact

    def __rfloordiv__(self, other: int) -> int:
        return other // self.__index__()

    def __rmod__(self, other: int) -> int:
        return other % self.__index__()

    def __mod__(self, other: Number) -> Number:
        return self - self // other * other

    def _divide(self, other: Number) -> Number | None:
        """The quotient where it is a polynomial."""
        divisor = terms_of(other)
        if len(divisor) != 1:
            return 1 if self is other else None
        (below, by), *_ = divisor
        terms: dict[Monomial, int] = {}
        for monomial, coefficient in self.terms:
            left = list(monomial)
            for index in below:
                if index not in left:
                    return None
                left.remove(index)
            if coefficient % by:
                return None
            terms[tuple(left)] = coefficient // by
        return self.unknowns.make(terms)

    # questions: answered by the example, and kept as conditions

    def _certain(self, sign: int) -> bool:
        """Whether all shapes have this sign: no term works against it, and it never is 0."""
        if any(coefficient * sign < 0 and monomial for monomial, coefficient in self.terms):
            return False
        least = sum(c * sign for m, c in self.terms if self.unknowns.positive(m))
        return least > 0

    def _reduced(self) -> Number:
        """With the same sign, without factors that all terms share."""
        divisor = gcd(*(c for _, c in self.terms))
        shared = [i for i in set(self.terms[-1][0]) if all(i in m for m, _ in self.terms)]
        terms: dict[Monomial, int] = {}
        for monomial, coefficient in self.terms:
            left = list(monomial)
            for index in shared:
                if self.unknowns.positive((index,)):
                    left.remove(index)
            terms[tuple(left)] = coefficient // divisor
        return self.unknowns.make(terms)

    def _compare(self, other: Number, yes: frozenset[int]) -> bool:
        """Whether the sign of the difference is among `yes`."""
        found = self._answers.get((other, yes))
        if found is None:  # an answer once given is a condition already
            found = self._answers[other, yes] = self._judge(other, yes)
        return found

    def _judge(self, other: Number, yes: frozenset[int]) -> bool:
        difference = self - other
        sign = (example(difference) > 0) - (example(difference) < 0)
        reduced = difference._reduced() if isinstance(difference, Size) else difference
        if isinstance(reduced, Size) and not reduced._certain(sign):
            self.unknowns.demand(reduced, yes if sign in yes else SIGNS - yes)
        return sign in yes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | Size):
            return NotImplemented
        return self is other or self._compare(other, frozenset((0,)))

    def __lt__(self, other: Number) -> bool:
        return self._compare(other, frozenset((-1,)))

    def __le__(self, other: Number) -> bool:
        return self._compare(other, frozenset((-1, 0)))

    def __gt__(self, other: Number) -> bool:
        return self._compare(other, frozenset((1,)))

    def __ge__(self, other: Number) -> bool:
        return self._compare(other, frozenset((0, 1)))

    def __bool__(self) -> bool:
        return self != 0

    def __index__(self) -> int:
        """The example itself, where a number is needed: from then on only for this value."""
        self._compare(self.example, frozenset((0,)))
        return self.example

    __int__ = __index__

    def __truediv__(self, other: float) -> float:
        return self.__index__() / other

    def __rtruediv__(self, other: float) -> float:
        return other / self.__index__()

    def __rlshift__(self, other: int) -> int:
        return other << self.__index__()

    def bit_length(self) -> int:
        """As of the number."""
        return self.__index__().bit_length()


def terms_of(number: Number) -> Terms:
    """The terms of a size or of a plain number."""
    return number.terms if isinstance(number, Size) else (((), number),)


def value_at(number: Number, values: Sequence[int]) -> int:
    """The number itself, or a size's value under these unknowns."""
    return number.at(values) if isinstance(number, Size) else number


def example(number: Number) -> int:
    """The number itself, or a size's example."""
    return number.example if isinstance(number, Size) else number
