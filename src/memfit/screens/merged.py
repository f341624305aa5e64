"""What `memfit merge` says."""

from __future__ import annotations

from memfit.core.units import show_bytes
from memfit.records.results import Merged


def describe(made: Merged) -> list[str]:
    """What was written, and what the merge loses."""
    dtypes = ", ".join(made.dtypes)
    lines = [
        f"wrote {made.folder}: {show_bytes(made.nbytes)}, {made.weights} weights merged",
        f"lossy: rounding to {dtypes} loses {made.lost:.2g} of the adapter's change (norms)"
        if made.lost > 0
        else f"{dtypes} holds every merged weight exactly",
    ]
    if made.base_differs is None:
        lines.append("what the adapter was trained on is not known here: no run beside it")
    elif made.base_differs > 0:
        lines.append(
            f"lossy: the base's files differ by {made.base_differs:.2g} (norms) from the weights"
            " that the adapter was trained on"
        )
    return lines
