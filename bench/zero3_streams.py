"""What torch's allocator reserves for a step of DeepSpeed's ZeRO-3, replayed with its streams.

    python bench/zero3_streams.py

A Llama as transformers 4.34 computes it (fused attention, logits upcast and shifted) runs forward
and backward on the meta device; every storage that it makes and drops goes to memfit's replay of
the allocator. Beside it go what deepspeed 0.11.1's coordinator and optimizer take: weights gathered
on a stream of their own and given up after use, kept within 1e9 elements of their next use once the
order is known, fetched 1e7 ahead; gradients copied on a stream of their own, the host waiting for
the third last. `ahead`: whether the host is a whole forward ahead of the products, so that no
weight's block comes back in it, or never. Nothing is fitted. Results go to
bench/results/zero3_streams.json: peaks of the third step, bytes.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

from memfit.allocator.caching import CachingAllocator
from memfit.allocator.settings import Settings

RESULTS = Path(__file__).parent / "results" / "zero3_streams.json"
LAYERS, HIDDEN, WIDE, VOCAB, HEADS, RANKS = 32, 4096, 11008, 32000, 32, 8
LIVE = REUSE = 10**9  # elements: stage3_max_live_parameters, stage3_max_reuse_distance
AHEAD = REDUCED = 10**7  # elements: stage3_prefetch_bucket_size, reduce_bucket_size
GATHERS, REDUCTIONS = 1, 2  # streams; products have 0
CUBLAS = 8519680  # bytes of a workspace
STEPS = 3
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}


class Case(NamedTuple):
    """One replay."""

    rows: int
    tokens: int
    recompute: bool
    ahead: bool

    @property
    def name(self) -> str:
        return (
            f"{self.rows} x {self.tokens}{', recomputed' * self.recompute}"
            f"{', host a forward ahead' * self.ahead}"
        )


class Weight:
    """A weight that ranks share: a stand-in for its values, and its gathered block."""

    def __init__(self, *shape: int) -> None:
        self.values = torch.empty(*shape, requires_grad=True, **BF16)
        self.numel = self.values.numel()
        self.block: int | None = None


class Zero3:
    """Blocks of one rank: shares, gathered weights, gradients on their way."""

    def __init__(self, weights: list[Weight], *, ahead: bool) -> None:
        self.allocator, self.ahead, self.weights = CachingAllocator(Settings()), ahead, weights
        self.ids = 0
        self.order: list[Weight] = []  # of use, as the first step traced it
        self.traced, self.place, self.live = False, 0, 0
        self.given_up: list[int] = []
        self.pending: tuple[Weight, int] | None = None
        self.on_way: deque[tuple[int, int]] = deque()
        share = self.share = sum(w.numel for w in weights) // RANKS
        self.take(2 * share)
        self.take(4 * share)
        zeros = self.take(4 * share)  # for the first states
        for nbytes in (4 * share, 4 * share):
            self.take(nbytes)
        self.allocator.free(zeros)
        for nbytes in (2 * REDUCED, 2 * share, CUBLAS):
            self.take(nbytes)

    def take(self, nbytes: int, stream: int = 0) -> int:
        self.ids += 1
        self.allocator.allocate(self.ids, nbytes, stream)
        return self.ids

    def use(self, weight: Weight) -> None:
        """Before a module: its weight, and those that are next in the order."""
        self._gather(weight)
        if not self.traced:
            self.order.append(weight)
        self.place += 1
        fetched = 0
        for later in self.order[self.place :] if self.traced else ():
            if fetched >= min(LIVE - self.live, AHEAD):
                break
            fetched += self._gather(later)

    def done(self, weight: Weight) -> None:
        """After a module: kept where it is used again soon."""
        near = 0
        for later in self.order[self.place :] if self.traced else ():
            if near >= REUSE:
                break
            if later is weight:
                return
            near += later.numel
        self._give_up(weight)

    def _gather(self, weight: Weight) -> int:
        if weight.block is not None:
            return 0
        weight.block = self.take(2 * weight.numel, GATHERS)
        self.live += weight.numel
        return weight.numel

    def _give_up(self, weight: Weight) -> None:
        if weight.block is not None:
            self.given_up.append(weight.block)
            weight.block, self.live = None, self.live - weight.numel
            if not self.ahead:
                self.catch_up()

    def catch_up(self) -> None:
        """The products have passed everything that was given up."""
        for block in self.given_up:
            self.allocator.free(block)
        self.given_up.clear()

    def reduce(self, weight: Weight, gradient: int) -> None:
        """A whole gradient: the one before it is cut, its copy and it waited for later."""
        if self.pending is not None:
            while len(self.on_way) > 2:
                self._arrive()
            before, whole = self.pending
            self.on_way.append((self.take(2 * before.numel, REDUCTIONS), whole))
        self.pending = weight, gradient

    def _arrive(self) -> None:
        for block in self.on_way.popleft():
            self.allocator.free(block)
        self.catch_up()

    def update(self) -> None:
        """All has arrived; the share's gradients in fp32, then the next step."""
        if self.pending is not None:
            self.on_way.append((self.take(2 * self.pending[0].numel, REDUCTIONS), self.pending[1]))
        self.pending = None
        while self.on_way:
            self._arrive()
        for weight in self.weights:
            self._give_up(weight)
        self.catch_up()
        for block in (self.take(2 * self.share), self.take(4 * self.share)):
            self.allocator.free(block)
        self.traced, self.place = True, 0


