"""gpt-oss as it is published, experts in MXFP4: what is read is what transformers makes of it."""

import json

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.certify.tracing.trace_step import trace_step
from memfit.core.errors import InvalidRequest
from memfit.core.libraries import quiet_import
from memfit.families import read_model
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Quantisation
from memfit.train.measure.live import LiveBytes
from memfit.train.model.quantised import quantised_modules
from memfit.train.model.weights import check_weights, unpack_expert
from memfit.train.step.build import build_model, fill_weights
from tiny_models import CONFIGS, make_built, make_recipe

with quiet_import():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CPU = catalog.find_device("cpu-x86")
CONFIG = CONFIGS["gpt_oss"] | {
    "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


def packed(count, rows, columns, seed=0):
    """Random codes and scales of all experts of a layer."""
    numbers = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (count, columns, rows // 32, 16), generator=numbers)
    scales = torch.randint(118, 124, (count, columns, rows // 32), generator=numbers)
    return codes.to(torch.uint8), scales.to(torch.uint8)


def test_every_byte_and_scale_means_what_transformers_says():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 15, 1, 1)
    # a scale of 255 is no number, and transformers makes infinity of the largest ones
    scales = torch.arange(1, 241, dtype=torch.uint8).view(1, 15, 16)
    want = convert_moe_packed_tensors(codes, scales)[0]
    assert torch.equal(unpack_expert(codes[0], scales[0]), want)
    assert want.dtype == torch.bfloat16


@pytest.fixture
def published(tmp_path):
    """A folder as OpenAI's, tiny, and the dense weights that it stands for."""
    source = make_built(make_recipe("gpt_oss", config=CONFIG, method="full", precision="bf16"))
    stored, dense = {}, {}
    for seed, (name, parameter) in enumerate(source.model.named_parameters()):
        dense[name] = parameter.detach()
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = parameter.detach()
            continue
        codes, scales = packed(*parameter.shape, seed)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = codes, scales
        dense[name] = convert_moe_packed_tensors(codes, scales)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path, dense


def recipe_of(folder, **changes):
    recipe = make_recipe("gpt_oss", config=CONFIG, **changes)
    source = replace(recipe.model, source=str(folder))
    return replace(recipe, weights="pretrained", model=source)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "full", "precision": "bf16"},
        {"method": "lora", "precision": "bf16", "base_format": "nf4",
         "quantisation": Quantisation(double=True)},
    ],
    ids=["dense", "nf4"],
)  # fmt: skip
def test_a_published_folder_is_read_and_its_loading_holds_what_is_predicted(published, changes):
    folder, dense = published
    recipe = recipe_of(folder, **changes)
    check_weights(recipe)
    with LiveBytes("cpu") as live:
        model = build_model(recipe, "cpu")
        live.register_model(model)
        live.enter(Phase.LOAD)
        fill_weights(model, recipe)
    base, coded = find_adapter(recipe).base_parameters(model), quantised_modules(model)
    for name, weight in dense.items():
        if name in coded:
            error = coded[name].dense().float() - weight.float()
            assert error.norm() < 0.2 * weight.float().norm(), name
        else:
            assert torch.equal(base[name], weight), name
    traced = trace_step(recipe, CPU)
    assert live.peaks[Phase.LOAD] == traced.phases[Phase.LOAD]
    rows = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    predicted = predict_memory(rows, recipe, CPU).by_kind(Phase.LOAD)
    assert predicted[Kind.TEMPORARY] == traced.ledger.by_kind(Phase.LOAD)[Kind.TEMPORARY]


def test_scales_of_another_shape_and_another_coding_are_refused(published):
    folder, _ = published
    from safetensors.torch import load_file

    stored = load_file(folder / "model.safetensors")
    name = next(n for n in stored if n.endswith("_scales"))
    stored[name] = stored[name][:, 1:].contiguous()
    save_file(stored, folder / "model.safetensors")
    recipe = recipe_of(folder, method="full", precision="bf16")
    with pytest.raises(InvalidRequest, match=name):
        fill_weights(build_model(recipe, "cpu"), recipe)
    other = CONFIG | {"quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(InvalidRequest, match="stored quantised"):
        read_model(make_recipe("gpt_oss", config=other).model)
    llama = CONFIGS["llama"] | {"quantization_config": CONFIG["quantization_config"]}
    with pytest.raises(InvalidRequest, match="stored quantised"):
        read_model(make_recipe(config=llama).model)
