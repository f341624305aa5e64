"""A file's keys, each of one class: described, moving no memory, or not described.

A reader takes the keys that it describes. Beside them it declares the keys that move no memory,
with the reason, and those that do something to memory that is not described, with what they leave
of a prediction. A key of no declaration may do anything: it is one of those, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from memfit.core.errors import InvalidRequest
from memfit.records import Record

# what a step holds at least beside a key that is not described: all that is predicted; the weights
# with their gradients and the optimizer's states; the weights; those of the blocks; nothing known
Least = Literal["step", "states", "weights", "blocks", "nothing"]
LEVELS: tuple[Least, ...] = ("step", "states", "weights", "blocks", "nothing")
T = TypeVar("T")
ALIKE = 0.84  # of difflib's ratio: one letter of nine, such as `lora_alfa`
NOT_DESCRIBED = "what it does to memory is not described"


class Undescribed(Record, frozen=True, kw_only=True):
    """A key whose bytes are not in the prediction."""

    file: str
    key: str  # dotted where the file nests it
    value: Any
    least: Least
    why: str
    near: str = ""  # a key that is described and may have been meant

    @property
    def setting(self) -> str:
        """The key with its value, as one would write it."""
        value = str(self.value).lower() if isinstance(self.value, bool) else str(self.value)
        return f"{self.key}: {value if len(value) <= 60 else value[:57] + '...'}"


class Evaluated(Record, frozen=True, kw_only=True):
    """An evaluation that a file asks for between steps: its rows at once, and their key."""

    file: str
    key: str
    rows: int


class Effect(NamedTuple):
    """What a key that is not described leaves of a prediction, if its value asks for anything."""

    least: Least
    why: str
    off: tuple[Any, ...] = ()  # values that ask for nothing, beside those that are empty or false

    def asks(self, value: Any) -> bool:
        """Whether the value asks for anything; a key whose `off` holds True is on by itself."""
        if any(one is True for one in self.off):
            return value not in self.off
        return not asks_nothing(value) and value not in self.off


UNKNOWN = Effect("step", "memfit knows no such key of the tool's")


def asks_nothing(value: Any) -> bool:
    """Whether a value is empty or false, or a section that is switched off: by its own `enabled`,
    that of the parts that it shares (compression's `shared_parameters`), or those of its parts."""
    if not isinstance(value, dict):
        return not value
    if "enabled" in value:
        return value["enabled"] is False
    if "shared_parameters" in value:
        return asks_nothing(value["shared_parameters"])
    parts = list(value.values())
    return all(isinstance(part, dict) and asks_nothing(part) for part in parts)


def still(groups: Mapping[str, str]) -> dict[str, str]:
    """Key -> why it moves no memory, of reasons with their keys, which stand in one text each."""
    return {key: why for why, keys in groups.items() for key in keys.split()}


def effects(
    groups: Mapping[tuple[Least, str], str], off: Mapping[str, tuple[Any, ...]] | None = None
) -> dict[str, Effect]:
    """Key -> its effect, of effects with their keys; off: values of a key that ask for nothing."""
    values = off or {}
    return {
        key: Effect(least, why, values.get(key, ()))
        for (least, why), keys in groups.items()
        for key in keys.split()
    }


def find_declared(declared: Mapping[str, T], key: str) -> tuple[int, T | None]:
    """How many words of a dotted key are declared, at most, and what is declared of them."""
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        if (found := declared.get(".".join(parts[:length]))) is not None:
            return length, found
    return 0, None


def leaves(data: Mapping[str, Any], within: str = "", deep: int = 9) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values, of keys within keys too, `deep` times."""
    for name, value in data.items():
        if isinstance(value, dict) and value and deep:
            yield from leaves(value, f"{within}{name}.", deep - 1)
        else:
            yield f"{within}{name}", value


class ConfigKeys:
    """A file's keys, each taken once; what is left was not looked at.

    within: the dotted keys that lead to these, with a dot behind; "" of a file's own.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        file: Path,
        within: str = "",
        undescribed: list[Undescribed] | None = None,
    ) -> None:
        self.data = {str(key): value for key, value in data.items()}
        self.whole = frozenset(self.data)
        self.file, self.within = file, within
        self.inner: list[ConfigKeys] = []
        self.looked_up: dict[str, None] = {}  # keys that were looked for, set or not
        self.undescribed = [] if undescribed is None else undescribed

    def __call__(self, key: str, default: Any = None, kind: Any = None) -> Any:
        """The value of a key, which is looked at now; `auto` and null take the default.

        kind: its type, by default that of `default`; raises InvalidRequest where it is another.
        """
        self.looked_up[key] = None
        value = self.data.pop(key, None)
        if value is None or value == "auto":
            return default
        if kind is None:
            kind = Any if default is None else type(default)
        try:
            return msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"`{key}: {value}` in `{self.file}`: {error}") from None

    def inside(self, key: str) -> ConfigKeys:
        """The keys within a key, each taken once, too."""
        made = ConfigKeys(self(key, {}), self.file, f"{self.within}{key}.", self.undescribed)
        self.inner.append(made)
        return made

    def drop(self, keys: Iterable[str]) -> None:
        """Take keys that ask for nothing beside the others."""
        for key in keys:
            self(key)

    def leave(self, key: str, value: Any, why: str = NOT_DESCRIBED, least: Least = "step") -> None:
        """Note a key whose value is not described; least: what it leaves of the prediction."""
        self.undescribed.append(
            Undescribed(
                file=self.file.name, key=f"{self.within}{key}", value=value, least=least, why=why
            )
        )

    def leave_unless(
        self, key: str, allowed: tuple[Any, ...], why: str = NOT_DESCRIBED, least: Least = "step"
    ) -> None:
        """Take a key, and note it where its value is none of those whose bytes are described."""
        value = self(key)
        if value is not None and value not in allowed:
            self.leave(key, value, why, least)

    def settle(self, unmoved: Mapping[str, str], moved: Mapping[str, Effect]) -> None:
        """Give each key that was not looked at its class, and note those that are not described."""
        near = dict(self._misspelt((*unmoved, *moved)))
        for key, value in self.data.items():
            dotted = f"{self.within}{key}"
            if isinstance(value, dict) and any(
                one.startswith(f"{dotted}.") for one in (*unmoved, *moved)
            ):
                inner = ConfigKeys(value, self.file, f"{dotted}.", self.undescribed)
                inner.settle(unmoved, moved)
                continue
            (quiet, _), (length, found) = (
                find_declared(unmoved, dotted),
                find_declared(moved, dotted),
            )
            if value is None or quiet > length or (quiet and quiet == length):
                continue
            if found is not None and not found.asks(value):
                continue
            effect = found or UNKNOWN
            self.leave(key, value, effect.why, effect.least)
            if found is None and key in near:
                last = self.undescribed[-1]
                self.undescribed[-1] = msgspec.structs.replace(last, near=near[key])
        for made in self.inner:
            made.settle(unmoved, moved)

    def _misspelt(self, declared: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Keys that were not looked at, each with a known one that is alike and is not set."""
        inner = [key.removeprefix(self.within) for key in declared if key.startswith(self.within)]
        wanted = [key for key in (*self.looked_up, *inner) if key not in self.whole]
        for key in self.data:
            for other in get_close_matches(key, wanted, n=1, cutoff=ALIKE):
                yield key, other
