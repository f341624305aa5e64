"""What does not go together is refused in the words of docs/refusals.toml, and is still a fact."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from refusals_page import answer, read_refusals

from memfit.records.ledger import Phase
from memfit.train.measure.live import LiveBytes
from tiny_models import CONFIGS

SDPA = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip


@pytest.mark.parametrize("row", read_refusals(), ids=lambda row: row.name)
def test_it_is_refused_in_these_words_with_what_to_use_instead(row):
    error = answer(row)
    assert error is not None
    assert row.says in error.message
    assert re.match(r"use |leave |name |.*memfit ", error.hint)


def arguments(kernel):
    return {argument.name for argument in getattr(torch.ops.aten, kernel).default._schema.arguments}


def build(family):
    config = dict(CONFIGS[family])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


# -- the facts: where one fails, a refusal can go ---------------------------------------------


def test_integers_still_take_no_gradient():
    with pytest.raises(RuntimeError, match="floating point"):
        nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=True)


def test_experts_are_still_one_parameter_and_no_linear():
    model = build("mixtral")
    assert [p.dim() for name, p in model.named_parameters() if "experts" in name].count(3) > 0
    assert not [m for n, m in model.named_modules() if "experts." in n and type(m) is nn.Linear]


def test_gpt2s_projections_are_still_no_linear():
    linear = [name for name, m in build("gpt2").named_modules() if isinstance(m, nn.Linear)]
    assert linear == ["lm_head"]


def test_peft_still_unpacks_a_base_to_measure_it():
    from peft.tuners.lora import dora

    assert "dequantize" in inspect.getsource(dora.DoraLinearLayer)


def test_bf16_still_loses_what_a_step_moves_a_magnitude_by():
    magnitude = torch.tensor(1.0)
    assert (magnitude * 1.0038).bfloat16() == magnitude.bfloat16()


def test_fp8_products_are_still_of_multiples_of_16():
    with FakeTensorMode():
        one = torch.ones((), device="cuda")

        def product(rows, inner):
            x = torch.empty(rows, inner, device="cuda", dtype=torch.float8_e4m3fn)
            w = torch.empty(32, inner, device="cuda", dtype=torch.float8_e4m3fn).t()
            return torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        assert product(32, 32).shape == (32, 32)
        with pytest.raises(Exception, match="16"):
            product(32, 40)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_torchs_optimizers_still_round_to_nearest(optimizer):
    known = inspect.signature(getattr(torch.optim, optimizer)).parameters
    assert not [name for name in known if "stochastic" in name or "round" in name]


def test_torchs_kernels_of_attention_still_know_no_cap_and_no_sinks():
    for kernel in SDPA:
        assert not {a for a in arguments(kernel) if "cap" in a or "sink" in a}, kernel


def test_flash_attention_on_cuda_still_takes_no_bias():
    assert not {a for a in arguments(SDPA[0]) if "bias" in a or "mask" in a} - {"return_debug_mask"}
    assert "attn_bias" in arguments(SDPA[1])


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_classes_with_alibi_still_take_no_positions(family):
    assert "position_ids" not in inspect.signature(build(family).forward).parameters


def test_fake_tensors_still_have_no_address():
    """Which a kernel needs that Python launches itself, and no operator of torch's."""
    with FakeTensorMode():
        x = torch.empty(4, device="cuda")
        with pytest.warns(UserWarning, match="data pointer of FakeTensor"):
            assert x.data_ptr() == 0


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch 2.13 has it")
def test_torchs_fused_loss_still_hides_its_logits_and_rounds_its_value():
    torch.manual_seed(0)
    tokens, width, vocab, chunk = 64, 16, 1024, 16
    hidden, weight = torch.randn(tokens, width), torch.randn(vocab, width)
    labels = torch.randint(0, vocab, (tokens,))
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)

    def fused(dtype):
        x, w = (t.to(dtype).requires_grad_() for t in (hidden, weight))
        return nn.functional.linear_cross_entropy(x, w, labels, options=options)

    live = LiveBytes("cpu")
    with live:
        live.enter(Phase.LOSS)
        fused(torch.float32)
    gradients = 4 * (hidden.numel() + weight.numel())
    assert live.peaks[Phase.LOSS] < gradients + 4 * chunk * vocab  # a chunk's logits are not there
    rounded = fused(torch.bfloat16).detach()
    logits = hidden.bfloat16() @ weight.bfloat16().t()
    exact = nn.functional.cross_entropy(logits.float().detach(), labels)
    assert rounded.dtype is torch.bfloat16
    assert abs(float(rounded) / float(exact) - 1) > 1e-3
