"""The short screen: 24 lines of 80 columns, with what one decides by."""

import io
import shlex
from functools import cache

import pytest
from msgspec.structs import replace

import made_by_hand as made
from memfit import api
from memfit.catalog import models
from memfit.cli.options import changed_options
from memfit.core import units
from memfit.core.errors import InvalidRequest, MemoryUnknown
from memfit.core.units import GIB
from memfit.screens.short import MOST, describe_time, show_short
from memfit.screens.widgets.terminal import Console, cells
from typed_commands import quick

pytestmark = [pytest.mark.levers, pytest.mark.ways_out]

PLANS = {
    "fits": ["qwen3-8b", "--device", "A100", "--method", "lora"],
    "qlora": ["Qwen/Qwen3-8B-Base", "--device", "4090", "--qlora", "--seq-len", "8k"],
    "does not fit": ["llama-3.2-1b", "--device", "3060", "--method", "full", "--set",
                     "precision=bf16-mixed"],
    "fits nowhere near": ["llama-3.1-70b", "--device", "4090", "--method", "full"],
    "not even with rows of one": ["llama-3.1-70b", "--device", "t4"],
    "several devices": ["llama-3.1-8b", "--device", "8xH100", "--method", "full"],
    "several, of which none fits": ["llama-3.2-3b", "--device", "2x4060", "--method", "full"],
    "another framework": ["llama-3.1-8b", "--device", "h100-sxm", "--framework", "torchtitan"],
    "a trainer that lacks memory": ["gpt-oss-20b", "--device", "3060", "--framework", "trl"],
    "off record": ["smollm2-135m", "--device", "mi325x"],
    "pure bf16": ["qwen3-8b", "--device", "l4", "--precision", "bf16"],
    "a processor": ["gpt2", "--device", "cpu", "--seq-len", "256"],
    "a limit": ["gpt2", "--device", "l4", "--memory", "200 MiB", "--seq-len", "512"],
}  # fmt: skip

# misses whose lines are of the same kinds as those of "does not fit" and "a limit"
LIKE_ANOTHER = (
    "fits nowhere near", "not even with rows of one", "several, of which none fits",
)  # fmt: skip
CASES = [pytest.param(c, marks=[pytest.mark.wide] if c in LIKE_ANOTHER else []) for c in PLANS]


@cache
def answer(case):
    """(exit code, stdout, stderr) of a plan, which several tests look at."""
    with pytest.MonkeyPatch.context() as around:
        around.setenv("COLUMNS", "80")
        return quick("plan", *PLANS[case])


