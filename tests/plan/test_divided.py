"""Meshes that divide products, rows or blocks: tried unasked, taken where they win by much."""

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.core.errors import Error
from memfit.plan.memory import predicted_memory
from memfit.plan.request.problem import find_device, read_problem
from memfit.plan.search import best_first
from memfit.plan.search.best_first import GAIN
from memfit.records import from_data
from memfit.records.request import Request

LLAMA = {
    "name": "llama", "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048,
    "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 65536,
}  # fmt: skip
MESHES = {
    "copies": [{"dp_shard": 4}, {"dp_shard": 4, "reshard_after_forward": False},
               {"dp_replicate": 4}],
    "divided": [{"dp_shard": 2, "pp": 2}, {"dp_shard": 1, "pp": 4}, {"dp_shard": 2, "tp": 2},
                {"dp_shard": 1, "tp": 4}, {"dp_shard": 2, "cp": 2}, {"dp_shard": 1, "cp": 4}],
}  # fmt: skip
SLOW = {"device": "a100-sxm-80", "count": 1, "nodes": 4, "network": "ethernet-10"}
MACHINE = {"device": "l4", "count": 4}


def ask(hardware, length=4096, **more):
    request = {
        "model": LLAMA, "weights": "random", "method": "full", "precision": "bf16-mixed",
        "hardware": hardware,
        "task": {"sequence_length": length, "global_batch": 8, "packing": False}, **more,
    }  # fmt: skip
    return from_data(request, Request, source="the test")


def plan(request):
    return api.plan(request, levers=False)


def find_fastest(hardware, length, meshes):
    """Seconds of the fastest of these meshes, each asked for by name; infinite where none fits."""
    seconds = [float("inf")]
    for mesh in meshes:
        if hardware["count"] == 1 and ("tp" in mesh or "cp" in mesh):
            continue  # whose exchanges are kept within a machine
        try:
            found = plan(ask(hardware, length, parallel=mesh))
        except Error:
            continue
        if found.memory.verdict == "fits":
            seconds.append(found.time.step_seconds)
    return min(seconds)


@pytest.mark.parametrize(
    ("hardware", "length"),
    [
        pytest.param(SLOW, 4096, id="slow network"),
        pytest.param(MACHINE, 4096, id="short rows", marks=pytest.mark.wide),
        pytest.param(MACHINE, 32768, id="long rows"),
    ],
)
def test_the_fastest_mesh_wins_and_a_divided_one_by_a_tenth(hardware, length):
    found = plan(ask(hardware, length))
    copies, divided = (find_fastest(hardware, length, meshes) for meshes in MESHES.values())
    wins = divided < GAIN * copies
    p = found.recipe.parallel
    assert (p.tp * p.cp * p.pp > 1) == wins
    assert found.time.step_seconds == pytest.approx(divided if wins else copies, rel=1e-9)


def test_stages_spare_a_slow_network():
    """8B on four machines of one A100: gathering 16 GB a pass takes 10 Gb/s longer than computing;
    stages send activations alone."""
    request = api.read("llama-3.1-8b", changes={"method": "full", **{
        f"hardware.{key}": value for key, value in SLOW.items()}})  # fmt: skip
    found = plan(request)
    assert found.recipe.parallel.pp == 4
    other = plan(api.change(request, {"parallel.dp_shard": 4}))
    assert other.time.step_seconds > 2.5 * found.time.step_seconds
    again = plan(api.state(found))
    assert again.recipe == found.recipe
    fast = plan(api.change(request, {"hardware.network": "ndr-8x400"}))
    assert fast.recipe.parallel.pp == 1


def test_rows_are_cut_where_they_are_long_and_not_packed():
    """Of one kernel, flash, the only one of the ring: cuDNN's is worth more than such a cut."""
    rows = {"method": "full", "hardware.count": 8, "task.global_batch": 8,
            "task.sequence_length": 131072, "attention": "flash"}  # fmt: skip
    found = plan(api.read("llama-3.1-8b", device="h100-sxm",
                          changes={**rows, "task.packing": False}))  # fmt: skip
    assert found.recipe.parallel.cp == 8
    assert not found.recipe.packing
    shared = plan(api.read("llama-3.1-8b", device="h100-sxm",
                           changes={**rows, "task.packing": False, "parallel.tp": 8}))  # fmt: skip
    assert found.time.step_seconds < GAIN * shared.time.step_seconds
    free = plan(api.read("llama-3.1-8b", device="h100-sxm",
                         changes={**rows, "task.packing": False, "attention": "auto"}))  # fmt: skip
    assert free.recipe.attention == "cudnn"
    assert free.time.step_seconds < found.time.step_seconds
    packed = plan(api.read("llama-3.1-8b", device="h100-sxm", changes=rows))
    assert packed.recipe.packing  # what is learned is not changed for speed
    assert packed.recipe.parallel.cp == 1


def test_speeds_that_nobody_knows_divide_nothing(monkeypatch):
    """On a CPU seconds rank what is alike alone, also where a run's start has measured it."""
    monkeypatch.setattr(best_first, "GAIN", 100.0)  # whatever fits wins, where it is asked
    divides = plan(ask(MACHINE, 1024)).recipe.parallel
    assert divides.tp * divides.cp * divides.pp > 1
    measured = replace(find_device("cpu"), flops={"fp32": 1e12, "bf16": 1e12})
    for device in (None, measured):
        request = ask({"device": "cpu", "count": 4}, 1024)
        p = api.plan(request, device=device, levers=False).recipe.parallel
        assert p.world == 4
        assert p.tp * p.cp * p.pp == 1


def test_what_such_meshes_lack_is_left_to_the_others():
    for changes in ({"method": "freeze", "freeze": {"last_blocks": 2}}, {"offload": "parameters"}):
        found = plan(ask(SLOW, model="llama-3.1-8b", weights="pretrained", **changes))
        assert found.recipe.parallel.pp == 1
        assert found.recipe.parallel.world == 4


def test_the_first_stage_that_is_too_much_ends_the_question(monkeypatch):
    """Its bytes do not depend on the loss, which the last stage has, and no other is asked for."""

    def weigh(memory):
        asked.clear()
        knobs = {"parallel": {"pp": 4}, "recompute": "none", "loss": "chunked", "micro_batch": 1}
        request = ask(MACHINE, **knobs, limits={"memory": memory})
        return next(best_first._combinations(next(best_first._preferences(read_problem(request)))))

    asked = []
    whole = predicted_memory.predict_peak

    def watched(model, recipe, device, rank=None):
        asked.append(rank)
        return whole(model, recipe, device, rank)

    monkeypatch.setattr(predicted_memory, "predict_peak", watched)
    tight = weigh("6 GiB")  # above weights, gradients and states, which are counted first
    assert not tight.fits
    assert asked == [0]
    wide = weigh("20 GiB")
    assert wide.fits
    assert {0, 3} <= set(asked)
    settings = [
        [predicted_memory.describe(wide.model, recipe, wide.problem.device, rank)[0]
         for recipe in (wide.recipe, wide.but(loss="plain", loss_chunk=0).recipe)]
        for rank in (0, 3)
    ]  # fmt: skip
    assert [one == other for one, other in settings] == [True, False]
