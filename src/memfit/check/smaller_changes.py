"""The smallest changes to files, in their tools' own keys, with which the training fits.

A change is an edit of keys, which the tool's own reader reads: what a key means to memory is
declared once. Changes that leave what is learned alone come first, then those that round otherwise,
then those that train something else.
"""

from __future__ import annotations

import difflib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import read_text
from memfit.records import Record
from memfit.records.results import Plan
from memfit.workflows.load_inputs import put

KEEPS = SAME, ROUNDED, OTHER = (
    "the same training", "the same, rounded otherwise", "another training",
)  # fmt: skip
MOST = 3  # changes shown
OF_CUT = {"adamw_8bit": "adamw_torch_8bit"}  # torchao's
NUMBER = "\ue000"  # around what is written as it was, such as 5e8; a character of no meaning
MOST_ROWS = 2**10  # of a micro-batch that is proposed, or its count of pieces


class Edit(NamedTuple):
    """Keys of one file with their new values; dotted where the file nests them."""

    keys: Mapping[str, Any]
    keeps: str = SAME


def of_cut(edits: Sequence[Edit]) -> tuple[Edit, ...]:
    """Edits for weights that FSDP2 cuts, of which bitsandbytes' optimizers take none."""
    return tuple(
        edit._replace(keys={k: OF_CUT.get(v, v) if isinstance(v, str) else v
                            for k, v in edit.keys.items()})
        for edit in edits
    )  # fmt: skip


class Edited(Record, frozen=True, kw_only=True):
    """One key of one file."""

    file: str
    key: str
    before: Any  # None: the file does not say it
    after: Any


class Change(Record, frozen=True, kw_only=True):
    """What to write, and what comes of it."""

    edited: tuple[Edited, ...]
    keeps: str  # one of KEEPS
    needed: int  # bytes, of the device's memory
    relative_time: float | None  # step time over that of the files as they are; None is unknown
    assumed: tuple[str, ...]  # what the files as they are need not be taken to have


@dataclass(frozen=True, eq=False)
class Group:
    """Edits of which one is made at most, the mildest first."""

    file: Path
    source: Mapping[str, Any]  # what the file says
    edits: tuple[Edit, ...]

    @property
    def rank(self) -> int:
        """How much it changes of what is learned."""
        return KEEPS.index(self.edits[0].keeps)


Edits = Mapping[Path, Mapping[str, Any]]
Predict = Callable[[Edits], Plan]


def find_smallest(groups: Sequence[Group], plan: Plan, predict: Predict) -> tuple[Change, ...]:
    """Up to `MOST` changes that fit and keep as much as any does; () where nothing fits.

    groups: what may be changed, of those that keep the same the costliest first; plan: the
    prediction of the files as they are; predict: the prediction of edited files.
    """
    for rank in range(len(KEEPS)):
        milder = [group for group in groups if group.rank < rank]
        own = [group for group in groups if group.rank == rank]
        for size in range(1, len(own) + 1):
            tried = (_relax([*chosen, *milder], predict) for chosen in combinations(own, size))
            found = [_tell(*made, plan) for made in tried if made is not None]
            if found:
                found.sort(key=lambda one: (one.relative_time or 1.0, len(one.edited)))
                return tuple(found[:MOST])
    return ()


Chosen = dict[Group, Edit]


def _relax(groups: Sequence[Group], predict: Predict) -> tuple[Chosen, Plan] | None:
    """One edit of each group: what costs most as mild as it can be, and then without what it can.

    None where not even the strongest edits of all fit.
    """
    chosen, fitting = _find_strongest(groups, predict)
    if fitting is None or not fitting.memory.is_within:
        return None
    for group in sorted(groups, key=lambda group: -group.rank):
        without = {other: edit for other, edit in chosen.items() if other is not group}
        for milder in (without, *({**chosen, group: edit} for edit in group.edits[:-1])):
            plan = _try(milder, predict)
            if plan is not None:
                chosen, fitting = milder, plan
                break
    return chosen, fitting


def _find_strongest(groups: Sequence[Group], predict: Predict) -> tuple[Chosen, Plan | None]:
    """The last edit of each; where the tool cannot have all of them, what it can have of them:
    group by group, the strongest beside those before it."""
    chosen = {group: group.edits[-1] for group in groups}
    plan = _predict(chosen, predict)
    if plan is not None:
        return chosen, plan
    chosen = {}
    for group in groups:
        for edit in reversed(group.edits):
            found = _predict({**chosen, group: edit}, predict)
            if found is not None:
                chosen[group], plan = edit, found
                break
    return chosen, plan


