"""Words and colours that the terminal and the page share, so that both say the same."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from memfit.core import units

VERDICTS = {
    "fits": "FITS",
    "at_risk": "TIGHT",
    "does_not_fit": "DOES NOT FIT",
    "unproven": "UNPROVEN",
}
PHASES = {
    "load": "load the model",
    "prefill": "read the prompts",
    "decode": "sample answers",
    "reward": "reward the answers",
    "score": "score the answers",
    "reference": "score by the reference",
    "values": "value the answers",
    "first_step": "first step",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "accumulate": "further micro-batches",
    "optimizer_step": "optimizer step",
    "evaluate": "evaluate",
    "save": "save",
    "generate": "generate, after the run",
}
# The Okabe-Ito palette, which colour-blind readers can tell apart; texts label every use anyway.
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer_state": "#009E73",
    "kv_cache": "#A18CFF",
    "activations": "#CC79A7",
    "logits": "#D55E00",
    "temporary": "#56B4E9",
    "all_gather": "#F0E442",
    "reduce_scatter": "#B8AE20",
    "input": "#8A8A8A",
    "workspace": "#A87132",
    "fragmentation": "#B0B0B0",
    "context": "#707070",
}
# what is written on a kind's colour: white on the dark ones, 4.5 to 1 or better on all (WCAG 1.4.3)
INKS = {kind: "#fff" if kind in ("parameters", "context") else "#111" for kind in COLOURS}
# texts that YAML reads as something else: numbers, words of its own, what has signs with a meaning
NOT_PLAIN = re.compile(
    r"^(true|false|null|~|[-+.]?[0-9][0-9_.eE+-]*|[-+]?\.(inf|nan))$|^[-?:,\[\]{}#&*!|>'\"%@`\s]"
    r"|[,\[\]{}\x00-\x1f\x7f-\x9f\u2028\u2029]|: | #|[:\s]$",
    re.IGNORECASE,
)
FAR = 9.0  # from ten times on, per cent say less


def show_value(value: float | None, unit: str) -> str:
    """A figure with its unit; `-` where the source states none."""
    if value is None:
        return "-"
    if unit in ("bytes", "B"):
        return units.show_bytes(value)
    if unit == "s":
        return units.show_seconds(value)
    if unit == "fraction of peak":
        return f"{value:.1%}"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def show_error(error: float | None) -> str:
    """A signed share; `0` is exact equality, `-` nothing to compare, `12x` far too much, and what
    would round to nothing has no sign."""
    if error is None:
        return "-"
    if error == 0:
        return "0"
    if error >= FAR:
        return f"{1 + error:.3g}x"
    return f"{error:+.2%}" if abs(error) >= 1e-4 else "<0.01%"


def short_name(name: str) -> str:
    """`memory.phase.backward` -> `backward`, in words where there are some."""
    *_, last = parts = name.split(".")
    return f"rank {last}" if "rank" in parts else PHASES.get(last, last)


def as_yaml(value: Any) -> str:
    """A value in YAML's flow style, as `--set` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {as_yaml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_yaml, value)) + "]"
    if isinstance(value, str) and (not value or NOT_PLAIN.search(value)):
        return json.dumps(value)
    return str(value)


def set_words(changes: Mapping[str, Any]) -> list[str]:
    """Changes of a request as values of `--set`, quoted for a shell."""
    return [shlex.quote(f"{key}={as_yaml(value)}") for key, value in changes.items()]
