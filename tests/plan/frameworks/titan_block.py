"""A decoder block written as torchtitan writes it, and the bytes that stay alive after it."""

import gc
import weakref
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


class Alive(TorchDispatchMode):
    """Storages that operations made, by weak reference."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out

    def count(self, without):
        gc.collect()
        held = {k: n for k, (reference, n) in self.made.items() if reference() is not None}
        return sum(n for k, n in held.items() if k not in without)


class PythonNorm(nn.Module):
    """The RMSNorm of torchtitan before torch's own."""

    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16))

    def forward(self, x):
        whole = x.float()
        normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self, hidden, heads, kv_heads, ffn):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.norms = nn.ModuleList([PythonNorm(hidden), PythonNorm(hidden)])
        self.wq, self.wo = self._linear(hidden, hidden), self._linear(hidden, hidden)
        self.wk = self._linear(hidden, kv_heads * self.size)
        self.wv = self._linear(hidden, kv_heads * self.size)
        self.w1, self.w3 = self._linear(hidden, ffn), self._linear(hidden, ffn)
        self.w2 = self._linear(ffn, hidden)

    @staticmethod
    def _linear(n, m):
        return nn.Linear(n, m, bias=False, dtype=torch.bfloat16)

    def _heads(self, x, heads, turns):
        x = x.view(1, -1, heads, self.size)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    def attention(self, x, turns):
        tokens = x.shape[1]
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k = self._heads(q, self.heads, turns), self._heads(k, self.kv_heads, turns)
        v = v.view(1, tokens, self.kv_heads, self.size)
        q, k, v = (
            t.repeat_interleave(self.heads // t.shape[2], 2).transpose(1, 2) for t in (q, k, v)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(1, tokens, -1))

    def forward(self, x, turns):
        x = x + self.attention(self.norms[0](x), turns)
        y = self.norms[1](x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def policy_contexts():
    """torchtitan's per-op policy: attention, and every other matrix product."""
    counts = defaultdict(int)
    listed = {torch.ops.aten.mm.default,
              torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}  # fmt: skip

    def policy(context, operation, *args, **kwargs):
        if operation == torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
        even = operation == torch.ops.aten.mm.default and counts[context.is_recompute] % 2 == 0
        saved = operation in listed and not even
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def alive_after(hidden, heads, kv_heads, ffn, tokens, *, selective):
    """Bytes of one block's forward that its backward waits for: input counted, output not."""
    torch.manual_seed(0)
    block = Block(hidden, heads, kv_heads, ffn)
    weights = {p.untyped_storage()._cdata for p in block.parameters()}
    leaf = torch.ones(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(1, tokens, 1, hidden // heads // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    with Alive() as alive:
        x = leaf * 1
        if selective:
            out = checkpoint(block, x, turns, use_reentrant=False, preserve_rng_state=False,
                             context_fn=policy_contexts)  # fmt: skip
        else:
            out = block(x, turns)
        del x
        kept = alive.count(weights)
    return kept - 2 * tokens * hidden, out  # the output belongs to the next block
