"""The peak of an optimizer's loop over parameters, measured on a meter.

An update written with the local variables of torch's code holds what torch's holds: until the
next parameter's update rebinds a name, it holds the last parameter's tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memfit.meta.meter import Meter
from memfit.optimizers import Counted


def highest(meter: Meter) -> int:
    """Bytes at the worst moment of what was logged."""
    live = top = 0
    for event in meter.events:
        live += meter.held(event) if event >= 0 else -meter.held(~event)
        top = max(top, live)
    return top


def rise_of(run: Callable[[Meter], None], counted: Counted) -> int:
    """The worst moment of what runs on a meter, counted so; its scalars are on the device."""
    meter = Meter(cuda=counted == "blocks")
    run(meter)
    return highest(meter)


def bytes_made(runs: Iterable[Callable[[Meter], None]]) -> int:
    """Bytes of all tensors that come and go."""
    meter = Meter()
    for run in runs:
        run(meter)
    return sum(meter.requested)