class Follow(TorchDispatchMode):
    """Every storage that operators make goes to the allocator, until it is dropped."""

    def __init__(self, zero: Zero3) -> None:
        super().__init__()
        self.zero = zero
        self.blocks: dict[int, tuple[StorageWeakRef, int]] = {}
        self.others = {w.values.untyped_storage()._cdata for w in zero.weights}
        self.taken: list[Tensor] = []

    def sweep(self) -> None:
        for key in [key for key, (storage, _) in self.blocks.items() if storage.expired()]:
            self.zero.allocator.free(self.blocks.pop(key)[1])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sweep()
        made = func(*args, **(kwargs or {}))
        for value in tree_iter(made):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                key = storage._cdata
                if storage.nbytes() and key not in self.others and key not in self.blocks:
                    block = self.zero.take(storage.nbytes())
                    self.blocks[key] = StorageWeakRef(storage), block
        return made

    def take_over(self, gradient: Tensor) -> int:
        """A gradient's block, which the reduction frees."""
        self.sweep()
        key = gradient.untyped_storage()._cdata
        self.others.add(key)
        self.taken.append(gradient)
        return self.blocks.pop(key)[1]

    def give_up(self, weight: Weight, gradient: Tensor) -> None:
        """The end of a weight's backward: it is freed, and its gradient reduced."""
        block = self.take_over(gradient)
        self.zero.done(weight)
        self.zero.reduce(weight, block)

    def end_step(self) -> None:
        self.sweep()
        self.zero.update()
        self.others -= {gradient.untyped_storage()._cdata for gradient in self.taken}
        self.taken.clear()


class Linear(torch.autograd.Function):
    """DeepSpeed's: the weight itself is saved, not a view that would keep its gathered block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, weight: Weight, follow: Follow) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.weight, ctx.follow = weight, follow
        follow.zero.use(weight)
        made = x.matmul(values.t())
        follow.zero.done(weight)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,), (x, values) = grads, ctx.saved_tensors
        ctx.follow.zero.use(ctx.weight)
        to_input = grad.matmul(values)
        whole = grad.reshape(-1, grad.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
        ctx.follow.give_up(ctx.weight, whole)
        return to_input, None, None, None


class Embedding(torch.autograd.Function):
    """The rows of a gathered table."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, values: Tensor, weight: Weight, follow: Follow) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.follow = weight, follow
        follow.zero.use(weight)
        made = F.embedding(ids, values.detach())
        follow.zero.done(weight)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.follow.zero.use(ctx.weight)
        (ids,) = ctx.saved_tensors
        whole = torch.ops.aten.embedding_dense_backward(grads[0], ids, VOCAB, -1, False)
        ctx.follow.give_up(ctx.weight, whole)
        return None, None, None, None


