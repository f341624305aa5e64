"""Training for rounded weights: against torchao's rounding, a textbook step, and its own run."""

import json

import pytest
import torch
from msgspec.structs import replace
from tiny_runs import tiny_recipe, write_text
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from torchao.quantization.qat import IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantizer import IntxFakeQuantizer
from transformers import AutoModelForCausalLM

from memfit import api, catalog
from memfit.adapters import find_adapter
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.families import read_model
from memfit.meta.layers import qat as declared
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.step_time.block import around
from memfit.plan.step_time.predicted_time import find_setting, sum_up
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Lora, Parallel
from memfit.records.request import Request, Task
from memfit.train.checkpoint.export import file_tensors
from memfit.train.model import qat
from memfit.train.run.loop import train
from memfit.train.step.build import build_model
from memfit.train.step.step import evaluate, step
from tiny_models import (
    CONFIGS,
    gradients_in,
    make_batch,
    make_built,
    make_recipe,
    targets_of,
    textbook,
)

CPU, H100 = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")
WIDE = {**CONFIGS["llama"], "intermediate_size": 96}  # rows are multiples of 32
GRANULARITY = {"int8": PerAxis(0), "int4": PerGroup(32)}
DTYPE = {"int8": torch.int8, "int4": torch.int4}


def recipe_of(kind, **changes):
    return make_recipe(config=WIDE, qat=kind, **changes)


def away_from_torchaos_rounding(kind="int4"):
    """Entries of a rounded weight that differ from torchao's fake quantizer's."""
    torch.manual_seed(0)
    weight = torch.randn(96, 64) * torch.rand(96, 1)
    config = IntxFakeQuantizeConfig(DTYPE[kind], GRANULARITY[kind], is_symmetric=True)
    theirs = IntxFakeQuantizer(config)(weight)
    return int((qat.round_weight(weight, kind) != theirs).sum())


def rounded_weights(built, kind):
    """Of the whole model, with the blocks' projections rounded."""
    return {
        n: qat.round_weight(p.detach(), kind) if "_proj" in n else p.detach().clone()
        for n, p in built.model.named_parameters()
    }


def away_from_a_textbook_step(kind="int4"):
    """Loss and gradients: those of a textbook step at the rounded weights, straight through."""
    built, batch = make_built(recipe_of(kind, optimizer={"clip_norm": 0.0})), make_batch()
    loss, want = textbook(recipe_of(kind), rounded_weights(built, kind), batch)
    have = gradients_in(built)
    ours = step(built, [batch], targets_of(batch)).loss
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)
    return max(float((have[n] - g).norm() / g.norm()) for n, g in want.items())


def away_from_the_trace(device, **changes):
    recipe = recipe_of(changes.pop("kind", "int8"), device=device.id, **changes)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger, traced = predict_memory(model, recipe, device), trace(recipe, device)
    off = 0
    for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.EVALUATE):
        want, have = traced.ledger.by_kind(phase), ledger.by_kind(phase)
        for kind in (want.keys() | have.keys()) - {Kind.FRAGMENTATION}:
            off += abs(have.get(kind, 0) - want.get(kind, 0))
    return off


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_are_rounded_as_torchao_rounds_them(kind):
    assert away_from_torchaos_rounding(kind) == 0


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_step_is_a_textbook_step_at_rounded_weights_straight_through(kind):
    assert away_from_a_textbook_step(kind) < 1e-5


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_evaluated_is_what_torchao_makes_of_the_weights(kind, tmp_path):
    """After conversion the model says what training has seen, and not what its weights say."""
    recipe = recipe_of(kind)
    built, batch = make_built(recipe), make_batch()
    for _ in range(3):
        step(built, [batch], targets_of(batch))
    loss, targets = evaluate(built, batch)
    with qat.unrounded(built.model):
        plain, _ = evaluate(built, batch)
    converted = make_built(make_recipe(config=WIDE)).model
    converted.load_state_dict(file_tensors(built.model, "llama"))
    config = IntxWeightOnlyConfig(weight_dtype=DTYPE[kind], granularity=GRANULARITY[kind])
    quantize_(converted, config, lambda m, n: isinstance(m, nn.Linear) and "_proj" in n)
    with torch.no_grad():
        made = converted(input_ids=batch.input_ids, use_cache=False).logits
    total = nn.functional.cross_entropy(
        made.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
    )
    torch.testing.assert_close(total, loss, rtol=1e-5, atol=1e-5)
    assert abs(float(plain - loss)) > 1e-5 * float(targets)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": "int4", "precision": "bf16-mixed", "recompute_blocks": 2},
        {"precision": "fp16-mixed", "packing": True, "loss": "chunked", "loss_chunk": 16},
    ],
)
@pytest.mark.parametrize("device", [CPU, H100], ids=lambda d: d.id)
def test_the_prediction_is_the_certificate_to_the_byte(device, changes):
    assert away_from_the_trace(device, attention="math", **changes) == 0


