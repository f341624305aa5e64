"""IEEE's 32 bits: what a model is trained in where nothing else is said."""

from __future__ import annotations

from memfit.base_formats import base_formats
from memfit.base_formats.shared.plain import Plain

base_formats.register("fp32")(Plain("fp32", 32, "float32"))
