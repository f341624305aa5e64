"""Every question that reads: a name, and what of the query it takes. Answers are JSON as bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from memfit import __version__, api
from memfit.core.errors import InvalidRequest
from memfit.core.wording import COLOURS, INKS, PHASES, VERDICTS
from memfit.objectives import find_objective
from memfit.records.other_words import TASKS
from memfit.records.results import Plan
from memfit.ui.asking import Pairs, read_changes, read_query
from memfit.ui.turn import Turn

CACHED = 512  # answers; a plan is about 30 kB
DRAFTS = 8  # as objects, of which other answers are made
# fewer wait than the server has threads, so that what needs no planner is answered meanwhile
planning = Turn(seconds=60, most=16)
Query = Mapping[str, str]


def encode(record: object) -> bytes:
    """JSON as the command line's `--json`, without its indentation."""
    return msgspec.json.encode(record)


class Words(msgspec.Struct, frozen=True):
    """What the page calls things, so that it says what the terminal says."""

    version: str
    verdicts: dict[str, str]
    phases: dict[str, str]
    colours: dict[str, str]
    inks: dict[str, str]
    families: list[str]
    targets: list[str]
    frameworks: list[str]
    objectives: dict[str, str]  # and what is learned by it


@lru_cache(maxsize=1)
def words() -> bytes:
    """`words`: names and colours, and what can be chosen."""
    return encode(
        Words(
            version=__version__, verdicts=VERDICTS, phases=PHASES, colours=COLOURS, inks=INKS,
            families=api.supported_families(), targets=api.export_targets(),
            frameworks=api.supported_frameworks(),
            objectives={name: find_objective(name).about for name in TASKS},
        )
    )  # fmt: skip


@lru_cache(maxsize=1)
def models() -> bytes:
    """`memfit models --json`."""
    return encode(api.models())


@lru_cache(maxsize=1)
def devices() -> bytes:
    """`memfit devices --json`."""
    return encode(api.devices())


@lru_cache(maxsize=CACHED)
def plan(pairs: Pairs) -> bytes:
    """`memfit plan --json`."""
    with planning.taken():
        return encode(api.plan(read_query(pairs)))


@lru_cache(maxsize=CACHED)
def draft(pairs: Pairs) -> bytes:
    """The same without its levers, which take most of the time: what is shown while one drags."""
    return encode(_draft(pairs))


@lru_cache(maxsize=DRAFTS)
def _draft(pairs: Pairs) -> Plan:
    with planning.taken():
        return api.plan(read_query(pairs), levers=False)


@lru_cache(maxsize=CACHED)
def pipeline(pairs: Pairs) -> bytes:
    """The pipeline of the plan, as `memfit predict --timeline` draws it; null without one."""
    made = _draft(pairs)
    with planning.taken():
        return encode(api.draw_pipeline(made))


@lru_cache(maxsize=CACHED)
def why_not(pairs: Pairs) -> bytes:
    """`memfit plan --why-not KEY=VALUE`; the keys are those that begin with `why_not.`."""
    stated = tuple((key, text) for key, text in pairs if not key.startswith("why_not."))
    changed = (
        (key.removeprefix("why_not."), text) for key, text in pairs if (key, text) not in stated
    )
    changes = read_changes(changed)
    if not changes:
        raise InvalidRequest("nothing is asked about", hint="set a key: `why_not.micro_batch=8`")
    with planning.taken():
        return encode(api.why_not(read_query(stated), changes))


@lru_cache(maxsize=CACHED)
def compare(pairs: Pairs) -> bytes:
    """`memfit plan --devices A:8,B:64 --objective fastest`."""
    query = dict(pairs)
    offers, objective = query.pop("devices", ""), query.pop("objective", "") or "fastest"
    with planning.taken():
        return encode(api.compare(read_query(tuple(query.items())), offers, objective))


@lru_cache(maxsize=CACHED)
def export(pairs: Pairs) -> bytes:
    """`memfit export MODEL --to TARGET --json`."""
    query = dict(pairs)
    target = query.pop("to", "")
    made = _draft(tuple(query.items()))
    with planning.taken():
        return encode(api.export(made, target))


@lru_cache(maxsize=CACHED)
def budget(pairs: Pairs) -> bytes:
    """`memfit budget --json`: texts with units."""
    known: dict[str, Any] = {key: text for key, text in pairs if text}
    for name in known:
        if name not in BUDGET:
            raise InvalidRequest(f"`{name}` is no figure of a budget", hint=f"one of {NAMES}")
    for name, read in (("mfu", float), ("context", int), ("sequences", int)):
        if name in known:
            known[name] = _number(name, known[name], read)
    return encode(api.budget(**known))


BUDGET = (
    "parameters", "tokens", "compute", "device_hours", "devices", "time", "cost", "device",
    "dtype", "peak", "price", "mfu", "inference_memory", "context", "sequences",
)  # fmt: skip
NAMES = ", ".join(BUDGET)


def _number(name: str, text: str, read: Callable[[str], float]) -> float:
    try:
        return read(text)
    except ValueError:
        raise InvalidRequest(f"`{name}: {text}` is not a number") from None


QUERIES: dict[str, Callable[[Pairs], bytes]] = {
    "plan": plan, "draft": draft, "why_not": why_not, "compare": compare, "export": export,
    "budget": budget, "pipeline": pipeline,
}  # fmt: skip
CONSTANTS: dict[str, Callable[[], bytes]] = {"words": words, "models": models, "devices": devices}


def list_runs(root: Path) -> bytes:
    """Every run folder below `root`."""
    return encode(api.list_runs(root))


def read_run(root: Path, name: str, after: int) -> bytes:
    """A run's report, and the steps of its log after one."""
    return encode(api.read_run(root, name, after))
