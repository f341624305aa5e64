"""Kinds of numbers that a record checks as it is read, as its errors describe them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Auto = Literal["auto"]
Positive = Annotated[int, msgspec.Meta(ge=1, description="a whole number, 1 or more")]
NotNegative = Annotated[int, msgspec.Meta(ge=0, description="a whole number, 0 or more")]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, description="a number above 0")]
NotNegativeFloat = Annotated[float, msgspec.Meta(ge=0, description="a number, 0 or more")]
AtLeastOne = Annotated[float, msgspec.Meta(ge=1, description="a number, 1 or more")]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1, description="a number from 0 to below 1")]
Truth = Annotated[bool, msgspec.Meta(description="true, false or auto")]  # beside `Auto`
