"""litgpt's step against a block written in torch, hand-worked sums and litgpt's own tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memfit.core.errors import InvalidRequest
from memfit.plan.frameworks.hugging_face.quantised import quantised_bytes
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.plan.search.search import predict_request
from memfit.records import from_data
from memfit.records.ledger import Kind, Phase
from memfit.records.request import Request
from memfit.records.results import Plan

LLAMA_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip
STABLELM = {
    "model_type": "gpt_neox", "vocab_size": 50688, "hidden_size": 4096, "intermediate_size": 16384,
    "num_hidden_layers": 16, "num_attention_heads": 32, "max_position_embeddings": 4096,
    "rotary_pct": 0.25, "use_parallel_residual": True,
}  # fmt: skip
TINY_LLAMA = LLAMA_7B | {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
PHI_2 = {
    "model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 2048, "partial_rotary_factor": 0.4,
}  # fmt: skip
EVERYTHING = ["query", "key", "value", "projection", "mlp", "head"]


def ask(model: dict[str, Any] | str, tokens: int, **changes: Any) -> Request:
    rows = changes.pop("rows", 1)
    batch = changes.pop("batch", rows)
    asked: dict[str, Any] = {
        "framework": "litgpt", "model": model, "hardware": {"device": "a100-sxm-40"},
        "task": {"sequence_length": tokens, "global_batch": batch, "packing": False},
        "micro_batch": rows, "method": "lora",
        "lora": {"rank": 8, "targets": ["query", "value"], "dropout": 0.05},
        "options": {"longest_samples": "one"},
    }  # fmt: skip
    return from_data(asked | changes, Request, source="request")


def predict(model: dict[str, Any] | str, tokens: int, **changes: Any) -> Plan:
    return predict_request(ask(model, tokens, **changes))


# tutorials/resource-tables.md and config_hub/finetune/README.md: max_memory_allocated in 1e9 B
PUBLISHED = [
    (21.30, LLAMA_7B, 1304, {}),
    (14.14, LLAMA_7B, 1304, {"base_format": "nf4"}),
    (13.84, LLAMA_7B, 1304, {
        "base_format": "nf4", "options": {"double_quantisation": True, "longest_samples": "one"},
    }),
    (9.69, STABLELM, 1034, {}),
    (16.92, STABLELM, 1034, {"rows": 4}),
    (13.68, LLAMA_7B, 512, {
        "rows": 2, "batch": 8, "base_format": "nf4", "options": {"release": "0.4"},
        "lora": {"rank": 32, "targets": ["query", "value"], "dropout": 0.05},
    }),
    (13.50, TINY_LLAMA, 512, {
        "rows": 8, "options": {"release": "0.4"},
        "lora": {"rank": 32, "targets": EVERYTHING, "dropout": 0.05},
    }),
    (16.24, TINY_LLAMA, 512, {
        "rows": 8, "options": {"release": "0.4"}, "base_format": "nf4",
        "lora": {"rank": 32, "targets": EVERYTHING, "dropout": 0.05},
    }),
    (14.10, TINY_LLAMA, 512, {
        "rows": 4, "batch": 32, "method": "full", "options": {"release": "0.4"},
    }),
    (29.84, TINY_LLAMA, 2048, {  # extensions/thunder/README.md, without Thunder
        "rows": 4, "batch": 512, "method": "full", "loss": "plain", "options": {"release": "0.4"},
    }),
    (32.04, TINY_LLAMA, 2048, {
        "rows": 4, "batch": 512, "method": "full", "loss": "plain", "options": {"release": "0.4"},
        "parallel": {"dp_replicate": 8}, "hardware": {"device": "a100-sxm-40", "count": 8},
    }),
    (14.44, PHI_2, 512, {
        "rows": 4, "batch": 8, "method": "full", "recompute": "full", "parallel": {"dp_shard": 2},
        "hardware": {"device": "a10g", "count": 2}, "options": {"release": "0.4"},
    }),
    (14.27, PHI_2, 512, {
        "rows": 4, "batch": 8, "base_format": "nf4", "options": {"release": "0.4"},
        "lora": {"rank": 8, "targets": EVERYTHING, "dropout": 0.05},
        "hardware": {"device": "a10g"},
    }),
    (13.52, "gemma-2-2b", 512, {
        "rows": 2, "batch": 6, "base_format": "nf4", "options": {"release": "0.4"},
        "lora": {"rank": 16, "targets": EVERYTHING, "dropout": 0.1},
        "hardware": {"device": "a10g"},
    }),
    (22.18, LLAMA_7B, 1304, {
        "batch": 128, "recompute": "full", "parallel": {"dp_shard": 2},
        "hardware": {"device": "a100-sxm-40", "count": 2},
    }),
    (23.39, LLAMA_7B, 1304, {
        "rows": 4, "batch": 128, "recompute": "full", "parallel": {"dp_shard": 2},
        "hardware": {"device": "a100-sxm-40", "count": 2},
    }),
]  # fmt: skip


@pytest.mark.parametrize(("measured", "model", "tokens", "changes"), PUBLISHED)
def test_published_peaks(
    measured: float, model: dict[str, Any] | str, tokens: int, changes: dict[str, Any]
) -> None:
    peak = predict(model, tokens, **changes).memory.peak_allocated
    assert peak == pytest.approx(measured * 1e9, rel=0.015)


def test_what_ran_out_of_memory_does_not_fit() -> None:
    model = LLAMA_7B | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_attention_heads": 40, "num_key_value_heads": 40,
    }  # fmt: skip
    assert predict(model, 1304, rows=2).memory.verdict == "does_not_fit"


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class Block(nn.Module):
    """A gated block with adapters on query and value, as litgpt computes it."""

    def __init__(self, hidden: int, heads: int, keys: int, ffn: int, rank: int) -> None:
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, hidden // heads
        fused = (heads + 2 * keys) * self.size
        self.norm_1, self.norm_2 = Norm(hidden), Norm(hidden)
        self.qkv = nn.Linear(hidden, fused, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)
        self.requires_grad_(False)
        self.low = nn.Parameter(torch.zeros(2 * rank, hidden))
        self.high = nn.Parameter(torch.zeros(hidden + keys * self.size, rank))
        columns = [*range(hidden), *range(hidden + keys * self.size, fused)]
        self.columns = torch.tensor(columns)

    def adapt(self, x: torch.Tensor) -> torch.Tensor:
        plain = self.qkv(x)
        low = F.linear(F.dropout(x, 0.05), self.low).transpose(-2, -1)
        parts = self.high.unsqueeze(-1).split([self.heads * self.size, self.keys * self.size])
        halves = low.chunk(2, dim=1)
        joined = torch.cat([F.conv1d(a, b) for a, b in zip(halves, parts, strict=True)], dim=1)
        full = plain.new_zeros(plain.shape)
        return plain + full.index_copy_(-1, self.columns, joined.transpose(-2, -1)) * 2.0

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, tokens, hidden = x.shape
        q, k, v = self.adapt(self.norm_1(x)).split(
            (hidden, self.keys * self.size, self.keys * self.size), dim=-1
        )
        q = self.turn(q.view(rows, tokens, self.heads, self.size).transpose(1, 2), cos, sin)
        k = self.turn(k.view(rows, tokens, self.keys, self.size).transpose(1, 2), cos, sin)
        v = v.view(rows, tokens, self.keys, self.size).transpose(1, 2)
        if self.heads != self.keys:
            groups = self.heads // self.keys
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.proj(y.transpose(1, 2).reshape(rows, tokens, hidden)) + x
        normed = self.norm_2(x)
        return self.down(F.silu(self.gate(normed)) * self.up(normed)) + x

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return torch.cat(((x * cos + turned * sin).to(x.dtype), x[..., 2 * half :]), dim=-1)


def saved_by(block: Block, tokens: int) -> int:
    """Bytes of the storages that one block's graph keeps, its parameters aside."""
    known = {p.untyped_storage().data_ptr() for p in block.parameters()}
    known |= {block.columns.untyped_storage().data_ptr()}
    turn = torch.ones(1, 1, tokens, block.size)
    known.add(turn.untyped_storage().data_ptr())
    kept: dict[int, Any] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in known:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    x = torch.zeros(2, tokens, block.qkv.in_features, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        block(x, turn, turn)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.parametrize("keys", [4, 2])
def test_a_block_keeps_what_torch_keeps(keys: int) -> None:
    tokens, hidden, ffn = 48, 64, 96
    model = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": 4, "num_key_value_heads": keys, "max_position_embeddings": 64,
    }  # fmt: skip
    held = []
    for layers in (4, 5):
        request = ask(
            model | {"num_hidden_layers": layers}, tokens, rows=2, hardware={"device": "cpu"}
        )
        recipe, described, _ = read_defaults(request)
        ledger = predict_ledger(recipe, described, find_device("cpu"))
        held.append(ledger.by_kind(Phase.LOSS)[Kind.ACTIVATIONS])
    block = Block(hidden, 4, keys, ffn, rank=8).bfloat16()
    indices = block.columns.numel() * block.columns.element_size()  # ours counts them a block
    assert held[1] - held[0] - indices == saved_by(block, tokens)


