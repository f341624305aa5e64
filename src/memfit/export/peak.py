"""The predicted peak of an exported plan, in words."""

from __future__ import annotations

from memfit.core import units
from memfit.core.wording import VERDICTS
from memfit.plan.frameworks import find_framework
from memfit.records import Record
from memfit.records.results import Plan


class Peak(Record, frozen=True, kw_only=True):
    """Bytes of the fullest device; None is unknown."""

    framework: str  # whose step was predicted
    peak_allocated: int | None
    device_total: int | None  # with what the allocator and the driver hold beside
    because: str  # whose description it is, or why nothing is known
    usable: int | None = None  # bytes of the device that may be used
    verdict: str = ""  # in words

    @property
    def words(self) -> str:
        """In one line."""
        if self.peak_allocated is None:
            return f"unknown: {self.because}"
        total = ""
        if self.device_total is not None:
            total = f"{units.show_bytes(self.device_total)} of the device"
            if self.usable is not None:
                total += f" ({units.show_bytes(self.usable)} usable)"
            total += ", "
        allocated = units.show_bytes(self.peak_allocated)
        return f"{self.verdict}: {total}{allocated} allocated ({self.because})"


def planned(plan: Plan) -> Peak:
    """The plan's own prediction."""
    name, memory = plan.recipe.framework, plan.memory
    source = "memfit's own step"
    if not plan.recipe.is_own:
        framework = find_framework(name)
        source = f"{framework.title}: {framework.source}"
    return Peak(
        framework=name,
        peak_allocated=memory.peak_allocated,
        device_total=memory.device_total,
        because=source if memory.peak_allocated is not None else memory.because,
        usable=memory.usable,
        verdict=VERDICTS[memory.verdict],
    )
