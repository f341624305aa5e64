"""Settings of the CUDA caching allocator, read from the syntax of `PYTORCH_ALLOC_CONF`.

Names, limits and meanings are those of torch 2.13 (`c10/core/AllocatorConfig.h`; its parser is the
tests' oracle). What torch takes and the replay does not know is refused: a recipe determines every
byte. Free of torch, so that a plan can refuse a bad value.
"""

from __future__ import annotations

import re

from memfit.allocator.heap import keeps_freed
from memfit.core.errors import InvalidRequest, UnknownName, did_you_mean
from memfit.core.units import GIB, MIB
from memfit.records import Record
from memfit.records.hardware import Device

UNLIMITED = 2**62
LARGE_SEGMENT = 20 * MIB
MIN_LARGE_ALLOCATION = 10 * MIB  # from here on a segment is made for one request
INTERVALS = 16  # of sizes with their own rounding: [1, 2) MiB, [2, 4) MiB, ..., 32 GiB and more
KEYS = (
    "backend", "expandable_segments", "garbage_collection_threshold", "large_segment_size_mb",
    "max_non_split_rounding_mb", "max_split_size_mb", "per_process_memory_fraction",
    "roundup_power2_divisions",
)  # fmt: skip
SHARE = re.compile(r"[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?")
ITEM = re.compile(r"([^:,\[\]]*):(\[[^\]]*\]|[^:,\[\]]*)(?:,|$)")


