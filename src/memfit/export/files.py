"""The files of an export: their head, and YAML, JSON and text under it."""

from __future__ import annotations

import json
import re
import textwrap
from io import StringIO
from typing import Any

from memfit.records import Record

WIDTH = 96
# of `optimizer`, what every tool has words for
OPTIMIZER_SAYS = frozenset({
    f"optimizer.{name}"
    for name in (
        "name", "implementation", "learning_rate", "weight_decay", "beta1", "beta2", "eps",
        "momentum", "schedule", "warmup_steps", "warmup_ratio", "floor", "power", "decay_ratio",
        "clip_norm",
    )
})  # fmt: skip
ALL_AXES = frozenset({"dp_replicate", "dp_shard", "tp", "cp", "pp", "virtual_pp", "ep"})


class File(Record, frozen=True, kw_only=True):
    """One file: data that become YAML or JSON by the name's ending, or text as it is."""

    name: str
    data: dict[str, Any] = {}  # noqa: RUF012 (msgspec gives each its own)
    text: str = ""
    first: str = ""  # what has to stand above the head, such as `#!/bin/bash`
    checked: bool = False  # whether `memfit check` is given it; others are found beside it


class Head(Record, frozen=True, kw_only=True):
    """What every file says of itself."""

    tool: str
    memfit: str
    digest: str
    what: str
    peak: str
    left: dict[str, str]
    start: str
    origin: str = ""  # digest of the plan that was exported, where the tool's own differs
    changed: dict[str, str] = {}  # noqa: RUF012
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The head as text, without comment signs."""
        origin = f"; made from plan {self.origin}" if self.origin else ""
        lines = [
            f"For {self.tool}, written by memfit {self.memfit}.",
            f"plan: {self.digest} ({self.what}{origin})",
            f"predicted peak of a device: {self.peak}",
            f"start: {self.start}",
        ]
        lines += [f"needs {need}" for need in self.needs]
        lines += self.notes
        for title, group in (
            ("not as it was asked or planned:", self.changed),
            ("not said here, as there is no key for it:", self.left),
        ):
            lines += [title] * bool(group) + [f"  {key}: {why}" for key, why in group.items()]
        return [part for line in lines for part in _wrapped(in_one_line(line))]

    @property
    def data(self) -> dict[str, Any]:
        """The same for JSON, which has no comments."""
        return {
            "for": self.tool,
            "memfit": self.memfit,
            "plan": self.digest,
            "what": self.what,
            "predicted_peak": self.peak,
            "left_out": self.left,
            "start": self.start,
            "made_from": self.origin,
            "changed": self.changed,
            "needs": list(self.needs),
            "notes": list(self.notes),
        }


def in_one_line(text: str) -> str:
    """Text for a comment: what some reader takes for the end of a line is written as an escape."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def render(file: File, head: Head) -> str:
    """The file's whole content."""
    if file.name.endswith(".json"):
        # a key that no tool reads: DeepSpeed passes over top-level keys that it does not know
        return json.dumps({"memfit": head.data, **file.data}, indent=2) + "\n"
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head.lines)
    if file.data:
        return comment + dump_yaml(file.data)
    return file.first + comment + file.text


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML 1.2 that readers of YAML 1.1 understand alike."""
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import SafeRepresenter

    class Plain(SafeRepresenter):
        """Floats with a point: 1.1 takes `2e-05` for text; texts of both versions quoted."""

    def number(self: Any, value: float) -> Any:
        shown = repr(value)
        if "e" in shown and "." not in shown:
            shown = shown.replace("e", ".0e")
        return self.represent_scalar("tag:yaml.org,2002:float", shown)

    def words(self: Any, value: str) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=_style(value))

    Plain.add_representer(float, number)
    Plain.add_representer(str, words)
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = Plain
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 4096
    stream = StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


def _style(value: str) -> str | None:
    """How a text is written so that every reader has the same back: plain, as lines, or quoted."""
    if PLAIN_TEXT.fullmatch(value) and value.lower() not in NOT_TEXT:
        return None
    lines = value.split("\n")
    if len(lines) > 1 and all(line.isprintable() and line == line.strip() for line in lines):
        return "|"
    return '"'


PLAIN_TEXT = re.compile(r"[A-Za-z_/][\w./@+-]*( [\w./@+-]+)*", re.ASCII)
# what YAML 1.1 or 1.2 reads as something else
NOT_TEXT = ("yes", "no", "on", "off", "y", "n", "true", "false", "null")