def test_quantised_bytes() -> None:
    """A (4096, 4096) weight: 4 bits each and one fp32 scale for 64 (2305.14314, section 3)."""
    whole = 4096, 4096
    assert quantised_bytes("nf4", whole, double=False) == 8388608 + 262144 * 4 + 16 * 4
    nested = 8388608 + 262144 + 1024 * 4 + (256 + 16 + 1) * 4
    assert quantised_bytes("nf4", whole, double=True) == nested
    assert quantised_bytes("fp4", (65, 1), double=False) == 33 + 2 * 4 + 64  # ragged: rounded up
    assert quantised_bytes("int8", (10, 64), double=True) == 640 + 40


def test_gradients_wait_unsharded_while_they_accumulate() -> None:
    asked = {
        "recompute": "full", "parallel": {"dp_shard": 2},
        "hardware": {"device": "a100-sxm-40", "count": 2},
    }  # fmt: skip
    many = predict(LLAMA_7B, 512, batch=64, **asked).ledger
    once = predict(LLAMA_7B, 512, batch=2, **asked).ledger
    block = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096 + 2 * 8 * 4096 + 2 * 4096 * 8
    assert many.by_kind(Phase.ACCUMULATE)[Kind.GRADIENTS] == 32 * block * 2
    assert many.by_kind(Phase.OPTIMIZER_STEP)[Kind.GRADIENTS] == 32 * block
    assert once.by_kind(Phase.OPTIMIZER_STEP)[Kind.GRADIENTS] == 32 * block


