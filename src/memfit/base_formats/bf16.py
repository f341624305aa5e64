"""The 16 bits that most models are published in: fp32's range with 2 to 3 digits."""

from __future__ import annotations

from memfit.base_formats import base_formats
from memfit.base_formats.shared.plain import Plain

base_formats.register("bf16")(Plain("bf16", 16, "bfloat16"))
