"""Ways out of a plan that does not fit: each is typed as it is printed, and fits."""

import json
import shlex
from functools import cache

import pytest
from click.testing import CliRunner

from memfit import api
from memfit.cli.app import app
from memfit.cli.app import run as finish

pytestmark = pytest.mark.ways_out

SMALL_CARD = ["llama-3.2-1b", "--device", "rtx-3060-12", "--set", "method=full",
              "--set", "precision=bf16-mixed"]  # fmt: skip
CASES = {  # what is typed, and the kinds of ways out that there must be
    "whole on a small card": (SMALL_CARD, {"method", "devices", "device"}),
    "stated knobs": (
        ["gpt2-medium", "--device", "rtx-4060", "--set", "micro_batch=16", "--set", "method=lora",
         "--set", "recompute=none", "--set", "hardware.price=0.40 USD",
         "--set", "task.sequence_length=1024", "--set", "task.global_batch=16"],
        {"knobs", "device", "rows"},
    ),
    "a limit": (["qwen2.5-0.5b", "--device", "h100-sxm", "--memory", "1536 MiB"], {"limit"}),
    "states that can wait": (
        ["llama-3.1-8b", "--device", "l40s", "--set", "method=full",
         "--set", "precision=bf16", "--set", "optimizer.name=adamw", "--set",
         "optimizer.clip_norm=0", "--set", "task.global_batch=1"],
        {"offload"},
    ),
    "another's step": (
        ["llama-3.1-8b", "--device", "h100-sxm", "--set", "framework=torchtitan"], {"devices"}
    ),
    "long rows": (
        ["llama-3.2-1b", "--device", "rtx-3060-12", "--set", "task.sequence_length=131072",
         "--set", "base_format=nf4", "--set", "method=lora"],
        {"rows"},
    ),
    "a processor": (["pythia-70m", "--device", "cpu", "--memory", "200 MiB"], {"limit"}),
}  # fmt: skip


def run(*words):
    with CliRunner().isolation() as streams:
        code = finish(lambda: app.main(list(words), prog_name="memfit", standalone_mode=False))
        return code, streams[0].getvalue().decode()


@cache
def ask(*words):
    code, out = run("plan", *words, "--json")
    return code, json.loads(out)


@pytest.mark.parametrize(
    ("words", "kinds", "every"),
    [
        # one way of each kind that a case is about; a processor's way out is a limit, too, and
        # shorter rows are one out of stated knobs
        *(
            pytest.param(*case, False, id=n)
            for n, case in CASES.items()
            if n not in ("a limit", "long rows")
        ),
        *(
            pytest.param(*case, True, id=f"{n}, every way", marks=pytest.mark.wide)
            for n, case in CASES.items()
        ),
    ],
)
def test_each_way_out_typed_as_printed_fits_with_the_bytes_and_seconds_it_promises(
    words, kinds, every
):
    code, miss = ask(*words)
    assert (code, miss["memory"]["verdict"]) == (3, "does_not_fit")
    ways = miss["ways_out"]
    assert kinds <= {way["kind"] for way in ways}
    assert len(ways) <= 6
    known = [way["usd"] for way in ways if way["usd"] is not None]
    assert known == sorted(known)
    named = {way["kind"]: way for way in ways if way["kind"] in kinds}
    for way in ways if every else named.values():
        code, plan = ask(*words, *way["options"])
        assert (code, plan["memory"]["verdict"]) == (0, "fits"), way
        assert plan["memory"]["peak_allocated"] == way["peak_allocated"]
        assert plan["memory"]["device_total"] == way["device_total"]
        assert plan["time"]["step_seconds"] == way["step_seconds"]
        assert plan["cost"]["usd"] == way["usd"]
        assert (
            plan["request"]["hardware"]["count"] * plan["request"]["hardware"]["nodes"]
            == (way["devices"])
        )
        assert plan["ways_out"] == []


def test_the_next_command_of_a_miss_is_its_cheapest_way_out():
    words = SMALL_CARD
    code, out = run("plan", *words)
    assert code == 3
    _, every = run("plan", *words, "--why")
    shown = " ".join(every.split())
    last = out.split("Next\n")[1].partition("--why explains")[0].replace("\\\n", " ")
    typed = shlex.split(last)
    ways = ask(*words)[1]["ways_out"]
    assert typed[:2] == ["memfit", "plan"]
    cheapest = ask(*words, *ways[0]["options"])[1]["recipe_digest"]
    assert ask(*typed[2:])[1]["recipe_digest"] == cheapest
    for way in ways:
        options = way["options"]
        pairs = [options[n : n + 2] for n in range(0, len(options), 2)]
        assert all(shlex.join(pair) in shown for pair in pairs)


def test_only_a_miss_has_ways_out_and_a_draft_leaves_them_out():
    assert api.plan(api.read("pythia-70m", device="h100-sxm")).ways_out == ()
    request = api.read("llama-3.1-8b", device="rtx-4090", changes={"method": "full"})
    assert api.plan(request, levers=False).ways_out == ()


@pytest.mark.usefixtures("few_ways_out")
@pytest.mark.parametrize("framework", ["trl", pytest.param("hf-trainer", marks=pytest.mark.wide)])
def test_adapters_over_the_base_as_it_is_are_a_way_out_of_anothers_default(framework):
    """Whose `method: auto` is `full`, so that a base of fewer bits is not all there is to try."""
    request = api.read("llama-3.2-1b", device="l4", changes={
        "framework": framework, "task.sequence_length": 8192})  # fmt: skip
    plan = api.plan(request)
    assert (plan.recipe.method, plan.memory.verdict) == ("full", "does_not_fit")
    assert {"method": "lora"} in [dict(way.changes) for way in plan.ways_out]
