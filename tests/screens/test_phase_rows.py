"""Phases of an iteration on the screens: seconds, ranges, tokens a second."""

import io

import pytest

from memfit import api
from memfit.core.units import show_seconds
from memfit.records import from_data
from memfit.records.request import Request
from memfit.screens.plan import show_plan
from memfit.screens.short import show_short
from memfit.screens.widgets.terminal import Console, cells
from tiny_models import CONFIGS

ASKED = {
    "model": CONFIGS["llama"], "hardware": {"device": "h100-sxm"}, "method": "lora",
    "rollout": {"max_prompt_length": 16, "max_completion_length": 16}, "policy": {"beta": 0.1},
    "task": {"objective": "grpo", "steps": 3}, "reward": {"funcs": ["number"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    return api.plan(from_data(ASKED, Request, source="here"), levers=False)


def text(show, plan, width=80, **keys):
    file = io.StringIO()
    show(Console(file, width=width), plan, commands=["memfit certify x"], **keys)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_why_shows_each_phase_with_its_range_and_rate(plan, width):
    shown = text(show_plan, plan, width)
    assert max(map(cells, shown.splitlines())) <= width
    lines = shown.partition("Phases of an iteration")[2].splitlines()
    for phase in plan.time.phases:
        line = next(found for found in lines if found.startswith(f"  {phase.phase} "))
        if phase.seconds is None:
            assert line.split()[1:4] == ["unknown"] * 3
            continue
        for seconds in (phase.seconds, phase.seconds_low, phase.seconds_high):
            assert f" {show_seconds(seconds)} " in line
        if phase.tokens_per_second:
            assert f" {phase.tokens_per_second:,.0f} " in line


def test_the_short_screen_names_the_phase_that_takes_longest(plan):
    longest = max(plan.time.phases, key=lambda phase: phase.seconds or 0)
    words = " ".join(text(show_short, plan).split())
    rate = f"{longest.tokens_per_second:,.0f} tokens/s"
    assert f"most of it {longest.phase}, {show_seconds(longest.seconds)} at {rate}" in words


def test_a_step_without_phases_shows_none():
    plain = api.plan(from_data({"model": "gpt2", "hardware": {"device": "h100-sxm"}}, Request,
                               source="here"), levers=False)  # fmt: skip
    assert plain.time.phases == ()
    assert "Phases of an iteration" not in text(show_plan, plain)
    assert "most of it" not in text(show_short, plain)
