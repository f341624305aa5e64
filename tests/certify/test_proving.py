"""Levers and the nearest recipe: what is named is certified, and typing it gives just that."""

from __future__ import annotations

import json
import shlex

import msgspec
import pytest

from memfit import api
from memfit.certify.evidence.certificate import make_certificate
from memfit.core.errors import InvalidRequest
from memfit.core.units import MIB
from memfit.core.wording import set_words
from memfit.plan.memory.verdict import needs
from memfit.records import from_data
from memfit.records.request import Request
from memfit.workflows import certify_request
from typed_commands import quick

MODEL = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
STATED = {
    "model": MODEL, "method": "full", "precision": "fp32", "recompute": "none", "loss": "plain",
    "micro_batch": 8, "attention": "flash", "optimizer": {"name": "adamw"},
    "task": {"sequence_length": 128, "global_batch": 8}, "hardware": {"device": "cpu"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch, tensors_alone):
    """As the child certifies (tests/certify/test_certificate.py), without its imports each time."""

    def prove(recipes, usable):
        found = []
        for recipe in recipes:
            device = api.find_device("cpu" if recipe.device == "cpu-x86" else recipe.device)
            try:
                found.append(make_certificate(recipe, device, usable, None))
            except InvalidRequest as error:
                found.append(error)
        return found

    monkeypatch.setattr(certify_request, "prove", prove)


def ask(limit=None, **changes):
    data = {**STATED, **changes}
    if limit is not None:
        data["limits"] = {"memory": f"{limit} B"}
    return from_data(data, Request, source="the test")


def certified(plan):
    return certify_request.prove([plan.recipe], plan.memory.usable)[0]


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.wide), "h100-sxm"])
def test_each_lever_is_the_certificate_of_the_request_with_its_words_set(device) -> None:
    kernel = "flash" if device == "cpu" else "efficient"
    request = ask(hardware={"device": device}, attention=kernel)
    plan = api.plan(request, levers=False)
    proof = certified(plan)
    levers = certify_request.find_levers(request, proof)
    keys = {key for lever in levers for key in lever.changes}
    assert keys >= {
        "recompute", "micro_batch", "loss", "optimizer.implementation", "attention", "precision",
        "optimizer.name",
    }  # fmt: skip
    assert [lever.removed for lever in levers] == sorted((v.removed for v in levers), reverse=True)
    assert levers[0].removed > 0 > levers[-1].removed
    for lever in levers[::10]:
        own = certified(api.plan(api.change(request, lever.changes), levers=False)).memory
        assert (lever.peak_allocated, lever.verdict) == (own.peak_allocated, own.verdict)
        assert lever.removed == proof.memory.peak_allocated - own.peak_allocated
    inexact = {key for lever in levers if not lever.exact for key in lever.changes}
    followers = {"base_format", "optimizer.implementation"}
    assert inexact - followers <= {"precision", "optimizer.name", "method"}


def test_a_lever_that_cannot_be_certified_says_why(monkeypatch) -> None:
    plan = api.plan(ask(), levers=False)
    proof = certified(plan)
    error = InvalidRequest("the kernel is not there")
    monkeypatch.setattr(certify_request, "prove", lambda recipes, _: [error] * len(recipes))
    for lever in certify_request.find_levers(plan.request, proof):
        assert (lever.peak_allocated, lever.removed, lever.verdict) == (None, None, None)
        assert lever.because == "the kernel is not there"


@pytest.mark.parametrize("limit", [8, 13])
def test_the_nearest_recipe_fits_and_its_words_give_exactly_it(limit) -> None:
    request = ask(limit * MIB)
    asked = api.plan(request, levers=False)
    assert asked.memory.verdict == "does_not_fit"
    nearest = certify_request.find_nearest(asked, None)
    assert nearest.memory.verdict == "fits"
    assert nearest.exact  # of all that fit, one that learns the same
    again = api.plan(api.change(request, nearest.changes), levers=False)
    assert again.recipe_digest == nearest.recipe_digest
    assert certified(again).memory == nearest.memory
    assert nearest.memory.peak_allocated <= limit * MIB


def test_one_knob_is_loosened_before_two() -> None:
    """The limits are read off the planner: what one knob, and what two, can reach at the least."""
    tiny = ask(1)
    least = {
        number: min(
            needs(api.plan(way, levers=False).memory) for way in certify_request._ways(tiny, number)
        )
        for number in (1, 2)
    }
    assert least[2] < least[1]
    for limit, number in ((least[1], 1), ((least[1] + least[2]) // 2, 2)):
        nearest = certify_request.find_nearest(api.plan(ask(limit), levers=False), None)
        assert nearest.memory.verdict == "fits"
        assert len(set(nearest.changes) - {"loss_chunk"}) == number, nearest.changes


def test_what_the_request_does_not_state_needs_no_loosening() -> None:
    request = ask(14 * MIB, recompute="auto", micro_batch="auto", loss="auto")
    assert api.plan(request, levers=False).memory.verdict == "fits"
    ways = list(certify_request._ways(request, 1))
    assert all(way.method == "auto" or way.precision == "auto" or way.attention == "auto"
               for way in ways)  # fmt: skip
    assert len(ways) == 3


def test_where_nothing_fits_the_smallest_found_is_named() -> None:
    asked = api.plan(ask(MIB // 4), levers=False)
    nearest = certify_request.find_nearest(asked, None)
    assert nearest.memory.verdict == "does_not_fit"
    assert MIB // 4 < nearest.memory.peak_allocated < certified(asked).memory.peak_allocated
    again = api.plan(api.change(asked.request, nearest.changes), levers=False)
    assert again.recipe_digest == nearest.recipe_digest


def test_a_certificate_that_refutes_its_plan_tightens_the_search() -> None:
    request = ask(20 * MIB, recompute="auto", micro_batch="auto", loss="auto")
    asked = api.plan(request, levers=False)
    proof = certified(asked)
    assert proof.memory.verdict == "fits"
    higher = msgspec.structs.replace(
        proof.memory, peak_allocated=24 * MIB, device_total=24 * MIB, verdict="does_not_fit"
    )  # as if the certificate had found more than was predicted
    excess = 24 * MIB - asked.memory.peak_allocated
    nearest = certify_request.find_nearest(asked, msgspec.structs.replace(proof, memory=higher))
    assert nearest.memory.verdict == "fits"
    assert nearest.memory.usable == 20 * MIB
    assert nearest.memory.peak_allocated <= 20 * MIB - excess


def test_a_miss_exits_3_and_its_json_names_the_nearest(tmp_path) -> None:
    file = tmp_path / "request.yaml"
    file.write_text(json.dumps(STATED))
    code, out, err = quick("certify", file, "--memory", "8 MiB", "--json")
    assert (code, "searching the nearest recipe that fits" in err) == (3, True)
    nearest = json.loads(out)["nearest"]
    assert nearest["memory"]["verdict"] == "fits"
    words = [
        part for word in set_words(nearest["changes"]) for part in ("--set", *shlex.split(word))
    ]
    code, out, _ = quick("plan", file, "--memory", "8 MiB", "--json", *words)
    assert code == 0
    assert json.loads(out)["recipe_digest"] == nearest["recipe_digest"]


def test_without_a_limit_nothing_is_searched() -> None:
    asked = api.plan(ask(), levers=False)
    unknown = msgspec.structs.replace(asked.memory, usable=None, verdict="unproven")
    assert (
        certify_request.find_nearest(msgspec.structs.replace(asked, memory=unknown), None) is None
    )
