"""torchtitan's memory for many recipes at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from memfit.plan.frameworks import Job, Peaks
from memfit.plan.frameworks.shared.columns import find_distinct, pick, size_of, take
from memfit.plan.frameworks.shared.slots import Slots, find_peaks
from memfit.plan.frameworks.torchtitan.held import Parts, describe_instants
from memfit.plan.frameworks.torchtitan.stage import (
    Count,
    count_elements,
    count_stage,
    find_stage,
    leave_alike,
    refuse_zero_bubble,
)
from memfit.records.ledger import Phase


def measure(job: Job) -> Peaks:
    """See `Framework.measure`."""
    import numpy

    if numpy.max(job.recipe.parallel.pp) > 1:
        refuse_zero_bubble(job)
    elements = count_elements(job.model)
    slots, kind_of = _count_pipelines(job)

    def describe(rows: Any, last: bool, numbers: dict[str, Any]) -> Mapping[Phase, Parts]:
        some = structs.replace(job, recipe=take(job.recipe, rows))
        return describe_instants(some, elements, Count(last=last, **numbers))

    return find_peaks(slots, kind_of, describe)


def _count_pipelines(job: Job) -> tuple[Slots, Any]:
    """The stages of all kinds of pipeline, and of which kind each candidate is."""
    recipe, p = job.recipe, job.recipe.parallel
    one_of, kind_of = find_distinct([p.pp, p.virtual_pp, recipe.accumulation], size_of(recipe))
    kinds = take(recipe, one_of)
    mesh = kinds.parallel
    firsts, split_of = find_distinct([mesh.pp, mesh.virtual_pp], len(one_of))
    slots = Slots(len(one_of))
    for number, first in enumerate(firsts):
        rows = (split_of == number).nonzero()[0]
        one = structs.replace(pick(kinds, first), accumulation=take(kinds.accumulation, rows))
        own = structs.replace(job, recipe=one)
        stages = leave_alike(find_stage(own, rank) for rank in range(one.parallel.pp))
        place = 1
        for stage in stages:
            slots.put(0 if stage.last else place, rows, count_stage(stage))
            place += not stage.last
    return slots, kind_of
