"""Loading: the tensor of a file that is alive beside the parameters, predicted and certified."""

import pytest
from test_instants import pretrained
from tiny_steps import CPU, make_recipe

from memfit.adapters import find_adapter
from memfit.certify.tracing.trace_step import trace_step
from memfit.families import read_model
from memfit.families.weight_files.headers import read_widths
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records.ledger import Kind, Phase
from memfit.train.measure.live import LiveBytes
from memfit.train.model.weights import fill_weights
from memfit.train.step.build import build_model

BF16 = {"precision": "bf16", "base_format": "bf16"}
LORA = {"method": "lora"}
QUANTISED_DTYPE = {"method": "lora", "base_format": "nf4", "precision": "bf16-mixed"}
CASES = {
    "llama, fp32 file": ("llama", "fp32", {}), "llama, bf16 file": ("llama", "bf16", {}),
    "llama, fp32 file, bf16": ("llama", "fp32", BF16), "llama, lora": ("llama", "bf16", LORA),
    "llama, nf4": ("llama", "bf16", QUANTISED_DTYPE),
    "gpt2": ("gpt2", "fp32", {}), "qwen2, tied": ("qwen2", "bf16", {}),
    "gpt_neox": ("gpt_neox", "fp16", {}), "opt": ("opt", "fp32", {}),
    "mixtral, experts apart": ("mixtral", "bf16", {}),
    "qwen3_moe, experts apart": ("qwen3_moe", "fp32", {}), "bloom": ("bloom", "fp32", {}),
}  # fmt: skip


def load_of(recipe):
    """Predicted, certified and measured live bytes of the phase `load`."""
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    predicted = predict_memory(model, recipe, CPU).total(Phase.LOAD)
    with LiveBytes("cpu") as live:
        built = build_model(recipe, "cpu")
        live.register_model(built)
        live.enter(Phase.LOAD)
        fill_weights(built, recipe)
    return predicted, trace_step(recipe, CPU).phases[Phase.LOAD], live.peaks[Phase.LOAD]


ALIKE = ("opt", "gpt_neox", "mixtral, experts apart")  # files as gpt2's, bloom's and qwen3_moe's


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.wide] if n in ALIKE else []) for n in CASES]
)
def test_loading_is_predicted_as_it_is_certified_and_measured(name, tmp_path) -> None:
    family, stored, changes = CASES[name]
    predicted, certified, measured = load_of(pretrained(tmp_path / "m", stored, family, **changes))
    assert predicted == certified == measured
    random = make_recipe(family, **changes)
    assert len({*load_of(random)}) == 1
    assert predicted > load_of(random)[0]


def test_a_files_tensor_is_counted_by_kind(tmp_path) -> None:
    recipe = pretrained(tmp_path / "m", "fp32")
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger = predict_memory(model, recipe, CPU)
    largest = max(w.numel for w in read_model(recipe.model).weights)
    assert ledger.by_kind(Phase.LOAD)[Kind.TEMPORARY] == 4 * largest


def test_files_that_are_not_here_are_unknown(tmp_path) -> None:
    assert read_widths("") == read_widths("nobody/nothing") == read_widths(str(tmp_path)) == {}
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    assert read_widths(str(tmp_path)) == {}
