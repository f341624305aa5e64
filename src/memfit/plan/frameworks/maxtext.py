"""MaxText: JAX's step, compiled whole by XLA, with weights cut over the data ranks; its time alone.

Read from NVIDIA/JAX-Toolbox (docs/frameworks/maxtext) and MaxText's `remat_policy`: of a block,
`minimal_flash` saves the results of products and attention and recomputes the rest.
"""

from __future__ import annotations

from typing import ClassVar, final

from memfit.plan.frameworks import Framework, Knob, frameworks
from memfit.plan.frameworks.shared.plain import UNPUBLISHED, plain_values


@final
class MaxText(Framework):
    """`MaxText/train.py`: `recompute: selective` is `remat_policy: minimal_flash`."""

    name = "maxtext"
    title = "MaxText"
    source = "NVIDIA/JAX-Toolbox (docs/frameworks/maxtext/README.md)"
    memory_unknown = UNPUBLISHED
    values: ClassVar = plain_values(
        recompute=("selective", "full", "none"), attention=("cudnn",), compile=("model",)
    )
    axes = ("dp_shard", "tp")
    knobs: ClassVar = {
        "version": Knob(default=202407, means="year and month of the code, such as 202407"),
    }


frameworks.register("maxtext")(MaxText())