def test_rounding_moves_36_bytes_an_element_in_every_forward():
    recipe = recipe_of("int8", precision="bf16-mixed", device=H100.id)
    totals = sum_up(find_adapter(recipe).adapt(read_model(recipe.model), recipe))
    extra = around(find_setting(totals, recipe, H100)).norms
    assert around(find_setting(totals, replace(recipe, qat=""), H100)).norms == 0
    least = 36 * sum(totals.dense) / 3 / H100.bandwidth
    assert least <= extra < 3 * least, "at the bandwidth that kernels reach"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.mark.slow
def test_a_run_reports_the_loss_before_after_plain_rounding_and_after_training_for_it(
    text, tmp_path
):
    base = tiny_recipe(steps=40)
    config = {**base.model.config, "intermediate_size": 96}
    base = replace(base, model=replace(base.model, config=config))
    asked = {"data": str(text), "evaluation": str(text)}
    request = Request(model=base.model.config, task=Task(**asked))
    train(base, request, tmp_path / "base", cache=tmp_path / "cache")
    folder = tmp_path / "base" / "model"
    config = json.loads((folder / "config.json").read_text())
    model = replace(base.model, source=str(folder), config=config)
    recipe = tiny_recipe(steps=20, weights="pretrained", model=model, qat="int4")
    run = train(recipe, request, tmp_path / "qat", cache=tmp_path / "cache")
    found = {n: m.value for n, m in run.measurements.items() if n.startswith("qat.")}
    before, rounded, after = (
        found[f"qat.loss_{name}"] for name in ("before", "plainly_rounded", "trained_for_it")
    )
    assert rounded > before
    assert after < rounded
    assert after == run.evaluations[-1][1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "qat" / "model") is not None


def request_of(**changes):
    stated = {
        "model": "llama-3.2-1b", "weights": "random", "method": "full", "qat": "int4",
        "precision": "bf16-mixed", "task": {"sequence_length": 512, "global_batch": 4},
        "hardware": {"device": "h100-sxm"},
    }  # fmt: skip
    return from_data({**stated, **changes}, Request, source="a test")


def test_a_plan_for_rounded_weights_fits_and_keeps_its_products_plain():
    plan = api.plan(request_of(lean="auto"), levers=False)
    assert (plan.recipe.qat, plan.recipe.lean, plan.recipe.selective_blocks) == ("int4", (), 0)
    assert plan.recipe.digest != replace(plan.recipe, qat="").digest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "lora"}, "whose base is not trained"),
        ({"precision": "bf16"}, "weights in fp32"),
        ({"model": "gpt2"}, r"no `nn\.Linear`"),
        ({"model": "mixtral-8x7b"}, "one grouped product"),
        ({"lean": "all"}, "products of its own"),
        ({"recompute": "selective"}, "products of its own"),
        ({"framework": "hf-trainer"}, "memfit's own step"),
    ],
)
def test_where_it_cannot_be_it_is_refused(changes, said):
    with pytest.raises(InvalidRequest, match=said) as caught:
        api.plan(request_of(**changes), levers=False)
    assert "qat" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "lora", "lora": Lora(rank=2, alpha=2.0, targets=("q_proj",))}, "method: lora"),
        (
            {
                "parallel": Parallel(tp=2, sequence_parallel=True),
                "config": {**WIDE, "vocab_size": 96},
            },
            "groups of 32 inputs of the output projection",
        ),
        ({"lean": ("norm",)}, "lean: norm"),
        ({"config": CONFIGS["llama"]}, "have 80 weights"),
    ],
)
def test_the_trainer_refuses_the_same(changes, said):
    with pytest.raises(InvalidRequest, match=said):
        build_model(make_recipe(**{"config": WIDE, "qat": "int4", **changes}), "meta")


def divide_by_the_largest_code(patch):
    def rounded(weight, kind, group=None):
        groups = weight.view(weight.shape[0], -1, 32 if kind == "int4" else weight.shape[1])
        most = 2 ** (qat.BITS[kind] - 1) - 1
        scale = groups.abs().amax(-1, keepdim=True) / most
        return ((groups / scale).round() * scale).view(weight.shape)

    patch.setattr(qat, "round_weight", rounded)


def stop_the_gradient(patch):
    patch.setattr(
        qat._Rounded, "backward", staticmethod(lambda ctx, *g: (torch.zeros_like(g[0]), None, None))
    )


def forget_the_rounded_copy(patch):
    patch.setattr("memfit.families.shared.forward.round_weight", lambda weight, group: weight)


def test_faults_of_the_rounding_its_gradient_and_its_bytes_are_found(monkeypatch):
    checks = {
        divide_by_the_largest_code: away_from_torchaos_rounding,
        stop_the_gradient: away_from_a_textbook_step,
        # a chunk of its own: predictions are kept
        forget_the_rounded_copy: lambda: away_from_the_trace(CPU, loss="chunked", loss_chunk=23),
    }
    assert declared.round_weight is not None
    for fault, check in checks.items():
        with monkeypatch.context() as patch:
            fault(patch)
            assert check() > 0.01, fault
