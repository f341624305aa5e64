"""Documents end to end under one call of the kernel, on a real GPU: skipped where there is none."""

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
from memfit.train.measure.counters import measure  # noqa: E402
from memfit.train.model.attention import BACKENDS, attend  # noqa: E402
from memfit.train.model.varlen import attend_end_to_end  # noqa: E402
from tiny_models import make_recipe  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
DOCUMENTS = ((700, 1, 323), (1024,))
# of the largest element: 8 and 11 bits of mantissa, and sums of a thousand of them
CLOSE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
CONFIG = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


def run(function, dtype, **options):
    """What comes out, and the gradients of query, key and value."""
    torch.manual_seed(0)
    made = [torch.randn(2, heads, 1024, 64, device="cuda") for heads in (16, 4, 4)]
    given = [x.to(dtype).requires_grad_() for x in made]
    out, _ = function(torch.nn.Module(), *given, None, documents=DOCUMENTS, **options)
    torch.manual_seed(1)
    (out * torch.randn_like(out)).sum().backward()
    return [out, *(x.grad for x in given)]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("window", [None, 100])
def test_one_call_equals_one_call_a_document(dtype, window):
    kernel = BACKENDS["math" if window else "flash"]
    options = {"sliding_window": window, "scaling": 0.1}
    want = run(lambda *a, **k: attend(kernel, *a, **k), dtype, **options)
    have = run(attend_end_to_end, dtype, **options)
    for a, b in zip(have, want, strict=True):
        error = (a.float() - b.float()).abs().max() / b.float().abs().max()
        assert error <= CLOSE[dtype]


@pytest.mark.slow
def test_certified_memory_is_what_the_step_takes():
    try:
        device = catalog.find_device(torch.cuda.get_device_name(0))
    except UnknownName as error:
        pytest.skip(f"no catalogue row for this GPU: {error.message}")
    recipe = make_recipe(
        config=CONFIG, attention="varlen", packing=True, precision="bf16", base_format="bf16",
        sequence_length=1024, micro_batch=4, optimizer={"name": "sgd", "momentum": 0.0},
    )  # fmt: skip
    recipe = replace(recipe, device=device.id)
    certified = make_certificate(recipe, device, None, None).memory.peak_allocated
    measured = measure(recipe, device, steps=3).measurements["memory.peak_allocated"].value
    assert measured <= certified * 1.001
    assert certified <= measured * 1.02