class Settings(Record, frozen=True, kw_only=True):
    """What `PYTORCH_ALLOC_CONF` can change, and the memory there is; torch's defaults."""

    capacity: int | None = None  # bytes the driver would hand out; None never refuses
    device_memory: int = 80 * GIB  # what fractions are of; a range of addresses is 1 1/8 of it
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = ()  # of each interval; empty is 0 everywhere
    garbage_collection_threshold: float = 0.0  # of what is allowed; 0 is off
    memory_fraction: float = 1.0  # of the device, that torch allows itself; 1 allows everything

    @property
    def allowed(self) -> int | None:
        """Bytes beyond which torch does not ask the driver; None without a fraction below 1."""
        return int(self.memory_fraction * self.device_memory) if self.memory_fraction < 1 else None

    @property
    def text(self) -> str:
        """What differs from the defaults, in the syntax of `PYTORCH_ALLOC_CONF`."""
        plain = Settings()
        items = {
            "expandable_segments": str(self.expandable_segments),
            "garbage_collection_threshold": str(self.garbage_collection_threshold),
            "large_segment_size_mb": str(self.large_segment_size // MIB),
            "max_non_split_rounding_mb": str(self.max_non_split_rounding // MIB),
            "max_split_size_mb": str(self.max_split_size // MIB),
            "per_process_memory_fraction": str(self.memory_fraction),
            "roundup_power2_divisions": _show_divisions(self.roundup_power2_divisions),
        }
        same = {
            "expandable_segments": self.expandable_segments == plain.expandable_segments,
            "garbage_collection_threshold": self.garbage_collection_threshold == 0,
            "large_segment_size_mb": self.large_segment_size == LARGE_SEGMENT,
            "max_non_split_rounding_mb": self.max_non_split_rounding == self.large_segment_size,
            "max_split_size_mb": self.max_split_size == UNLIMITED,
            "per_process_memory_fraction": self.memory_fraction == 1,
            "roundup_power2_divisions": not any(self.roundup_power2_divisions),
        }
        return ",".join(f"{key}:{value}" for key, value in items.items() if not same[key])


def read_settings(
    text: str, *, device_memory: int = 80 * GIB, capacity: int | None = None
) -> Settings:
    """Settings from text such as `expandable_segments:True,max_split_size_mb:128`.

    device_memory, capacity: bytes, as in `Settings`. Raises InvalidRequest, and UnknownName for a
    key that memfit does not replay.
    """
    items = _split(text)
    backend = items.pop("backend", "native")
    if backend != "native":
        raise InvalidRequest(
            f"`allocator` asks for `backend:{backend}`, and memfit replays `native` only",
            hint="leave `backend` out",
        )
    large = LARGE_SEGMENT
    if "large_segment_size_mb" in items:
        large = _mib(items, "large_segment_size_mb", MIN_LARGE_ALLOCATION // MIB + 1)
    least = large // MIB  # torch: nothing smaller than a segment is "large"
    unlimited = UNLIMITED // MIB
    return Settings(
        capacity=capacity,
        device_memory=device_memory,
        expandable_segments=_flag(items, "expandable_segments"),
        large_segment_size=large,
        max_split_size=_mib(items, "max_split_size_mb", least, unlimited),
        max_non_split_rounding=_mib(items, "max_non_split_rounding_mb", least, least),
        roundup_power2_divisions=_divisions(items.get("roundup_power2_divisions", "")),
        garbage_collection_threshold=_share(items, "garbage_collection_threshold", 0.0),
        memory_fraction=_share(items, "per_process_memory_fraction", 1.0),
    )


def check_allocator(text: str, device: Device) -> None:
    """Raise InvalidRequest when a recipe for this device cannot have these settings."""
    if device.is_cpu:
        keeps_freed(text)
    else:
        read_settings(text)


def _split(text: str) -> dict[str, str]:
    """Keys and values. White space means nothing, as in torch."""
    rest = "".join(text.split())
    items: dict[str, str] = {}
    at = 0
    while at < len(rest):
        item = ITEM.match(rest, at)
        if item is None or not item[2] or rest.endswith(","):
            raise InvalidRequest(
                f"`allocator` is `{text}`: not `key:value` pairs with commas between",
                hint="such as `expandable_segments:True,max_split_size_mb:128`",
            )
        key, value = item.groups()
        if key not in KEYS:
            known = f"known: {', '.join(KEYS)}"
            raise UnknownName("setting of the allocator", key, KEYS, see=known)
        if key in items:
            raise InvalidRequest(f"`allocator` gives `{key}` twice: `{items[key]}` and `{value}`")
        items[key] = value
        at = item.end()
    return items


def _flag(items: dict[str, str], key: str) -> bool:
    value = items.get(key, "False")
    if value not in ("True", "False"):
        raise InvalidRequest(
            f"`allocator` gives `{key}` the value `{value}`: it is `True` or `False`",
            hint=f"did you mean {did_you_mean(value, ('True', 'False')) or '`True`'}?",
        )
    return value == "True"


def _mib(items: dict[str, str], key: str, least: int, default: int = 0) -> int:
    """Bytes of a whole number of MiB."""
    value = items.get(key)
    if value is None:
        return default * MIB
    if not _is_whole(value) or not least <= int(value) <= UNLIMITED // MIB:
        raise InvalidRequest(
            f"`allocator` gives `{key}` the value `{value}`: it is a whole number of MiB, and at"
            f" least {least}"
        )
    return int(value) * MIB


def _is_whole(value: str) -> bool:
    return value.isascii() and value.isdecimal() and len(value) < 20


def _share(items: dict[str, str], key: str, default: float) -> float:
    value = items.get(key)
    if value is None:
        return default
    whole = default == 1.0  # all of the memory is a fraction of it, a threshold of 1 is none
    share = float(value) if SHARE.fullmatch(value) else -1.0
    if not (0 < share < 1 or (whole and share == 1)):
        raise InvalidRequest(
            f"`allocator` gives `{key}` the value `{value}`: it is above 0 and"
            f" {'at most' if whole else 'below'} 1"
        )
    return share


def _divisions(value: str) -> tuple[int, ...]:
    """Divisions of each interval of sizes: one number for all, or `[256:1,512:2,>:8]`.

    A listed size (MiB) sets its own interval; the first one also all below it; `>` all above the
    last one. What no entry names is not divided.
    """
    if not value:
        return ()
    if not value.startswith("["):
        return (_power_of_two(value, "divisions"),) * INTERVALS
    found = [0] * INTERVALS
    first, last = True, 0
    for pair in value[1:-1].split(","):
        size, _, number = pair.partition(":")
        divisions = 0 if number == "0" else _power_of_two(number, "divisions")
        if size == ">":
            found[last + 1 :] = [divisions] * (INTERVALS - last - 1)
            continue
        last = min(_power_of_two(size, "sizes in MiB").bit_length() - 1, INTERVALS - 1)
        if first:
            found[:last] = [divisions] * last
        found[last], first = divisions, False
    return tuple(found) if any(found) else ()


def _power_of_two(value: str, what: str) -> int:
    number = int(value) if _is_whole(value) else 0
    if number < 1 or number & (number - 1):
        raise InvalidRequest(
            f"`allocator` gives `roundup_power2_divisions` {what} of `{value}`: a power of two",
            hint="such as `roundup_power2_divisions:4` or `[256:1,512:2,>:8]`",
        )
    return number


def _show_divisions(divisions: tuple[int, ...]) -> str:
    if len(set(divisions)) == 1 and any(divisions):
        return str(divisions[0])
    return "[" + ",".join(f"{2**i}:{n}" for i, n in enumerate(divisions)) + "]"
