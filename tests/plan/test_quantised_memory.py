"""Quantised bases: the predicted ledger against the trace, every phase and kind, to the byte."""

import pytest
from msgspec.structs import replace
from test_closed_form import plain

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import find_outline, predict_memory, worst_batch
from memfit.plan.simulate.segments import simulate
from memfit.plan.step_time.read import read_setting
from memfit.plan.step_time.step import predict_step
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Lora, Quantisation
from memfit.records.request import Hardware, Request, Task
from tiny_models import make_recipe

CPU, H100 = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")
SCALARS = 4  # bytes of 0-dim results that a step's caller may still hold
LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
EIGHT = Quantisation(outlier_threshold=6.0, outlier_share=0.1)
SETTINGS = {
    "llama, nf4, double, mixed": ("llama", "nf4", Quantisation(double=True), "bf16-mixed", {}),
    "llama, fp4, recomputed, accumulated": (
        "llama", "fp4", Quantisation(), "bf16", {"recompute_blocks": 2, "accumulation": 2}
    ),
    "llama, nf4, fp16": ("llama", "nf4", Quantisation(double=True), "fp16-mixed", {}),
    "llama, int8, two targets, packed": (
        "llama", "int8", EIGHT, "bf16", {"lora": LORA, "packing": True}
    ),
    "llama, int8, fp16, dropout": (
        "llama", "int8", EIGHT, "fp16-mixed", {"lora": replace(LORA, dropout=0.1)}
    ),
    "gpt_neox, int8, all recomputed": (
        "gpt_neox", "int8", EIGHT, "bf16-mixed", {"recompute_blocks": 3}
    ),
    "gpt_neox, int8 without outliers, chunked": (
        "gpt_neox", "int8", Quantisation(), "bf16", {"loss": "chunked", "loss_chunk": 12}
    ),
    "opt, nf4": ("opt", "nf4", Quantisation(), "bf16", {}),
    "falcon, int8": ("falcon", "int8", EIGHT, "bf16", {}),
    "llama, nf4, lean": ("llama", "nf4", Quantisation(), "bf16", {"lean": ("norm", "mlp")}),
    "llama, int8, lean, mixed, two targets": (
        "llama", "int8", EIGHT, "bf16-mixed", {"lora": LORA, "lean": ("norm", "mlp")}
    ),
    "qwen3_moe, nf4, double, mixed": (
        "qwen3_moe", "nf4", Quantisation(double=True), "bf16-mixed", {}
    ),
    "gpt_oss, fp4, recomputed, accumulated": (
        "gpt_oss", "fp4", Quantisation(), "bf16", {"recompute_blocks": 2, "accumulation": 2}
    ),
    "deepseek_v3, nf4": ("deepseek_v3", "nf4", Quantisation(), "bf16", {}),
    "gemma2, nf4, double": ("gemma2", "nf4", Quantisation(double=True), "bf16-mixed", {}),
}  # fmt: skip


@pytest.mark.covering(SETTINGS)
@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "cuda"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_prediction_equals_the_trace(setting, device):
    family, base_format, own, precision, changes = SETTINGS[setting]
    recipe = make_recipe(
        family, method="lora", base_format=base_format, quantisation=own, precision=precision,
        device=device.id, **changes,
    )  # fmt: skip
    traced = trace(recipe, device).ledger
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    predicted = predict_memory(model, recipe, device)
    for phase in traced.phases:
        want, have = traced.by_kind(phase), predicted.by_kind(phase)
        for kind in (want.keys() | have.keys()) - {Kind.FRAGMENTATION}:
            slack = SCALARS if phase is Phase.OPTIMIZER_STEP else 0
            assert abs(want.get(kind, 0) - have.get(kind, 0)) <= slack, (phase, kind)


@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "cuda"])
@pytest.mark.parametrize("setting", ["llama, nf4, double, mixed", "gpt_neox, int8, all recomputed"])
def test_the_closed_form_is_the_simulation_of_other_shapes(setting, device):
    """Across the few rows up to which a fused kernel is counted, too."""
    family, base_format, own, precision, changes = SETTINGS[setting]
    recipe = make_recipe(
        family, method="lora", base_format=base_format, quantisation=own, precision=precision,
        device=device.id, **changes,
    )  # fmt: skip
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    find_outline(model, recipe, device).passes(recipe)  # the first is not a closed form
    for rows, tokens in ((1, 1), (2, 2), (1, 5), (2, 129), (70, 1024)):
        here = replace(recipe, micro_batch=rows, sequence_length=tokens)
        outline = find_outline(model, here, device)
        assert plain(outline.passes(here)) == plain(simulate(outline.setting, worst_batch(here)))