def test_heads_are_never_tied() -> None:
    tied = predict(TINY_LLAMA | {"tie_word_embeddings": True}, 512)
    assert tied.memory.peak_allocated == predict(TINY_LLAMA, 512).memory.peak_allocated


def test_a_family_that_litgpt_writes_otherwise_is_refused() -> None:
    model = TINY_LLAMA | {"model_type": "qwen3", "head_dim": 64}
    with pytest.raises(InvalidRequest, match="litgpt's model for the family `qwen3`"):
        predict(model, 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "full", "base_format": "nf4"}, "cannot train weights stored as"),
        ({"base_format": "int8"}, "`base_format: int8` is not described"),
        ({"recompute": "full"}, "recomputes every block on more than one device and none on one"),
        ({"loss": "plain"}, "`loss: plain` is of litgpt's pretraining"),
        ({"lora": {"targets": ["gate"]}}, "litgpt has no switch for `gate`"),
        (
            {
                "base_format": "nf4", "recompute": "full", "parallel": {"dp_shard": 2},
                "hardware": {"device": "a100-sxm-40", "count": 2}, "batch": 2,
            },
            "quantises on one device only",
        ),
    ],
)  # fmt: skip
def test_what_litgpt_has_not(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        predict(TINY_LLAMA, 512, **changes)
