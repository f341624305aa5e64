"""Masks given to attention: the trace allocates what torch's own dispatcher does, call by call."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_steps import make_recipe
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.catalog import find_device
from memfit.certify.tracing.fake_device import fake_device
from memfit.certify.tracing.trace_step import trace_generation

EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"
ROWS, HEADS, SIZE = 2, 4, 16
H100 = find_device("h100-sxm")
Call = tuple[str, tuple[int, ...], tuple[int, ...]]  # operator, its result's sizes and strides


class Calls(TorchDispatchMode):
    """The operators that make a mask what a kernel reads, and the mask that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == EFFICIENT:
            bias = args[3]
            self.seen.append(("bias", tuple(bias.shape), bias.stride()))
            empty = torch.empty(1)
            return torch.empty_like(args[0]), empty, empty, empty
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() > 1:
            self.seen.append((str(func), tuple(out.shape), out.stride()))
        return out


@contextmanager
def efficient_is_chosen() -> Iterator[None]:
    """torch's own choice of a kernel answers `efficient` on the CPU: a table of C++ functions."""
    library = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
    stub = ctypes.c_void_p.in_dll(library, "_ZN2at6native22_fused_sdp_choice_stubE")
    answer = ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: SDPBackend.EFFICIENT_ATTENTION.value)
    before, stub.value = stub.value, ctypes.cast(answer, ctypes.c_void_p).value
    try:
        yield
    finally:
        stub.value = before


def attend(tokens: int, kind: str, device: str) -> list[Call]:
    dtype = torch.bool if kind == "bool" else torch.bfloat16
    shape = (tokens, tokens) if kind == "band" else (ROWS, 1, tokens, tokens)
    query = torch.zeros(ROWS, HEADS, tokens, SIZE, dtype=torch.bfloat16, device=device)
    mask = torch.zeros(shape, dtype=dtype, device=device)
    if kind == "shared":  # rows of the batch have one mask
        mask = mask[:1].expand(ROWS, -1, -1, -1)
    with Calls() as calls:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    return [call for call in calls.seen if "detach" not in call[0]]


@pytest.mark.parametrize("kind", ["bool", "numbers", "shared", "band"])
@pytest.mark.parametrize("tokens", [32, 40, 36, 33])
def test_a_mask_reaches_the_efficient_kernel_as_torch_prepares_it(tokens: int, kind: str) -> None:
    with efficient_is_chosen():
        theirs = attend(tokens, kind, "cpu")
    with fake_device(H100):
        mine = attend(tokens, kind, "cuda")
    assert mine == theirs
    assert theirs[-1][0] == "bias"


def test_a_text_longer_than_the_window_is_generated_under_autocast() -> None:
    """The mask is cast there, and the cast mask's rows are as long as the prompt: 23 tokens."""
    config = {
        "model_type": "phi3", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 80,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "sliding_window": 8, "pad_token_id": 0,
    }  # fmt: skip
    recipe = make_recipe(
        config=config, precision="bf16-mixed", attention="efficient", sequence_length=24
    )
    assert trace_generation(recipe, H100).peak > 0