def check(out):
    lines = out.splitlines()
    assert len(lines) <= MOST
    assert max(map(cells, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    return lines


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_24_lines_of_80_columns(case):
    code, out, err = answer(case)
    assert err == ""
    lines = check(out)
    verdict = lines[0].partition("  ")[0]
    assert (code == 3) == (verdict == "DOES NOT FIT")
    assert "usable" in out
    assert "\nAssumed: " in out
    assert "\nNext\n  memfit " in out
    assert ("Ways out" in out) <= (code == 3)
    assert lines[-1].startswith("--why explains")


@pytest.mark.parametrize("case", CASES)
def test_what_it_says_to_type_next_runs(case, monkeypatch):
    """A flag that is typed and a way out that sets its key contradicted each other."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = answer(case)
    text = out.partition("\nNext\n")[2].rpartition("\n--why")[0].replace("\\\n", " ")
    verb, *rest = shlex.split(text)[1:]
    if verb in ("plan", "predict"):
        code, shown, err = quick(verb, *rest)
        assert code in (0, 3), err
        if "Ways out" in out:
            assert code == 0, shown
    else:
        assert verb == "certify"


SHARE = 80  # of models that fit soon: ways out of a miss take seconds each
MODELS = [
    pytest.param(m.id, marks=[pytest.mark.wide] if n % SHARE or m.parameters > 8e9 else [])
    for n, m in enumerate(models())
]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_model_of_the_catalogue_is_24_lines(model):
    try:
        plan = api.plan(api.read(model, device="8xH100"))
    except (InvalidRequest, MemoryUnknown):
        return  # families that are only counted
    stream = io.StringIO()
    show_short(Console(stream, width=80, colour=False), plan, commands=["memfit plan " + model])
    check(stream.getvalue())


def test_why_has_the_whole_screen():
    words = ["plan", "gpt2", "--device", "l4", "--seq-len", "512"]
    whole = quick(*words, "--why")[1]
    short = quick(*words)[1]
    for heading in ("Memory at the peak", "Instants", "Considered", "Every entry at the peak"):
        assert heading in whole
        assert heading not in short


def test_colour_adds_nothing_but_colour():
    plan = api.plan(api.read("gpt2", device="l4", changes={"task.sequence_length": 512}))

    def text(**keys):
        stream = io.StringIO()
        show_short(Console(stream, width=80, **keys), plan, commands=["memfit certify gpt2"])
        return stream.getvalue()

    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", text(colour=True)) == text(colour=False)


@pytest.mark.parametrize(
    ("device", "changes", "more", "typed"),
    [
        ("4090", {"method": "full"}, {"method": "lora", "base_format": "int8"},
         "--device 4090 --method lora --set base_format=int8"),
        ("8xA100", {}, {"hardware.device": "b200-sxm"}, "--device b200-sxm:8"),
        ("2x4090", {}, {"hardware.count": 8}, "--device 4090 --gpus 8"),
        ("4090", {"method": "qlora"}, {"base_format": "int8"},
         "--device 4090 --method lora --set base_format=int8"),
        ("4090", {"method": "qlora"}, {"task.sequence_length": 512},
         "--device 4090 --method qlora --seq-len 512"),
    ],
)  # fmt: skip
def test_a_change_stands_once_in_a_command(device, changes, more, typed):
    assert changed_options(device, None, changes, more) == f" {typed}"


def test_an_unknown_time_is_said_to_be_unknown_once():
    plan = api.plan(api.read("gpt2", changes={"hardware.device": "l4"}), levers=False)
    unknown = replace(plan.time, step_seconds=None, because="unknown: nobody timed it")
    console = Console(io.StringIO(), width=80, colour=False)
    lines = describe_time(console, replace(plan, time=unknown))
    assert ["".join(span.text for span in line) for line in lines] == [
        "time unknown: nobody timed it"
    ]


def test_a_run_of_unknown_length_shows_what_1000_steps_take():
    plan = api.plan(api.read("gpt2", device="4090", changes={"task.epochs": 3}), levers=False)
    shown = " ".join(show(plan).split())
    seconds = units.show_seconds(1000 * plan.time.step_seconds)
    assert f"1,000 steps take {seconds} (" in shown
    assert "; how many there are is unknown Assumed: " in shown


def show(plan):
    out = io.StringIO()
    show_short(Console(out, width=80), plan, commands=[])
    return out.getvalue()


def test_a_lever_that_another_one_beats_in_bytes_and_time_is_left_to_why():
    plan = made.plan()
    own, like = plan.memory.needed, plan.levers[0]
    strong, weak = (
        replace(like, changes={"micro_batch": rows}, device_total=own - saved,
                relative_time=time, fits=True, because=because)
        for rows, saved, time, because in (
            (3, 9 * GIB, 0.8, ""), (5, 5 * GIB, 0.9, "changes what is learned"))
    )  # fmt: skip
    both = show(replace(plan, levers=(weak, strong)))
    assert "--batch 3" in both
    assert "--batch 5" not in both
    exact = replace(weak, because="")
    inexact = replace(strong, because="changes what is learned")
    apart = show(replace(plan, levers=(exact, inexact)))  # neither is the better in all
    assert "--batch 3" in apart
    assert "--batch 5" in apart


def test_a_lever_whose_plan_is_on_another_mesh_says_so():
    plan = made.plan()
    lever = replace(plan.levers[0], device_total=GIB, relative_time=0.9, fits=True)
    on = replace(lever, mesh="2 shards x 4 to a product")
    assert "time, on 2 shards x 4 to a product" in show(replace(plan, levers=(on,)))
    assert " to a product" not in show(replace(plan, levers=(lever,)))


def test_where_no_time_is_known_nothing_is_a_lever_for_being_faster():
    plan = made.plan()
    faster = replace(plan.levers[0], device_total=plan.memory.needed, relative_time=0.9, fits=True)
    untimed = replace(plan.time, step_seconds=None, total_seconds=None, because="unknown: ?")
    assert "Levers" in show(replace(plan, levers=(faster,)))
    assert "Levers" not in show(replace(plan, levers=(faster,), time=untimed))