class Flash(torch.autograd.Function):
    """What flash-attention makes and saves, without computing it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = torch.empty(q.shape, **BF16)
        sums = torch.empty(q.shape[0], HEADS, q.shape[1], device="meta")
        ctx.save_for_backward(q, k, v, made, sums)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        shape, sums = ctx.saved_tensors[0].shape, ctx.saved_tensors[4]
        made = tuple(torch.empty(shape, **BF16) for _ in range(3))
        _ = torch.empty(shape, device="meta"), torch.empty_like(sums)
        return made


class Llama:
    """The forward and its loss."""

    def __init__(self) -> None:
        self.table, self.head = Weight(VOCAB, HIDDEN), Weight(VOCAB, HIDDEN)
        square, up, down = (HIDDEN, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE)
        self.blocks = [
            [Weight(*shape) for shape in (square, square, square, square, up, up, down)]
            for _ in range(LAYERS)
        ]
        self.scale = torch.empty(HIDDEN, requires_grad=True, **BF16)  # norms stay gathered

    @property
    def weights(self) -> list[Weight]:
        return [self.table, *(w for block in self.blocks for w in block), self.head]

    def loss(self, ids: Tensor, follow: Follow, *, recompute: bool) -> Tensor:
        self.follow = follow
        tokens = ids.shape[1]
        mask = torch.zeros(ids.shape[0], 1, tokens, tokens, **BF16)  # made, though not asked for
        self.angles = [torch.empty(1, 1, tokens, HIDDEN // HEADS, **BF16) for _ in range(2)]
        x = Embedding.apply(ids, self.table.values, self.table, follow)
        for block in self.blocks:
            x = (
                checkpoint(self.block, x, block, use_reentrant=True)
                if recompute
                else (self.block(x, block))
            )
        logits = self.project(self.norm(x), self.head).float()
        del x, mask
        shifted, labels = logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous()
        return F.cross_entropy(shifted.view(-1, VOCAB), labels.view(-1))

    def block(self, x: Tensor, weights: list[Weight]) -> Tensor:
        rows, tokens, _ = x.shape
        normed = self.norm(x)
        heads = [
            self.project(normed, w).view(rows, tokens, HEADS, -1).transpose(1, 2)
            for w in weights[:3]
        ]
        del normed
        heads[:2] = [self.rotate(one) for one in heads[:2]]
        attended = Flash.apply(*(one.transpose(1, 2) for one in heads)).reshape(rows, tokens, -1)
        del heads
        x = x + self.project(attended, weights[3])
        del attended
        normed = self.norm(x)
        gate, up = F.silu(self.project(normed, weights[4])), self.project(normed, weights[5])
        return x + self.project(gate * up, weights[6])

    def project(self, x: Tensor, weight: Weight) -> Tensor:
        made: Tensor = Linear.apply(x, weight.values, weight, self.follow)
        return made

    def norm(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.scale * wide.to(x.dtype)

    def rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.angles
        half = x.shape[-1] // 2
        return (x * cos) + (torch.cat((-x[..., half:], x[..., :half]), -1) * sin)


def replay(case: Case) -> dict[str, int]:
    """Peaks of the third step."""
    model = Llama()
    zero = Zero3(model.weights, ahead=case.ahead)
    with Follow(zero) as follow:
        for _ in range(STEPS):
            zero.allocator.reset_peaks()
            ids = torch.zeros(case.rows, case.tokens, dtype=torch.long, device="meta")
            model.loss(ids, follow, recompute=case.recompute).backward()
            model.scale.grad = None
            follow.end_step()
    peaks = zero.allocator.peaks
    return {"active": peaks.allocated, "reserved": peaks.reserved}  # active: waiting ones too


def main() -> None:
    found: dict[str, dict[str, int]] = {}
    for rows, tokens, recompute in ((1, 4096, False), (3, 2048, False), (1, 4096, True)):
        for ahead in (False, True):
            case = Case(rows, tokens, recompute, ahead)
            found[case.name] = replay(case)
            print(case.name, {k: f"{n / 2**30:.2f} GiB" for k, n in found[case.name].items()})
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
