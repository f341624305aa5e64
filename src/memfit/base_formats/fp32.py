"""IEEE's 32 bits: the dtype of training unless a request states another."""

from __future__ import annotations

from memfit.base_formats import base_formats
from memfit.base_formats.shared.plain import Plain

base_formats.register("fp32")(Plain("fp32", 32, "float32"))