def _predict(chosen: Chosen, predict: Predict) -> Plan | None:
    """None of an edit that the tool or the model cannot have."""
    edits: dict[Path, dict[str, Any]] = {}
    for group, edit in chosen.items():
        edits.setdefault(group.file, {}).update(edit.keys)
    try:
        return predict(edits)
    except InvalidRequest:
        return None


def _try(chosen: Chosen, predict: Predict) -> Plan | None:
    """The prediction where it fits."""
    plan = _predict(chosen, predict)
    return plan if plan is not None and plan.memory.is_within else None


def _tell(
    chosen: Chosen,
    fitting: Plan,
    plan: Plan,
) -> Change:
    edited = tuple(
        Edited(file=str(group.file), key=key, before=find(group.source, key), after=value)
        for group, edit in chosen.items()
        for key, value in edit.keys.items()
        if find(group.source, key) != value
    )
    before, after = plan.time.step_seconds, fitting.time.step_seconds
    return Change(
        edited=edited,
        keeps=KEEPS[max(group.rank for group in chosen)],
        needed=fitting.memory.needed or 0,
        relative_time=after / before if before and after else None,
        assumed=tuple(one for one in fitting.assumptions if one not in plan.assumptions),
    )


def find(data: Mapping[str, Any], key: str) -> Any:
    """A dotted key of nested mappings, or one that is flat; None where it is not set."""
    if key in data:
        return data[key]
    first, dot, rest = key.partition(".")
    inner = data.get(first)
    return find(inner, rest) if dot and isinstance(inner, Mapping) else None


def smaller(rows: int) -> list[int]:
    """Return the micro-batches that divide one of `rows` rows, the largest first."""
    small = [n for n in range(1, min(rows, MOST_ROWS)) if rows % n == 0]
    return sorted({n for one in small for n in (one, rows // one) if n < rows}, reverse=True)


def split(
    data: Mapping[str, Any],
    micro: str,
    default: int,
    accumulation: str = "gradient_accumulation_steps",
) -> list[Edit]:
    """The same global batch of smaller micro-batches: their key, and that of how many there are."""
    rows, times = data.get(micro, default), data.get(accumulation, 1)
    if not isinstance(rows, int) or not isinstance(times, int):
        return []  # `auto`: another file says it
    return [Edit({micro: n, accumulation: times * rows // n}) for n in smaller(rows)]


def zero(stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration of a stage, whose other values are the trainer's."""
    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {
        "zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"},
        **dict.fromkeys(sizes, "auto"),
    }  # fmt: skip


def shorter(data: Mapping[str, Any], key: str, default: int | None = None) -> list[Edit]:
    """Half as long rows, and half of those, down to 512 tokens."""
    length, found = data.get(key, default), []
    while isinstance(length, int) and length >= 1024:
        length //= 2
        found.append(Edit({key: length}, OTHER))
    return found


def make_patch(change: Change) -> str:
    """The change as a unified diff of the files, for `patch -p0`; comments stay.

    Raises InvalidRequest for Python and TOML, whose keys the user changes.
    """
    files = dict.fromkeys(one.file for one in change.edited)
    return "".join(
        _diff(Path(file), {one.key: one.after for one in change.edited if one.file == file})
        for file in files
    )


def _diff(file: Path, keys: Mapping[str, Any]) -> str:
    writers = {".yaml": _write_yaml, ".yml": _write_yaml, ".json": _write_json}
    if file.suffix not in writers:
        listed = ", ".join(f"{key} = {value}" for key, value in keys.items())
        raise InvalidRequest(
            f"no patch is made of `{file}`: patches are made of YAML and JSON",
            hint=f"without --patch, the keys to change are listed: {listed}",
        )
    text = read_text(file)
    before, after = text.splitlines(), writers[file.suffix](text, keys).splitlines()
    lines = difflib.unified_diff(before, after, str(file), str(file), lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _write_yaml(text: str, keys: Mapping[str, Any]) -> str:
    from ruamel.yaml import YAML
    from ruamel.yaml.util import load_yaml_guess_indent

    _, indent, offset = load_yaml_guess_indent(text)
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 4096
    yaml.indent(sequence=indent or 2, offset=offset or 0)
    data = yaml.load(text)
    for key, value in keys.items():
        put(data, key, value)
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


def _write_json(text: str, keys: Mapping[str, Any]) -> str:
    data = json.loads(text, parse_float=lambda number: f"{NUMBER}{number}{NUMBER}")
    for key, value in keys.items():
        put(data, key, value)
    second = text.partition("\n")[2]
    made = json.dumps(data, indent=len(second) - len(second.lstrip(" ")) or 2, ensure_ascii=False)
    return re.sub(f'"{NUMBER}(.*?){NUMBER}"', r"\1", made) + "\n"
