"""IEEE's 16 bits: more digits than bf16, and numbers up to 65504."""

from __future__ import annotations

from memfit.base_formats import base_formats
from memfit.base_formats.shared.plain import Plain

base_formats.register("fp16")(Plain("fp16", 16, "float16"))
