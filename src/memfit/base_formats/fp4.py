"""bitsandbytes' own floating-point type of 4 bits; not e2m1 of the OCP microscaling formats."""

from __future__ import annotations

from memfit.base_formats import base_formats
from memfit.base_formats.shared.four_bits import FourBits

base_formats.register("fp4")(FourBits("fp4", offered=False))
