"""NormalFloat4: 16 quantiles of a normal distribution (QLoRA, Dettmers et al. 2305.14314)."""

from __future__ import annotations

from memfit.base_formats import base_formats
from memfit.base_formats.shared.four_bits import FourBits

base_formats.register("nf4")(FourBits("nf4", offered=True))
