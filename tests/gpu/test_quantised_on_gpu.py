"""Quantised products and their memory on a real GPU; skipped with a reason where there is none.

What a CPU cannot show: bitsandbytes' int8 product (cuBLASLt), its 4-bit kernels, and what both
allocate inside themselves.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from memfit import catalog  # noqa: E402
from memfit.certify.evidence.certificate import make_certificate  # noqa: E402
from memfit.core.errors import UnknownName  # noqa: E402
from memfit.core.libraries import quiet_import  # noqa: E402
from memfit.records.recipe import Lora, Quantisation, Recipe  # noqa: E402
from memfit.train.measure.counters import measure  # noqa: E402
from memfit.train.model.quantised import QuantisedLinear  # noqa: E402
from tiny_models import make_recipe  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
FORMATS = {
    "nf4": Quantisation(double=True),
    "fp4": Quantisation(),
    "int8": Quantisation(outlier_threshold=6.0, outlier_share=0.05),
}
CONFIG = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def recipe_of(base_format: str, **changes: object) -> Recipe:
    return make_recipe(
        method="lora", base_format=base_format, precision="bf16",
        quantisation=FORMATS[base_format], **changes,
    )  # fmt: skip


def linear_of(base_format: str) -> tuple[torch.nn.Linear, QuantisedLinear]:
    torch.manual_seed(0)
    old = torch.nn.Linear(1024, 512, bias=False, dtype=torch.bfloat16, device="cuda")
    made = QuantisedLinear(old, recipe_of(base_format))
    for name, parameter in made.stored().items():
        made._parameters[name] = torch.nn.Parameter(
            torch.empty_like(parameter, device="cuda"), False
        )
    made.store(old.weight.data)
    return old, made


@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize("base_format", FORMATS)
def test_a_product_and_its_gradient_are_those_with_the_dense_weight(
    base_format: str, tokens: int
) -> None:
    _, made = linear_of(base_format)
    x = torch.randn(tokens, 1024, dtype=torch.bfloat16, device="cuda")
    x[:, 5] *= 30
    x.requires_grad_()
    product = made(x)
    product.sum().backward()
    dense = made.dense().float()
    limit = 2e-2 if base_format == "int8" else 1e-2
    want = x.detach().float() @ dense.T
    assert (product.float() - want).norm() <= limit * want.norm()
    slope = torch.ones(tokens, 512, device="cuda") @ dense
    assert (x.grad.float() - slope).norm() <= 1e-2 * slope.norm()


def test_the_int8_product_is_bitsandbytes_own() -> None:
    with quiet_import():
        from bitsandbytes.autograd._functions import MatMul8bitLt, MatmulLtState
    _, made = linear_of("int8")
    state = MatmulLtState(CB=made.weight, SCB=made.factors())
    state.has_fp16_weights, state.threshold = False, made.threshold
    x = torch.randn(256, 1024, dtype=torch.bfloat16, device="cuda")
    x[:, 5] *= 30
    assert torch.equal(made(x), MatMul8bitLt.apply(x, made.weight, None, None, state))


@pytest.mark.slow
@pytest.mark.parametrize("base_format", FORMATS)
def test_the_certificate_is_at_least_what_the_allocator_counts(base_format: str) -> None:
    """An upper bound: outliers are fewer than allowed, fused 4-bit kernels are counted as dense."""
    try:
        device = catalog.find_device(torch.cuda.get_device_name(0))
    except UnknownName as error:
        pytest.skip(f"no catalogue row for this GPU: {error.message}")
    recipe = recipe_of(
        base_format, config=CONFIG, sequence_length=2048, loss="chunked", loss_chunk=1024,
        lora=Lora(rank=16, alpha=32.0, targets=("q_proj", "v_proj")),
    )  # fmt: skip
    recipe = replace(recipe, device=device.id)
    certified = make_certificate(recipe, device, None, None).memory.peak_allocated
    measured = measure(recipe, device, steps=3).measurements["memory.peak_allocated"].value
    assert measured <= certified * 1.001
    assert certified <= measured * 1.1
