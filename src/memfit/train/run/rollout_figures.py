"""What run.json says of a run that samples answers, from the lines of its log."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from msgspec.structs import replace

from memfit.records.results import Answer, Measurement

Rows = Sequence[dict[str, Any]]
LATE = 10  # the last reward is a mean over a tenth of the run, and this many steps at most
SHOWN = 300  # characters of a prompt and of an answer
PHASES = ("rollout", "reward", "score", "update")
MEANS = {  # figures of the last steps: unit, and what they are of
    "sampled_reward": ("reward", "of all sampled answers, those of groups left out included"),
    "length": ("tokens", "of an answer"),
    "truncated": ("of answers", "that reached their limit"),
    "unjudged": ("of answers", "without a reward"),
    "even_groups": ("of groups", "whose answers have all the same reward"),
    "kl": ("nats/token", "from the reference"),
    "entropy": ("nats/token", "of the policy, when updated"),
    "clipped_low": ("of ratios", "below the lower bound"),
    "clipped_high": ("of ratios", "above the upper bound"),
    "value_loss": ("", "half of the values' squared error, clipped"),
    "clipped_values": ("of values", "further from the rollout's than the bound"),
}


def measure_rollouts(rows: Rows, plain: Rows) -> dict[str, Measurement]:
    """Rewards, answers and each phase's seconds; nothing where no answers were sampled.

    plain: the lines of steps whose tensors nobody counted.
    """
    if not rows or "rollout_seconds" not in rows[-1]:
        return {}
    late = rows[-min(LATE, -(-len(rows) // LATE)) :]
    found: dict[str, Measurement] = {}
    for name, some, counter in (
        ("first", rows[:1], "the first rollout's answers"),
        ("final", late, f"answers of the last {len(late)} rollouts"),
    ):
        if known := [r["reward"] for r in some if r.get("reward") is not None]:
            found[f"reward.{name}"] = _measured(mean(known), "reward", counter, len(known))
    for name, (unit, what) in MEANS.items():
        if known := [r[name] for r in late if r.get(name) is not None]:
            counter = f"{what}; mean of the last {len(known)} rollouts"
            found[f"rollout.{name}"] = _measured(mean(known), unit, counter, len(known))
    found |= _measure_held_out(rows)
    for phase in PHASES:
        seconds = [r[f"{phase}_seconds"] for r in plain]
        counter = f"perf_counter; median of {len(seconds)} unwatched steps"
        found[f"seconds.{phase}"] = _measured(median(seconds), "s", counter, len(seconds))
    for phase in ("rollout", "update"):
        rates = [r[f"{phase}_tokens_per_second"] for r in plain]
        counter = "sampled tokens" if phase == "rollout" else "tokens of prompts and answers"
        found[f"rate.{phase}"] = _measured(median(rates), "tokens/s", counter, len(rates))
    failures = sum(sum(r["reward_failures"].values()) for r in rows)
    if failures:
        counter = "answers that a reward function failed on, of all steps"
        found["reward.failures"] = _measured(float(failures), "answers", counter)
    return found


def _measure_held_out(rows: Rows) -> dict[str, Measurement]:
    """The mean reward of held-out prompts at the first and at the last evaluation."""
    evaluated = [r for r in rows if r.get("evaluation_reward") is not None]
    found = {}
    for name, row in zip(("first_evaluation", "evaluation"), evaluated[:1] + evaluated[-1:],
                         strict=False):  # fmt: skip
        count, error = row["evaluation_prompts"], row["evaluation_reward_error"]
        judged = round(count * (1 - row["evaluation_unjudged"]))
        beside = "" if error is None else f", standard error {error:.2g}"
        counter = f"greedy answers to {count} held-out prompts, step {row['step']}{beside}"
        measured = _measured(row["evaluation_reward"], "reward", counter, judged)
        found[f"reward.{name}"] = replace(measured, spread=error or 0.0)
    return found


def curve_of(rows: Rows, name: str) -> tuple[tuple[int, float], ...]:
    """(step, figure) of the lines that have one."""
    return tuple((r["step"], r[name]) for r in rows if r.get(name) is not None)


def show_answers(rows: Rows) -> tuple[Answer, ...]:
    """Those that the log has of the first time that answers were sampled, and of the last one."""
    having = [row for row in rows if row.get("samples")]
    some = [having[0], having[-1]] if len(having) > 1 else having
    return tuple(
        Answer(
            step=row["step"], prompt=_text_of(sample["prompt"]),
            completion=_cut(sample["completion"]), reward=sample["reward"],
        )
        for row in some
        for sample in row.get("samples", ())
    )  # fmt: skip


def _text_of(prompt: object) -> str:
    """A prompt's text; of messages, the last one's."""
    if isinstance(prompt, list) and prompt:
        return _cut(str(prompt[-1].get("content", "")))
    return _cut(str(prompt))


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def _measured(value: float, unit: str, counter: str, n: int = 1) -> Measurement:
    return Measurement(value=value, unit=unit, counter=counter, n=n)