@pytest.mark.parametrize(
    ("method", "said"), [("full", "no gradient can change"), ("freeze", "no gradient can change")]
)
def test_a_plan_refuses_to_train_what_is_quantised(method, said):
    request = Request(model="pythia-410m", base_format="int8", method=method)
    with pytest.raises(InvalidRequest, match=said) as caught:
        api.plan(request, levers=False)
    assert "method: lora" in caught.value.hint


def test_a_plan_of_a_quantised_base_trains_adapters_and_stores_its_settings():
    task = Task(sequence_length=512, global_batch=2)
    request = Request(model="pythia-410m", base_format="int8", task=task)
    recipe = api.plan(request, levers=False).recipe
    assert recipe.method == "lora"
    assert recipe.quantisation == Quantisation(outlier_threshold=6.0, outlier_share=0.01)
    four = api.plan(replace(request, base_format="nf4"), levers=False).recipe
    assert four.quantisation == Quantisation(double=True)
    plain = api.plan(replace(request, base_format="auto", method="lora"), levers=False).recipe
    assert plain.base_format in ("bf16", "fp32")
    assert plain.quantisation == Quantisation()


def step_of(base_format, device="h100-sxm", **changes):
    task = Task(sequence_length=2048, global_batch=4)
    request = Request(
        model="llama-3.1-8b", method="lora", base_format=base_format, task=task,
        precision="bf16", recompute="none", loss="chunked", micro_batch=1,
        hardware=Hardware(device=device), **changes,
    )  # fmt: skip
    return api.predict(request)


def test_time_counts_unpacking_and_int8s_two_products():
    plain, four, eight = (step_of(base) for base in ("bf16", "nf4", "int8"))
    spans = {p.recipe.base_format: {s.op: s.duration for s in p.timeline.spans}
             for p in (plain, four, eight)}  # fmt: skip
    assert spans["nf4"]["forward"] > spans["bf16"]["forward"]
    assert spans["nf4"]["backward"] > spans["bf16"]["backward"]
    assert spans["int8"]["backward"] > spans["bf16"]["backward"]  # its weights become dense there
    assert spans["int8"]["backward"] > spans["nf4"]["backward"] * 0.99


def test_int8s_forward_gains_from_int8_products_and_pays_for_casts():
    """Without the device's int8 speed the same bytes, and slower products."""
    plan = step_of("int8")
    model, device = read_model(plan.recipe.model), catalog.find_device("h100-sxm")
    setting = read_setting(plan.recipe, model, device)
    machine, layout = setting.machine, setting.layout
    slow = predict_step(setting._replace(machine=machine._replace(eight=0.0)))
    fast = predict_step(setting)
    assert fast.forward < slow.forward
    assert fast.backward == slow.backward
    plain = layout._replace(numbers=layout.numbers._replace(eight=0.0, packed=0.0))
    uncoded = predict_step(setting._replace(layout=plain))
    assert uncoded.forward < slow.forward


@pytest.mark.levers
@pytest.mark.parametrize(("method", "model"), [("full", "llama-3.2-1b"), ("lora", "llama-3.1-8b")])
def test_levers_offer_a_base_in_eight_and_in_four_bits_with_bytes_and_time(method, model):
    task = Task(sequence_length=2048, global_batch=4)
    request = Request(
        model=model, method=method, task=task, weights="pretrained",
        hardware=Hardware(device="rtx-4090"),
    )  # fmt: skip
    chosen = api.plan(request)
    plan = api.predict_with_levers(api.state(chosen))
    found = {row.changes["base_format"]: row for row in plan.levers if "base_format" in row.changes}
    assert found.keys() >= {"int8", "nf4"}
    assert found["nf4"].peak_allocated < found["int8"].peak_allocated
    assert found["int8"].peak_allocated < plan.ledger.peak
    assert all(row.relative_time > 0 for row in found.values())
    assert "over nf4" in found["nf4"].label
    (shown,) = [row for row in chosen.levers if "base_format" in row.changes]  # planned again
    assert shown.changes["base_format"] == "nf4"
    assert ("method" in shown.changes) == (method == "full")
    assert shown.fits


@pytest.mark.levers
def test_no_lever_quantises_what_cannot_be():
    request = Request(
        model="mixtral-8x7b-v0.1", method="lora", weights="pretrained",
        task=Task(sequence_length=512, global_batch=1), hardware=Hardware(device="h100-sxm"),
    )  # fmt: skip
    plan = api.plan(request)
    assert not [row for row in plan.levers if row.changes.get("base_format") in ("int8", "nf4")]
