"""Which kernel of torch's an attention is asked of, call by call."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend

from memfit.core.errors import InvalidRequest
from memfit.train.model import attention

MATH, FLASH = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
CUDNN, EFFICIENT = SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION


@pytest.mark.parametrize(
    ("backend", "tokens", "asked"),
    [(CUDNN, 1, FLASH), (CUDNN, 2, CUDNN), (FLASH, 1, FLASH), (FLASH, 2, FLASH),
     (EFFICIENT, 1, EFFICIENT), (MATH, 1, MATH)],
)  # fmt: skip
def test_a_kernel_is_the_one_of_the_recipe_but_for_a_single_query_of_cudnns(
    monkeypatch, backend, tokens, asked
):
    seen = []
    monkeypatch.setattr(attention, "sdpa_kernel", lambda b: seen.append(b) or nullcontext())
    query, key, value = torch.randn(3, 1, 2, tokens, 8).unbind(0)
    out, _ = attention.attend(backend, torch.nn.Module(), query, key, value, None)
    assert seen == [asked]
    whole = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, whole.transpose(1, 2))


def test_an_older_cudnn_is_refused_where_it_would_run():
    attention._check_cudnn(None)
    attention._check_cudnn(91501)
    with pytest.raises(
        InvalidRequest, match=r"needs cuDNN 9\.15\.1 or newer, and torch has 9\.10\.2"
    ):
        attention._check_cudnn(91002)
