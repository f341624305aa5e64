"""Quantised bases: the predicted ledger against the trace, every phase and kind, to the byte."""

import pytest
from msgspec.structs import replace

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.errors import InvalidRequest
from memfit.families import read_model
from memfit.ledger import Kind, Phase
from memfit.plan.memory import predict_memory
from memfit.recipe import Lora, Quantisation
from memfit.request import Request, Task
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
    "gemma2, nf4, double": ("gemma2", "nf4", Quantisation(double=True), "bf16-mixed", {}),
}  # fmt: skip


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


@pytest.mark.parametrize(
    ("method", "said"), [("full", "no gradient can change"), ("freeze", "no gradient can change")]
)
def test_a_plan_refuses_to_train_what_is_quantised(method, said):
    request = Request(model="pythia-410m", base_format="int8", method=method)
    with pytest.raises(InvalidRequest, match=said) as caught:
        api.plan(request)
    assert "method: lora" in caught.value.hint


def test_a_plan_of_a_quantised_base_trains_adapters_and_stores_its_settings():
    task = Task(sequence_length=512, global_batch=2)
    request = Request(model="pythia-410m", base_format="int8", task=task)
    recipe = api.plan(request).recipe
    assert recipe.method == "lora"
    assert recipe.quantisation == Quantisation(outlier_threshold=6.0, outlier_share=0.01)
    four = api.plan(replace(request, base_format="nf4")).recipe
    assert four.quantisation == Quantisation(double=True)
    plain = api.plan(replace(request, base_format="auto", method="lora")).recipe
    assert plain.base_format in ("bf16", "fp32")
    assert plain.quantisation == Quantisation()
