"""Small blocks with known bytes: whether this torch imitates the device, before it certifies.

What `fake_device` changes rests on torch's internals. If a version moved one of them, a trace
would still run and count other tensors. So each imitation is run on a few tensors first, whose
bytes follow from their shapes; a version that nobody has tried is proved here, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import grouped_mm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from memfit.core.errors import NotCertified
from memfit.train.measure.live import LiveBytes

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 4, 48, 64
HIDDEN, FFN = 64, 176
Figures = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """One imitation: the bytes that its shapes imply, those found, and operators not seen."""

    what: str
    expected: Figures
    found: Figures
    missing: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return self.expected == self.found and not self.missing

    def __str__(self) -> str:
        """What differs, with both figures."""
        if self.missing:
            return f"{self.what}: ran without {', '.join(self.missing)}"
        return f"{self.what}: {_show(self.expected)} B expected, {_show(self.found)} B found"


def check_imitation(kind: str, *, flash: bool = True) -> tuple[Proof, ...]:
    """Prove that fake tensors of this kind hold the bytes that real ones hold; all proofs made.

    flash: whether the device has the flash kernel (CUDA's needs compute capability 8.0).
    Call it inside `fake_device`. Raises NotCertified naming what differs.
    """
    made: list[Proof] = []
    failed: list[str] = []
    for prove in _PROOFS + _FLASH * flash + _CUDA * (kind == "cuda"):
        try:
            made += prove(kind)
        except Exception as error:
            failed.append(f"{prove.__name__[1:]}: {type(error).__name__}: {error}")
    failed += [str(proof) for proof in made if not proof.holds]
    if failed:
        raise NotCertified(
            f"torch {torch.__version__} does not imitate a {kind} device: {'; '.join(failed)}",
            hint="torch 2.11, 2.13 and 2.15 pass this check; please report this version",
        )
    return tuple(made)


@dataclass(frozen=True, slots=True)
class _Watched:
    saved: int  # bytes more than before, when the call is over and its result is alive
    peak: int  # bytes more than before at the highest moment
    operators: frozenset[str]  # those that allocated

    def without(self, *names: str) -> tuple[str, ...]:
        return tuple(name for name in names if name not in self.operators)


def _watch(kind: str, existing: Sequence[Tensor], call: Callable[[], Any]) -> _Watched:
    live = LiveBytes(kind)
    live.register_batch(*existing)
    known = len(live.blocks)
    with live:
        before = live.live
        result = call()
        saved = live.live - before
    del result
    names = frozenset(block.op.partition(".")[0] for block in live.blocks[known:])
    return _Watched(saved, live.peak - before, names)


def _empty(kind: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=kind, requires_grad=True)


def _nothing_is_computed(kind: str) -> list[Proof]:
    made = torch.empty(1, device=kind)
    missing = () if type(made) is FakeTensor else ("fake tensors",)
    return [Proof("a tensor", (4,), (made.nbytes,), missing)]


_NUMEL, _ROWS = BATCH * HEADS * TOKENS * HEAD_DIM, BATCH * HEADS * TOKENS


def _flash_attention(kind: str) -> list[Proof]:
    """Output and log-sum-exp; CUDA's kernel also returns its random state, 24 bytes."""
    name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if kind == "cpu" else "")
    saved = 2 * _NUMEL + 4 * _ROWS + (24 if kind == "cuda" else 0)
    return [
        *_attention(kind, SDPBackend.FLASH_ATTENTION, torch.bfloat16, saved, name),
        *_attention(kind, None, torch.bfloat16, saved, name),
    ]


def _efficient_attention(kind: str) -> list[Proof]:
    """Output, log-sum-exp of tokens rounded up to 32, seed and offset."""
    name = "_scaled_dot_product_efficient_attention"
    saved = 4 * _NUMEL + 4 * BATCH * HEADS * -(-TOKENS // 32) * 32 + 16
    return [
        *_attention(kind, SDPBackend.EFFICIENT_ATTENTION, torch.float32, saved, name),
        *_attention(kind, None, torch.float32, saved, name),
    ]


def _math_attention(kind: str) -> list[Proof]:
    """Output, fp32 copies of query, key and value, and the probabilities of every pair."""
    saved = (2 + 3 * 4) * _NUMEL + 4 * _ROWS * TOKENS
    return _attention(kind, SDPBackend.MATH, torch.bfloat16, saved, "_safe_softmax")


def _attention(
    kind: str, backend: SDPBackend | None, dtype: torch.dtype, saved: int, name: str
) -> list[Proof]:
    """Forward: what is saved for backward; backward: three gradients and nothing else.

    backend: the only kernel that is enabled; None enables all, as a model that names none does.
    """
    query, key, value = (
        _empty(kind, BATCH, HEADS, TOKENS, HEAD_DIM, dtype=dtype) for _ in range(3)
    )
    out: list[Tensor] = []

    def attend() -> None:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out.append(scaled_dot_product_attention(query, key, value, is_causal=True))

    inputs = [query, key, value]
    forward = _watch(kind, inputs, attend)
    outer = torch.empty_like(out[0])
    backward = _watch(
        kind, [*inputs, *out, outer], lambda: torch.autograd.grad(out[0], inputs, outer)
    )
    missing = forward.without(name)
    if backend is not SDPBackend.MATH:
        missing += backward.without(f"{name}_backward")
    chosen = "default" if backend is None else backend.name.lower().removesuffix("_attention")
    what = f"{chosen} attention of {str(dtype).removeprefix('torch.')}"
    return [
        Proof(f"what {what} keeps", (saved,), (forward.saved,), missing),
        Proof(f"gradients of {what}", (3 * outer.nbytes,), (backward.saved,)),
    ]


def _a_block(kind: str) -> list[Proof]:
    """Norm and gated feed-forward in bf16: the tensors that a block keeps for its backward."""
    tokens, shapes = TOKENS, ((HIDDEN,), (FFN, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))
    norm, gate, up, down = weights = [_empty(kind, *shape) for shape in shapes]
    x = _empty(kind, tokens, HIDDEN)

    def block() -> Tensor:
        wide = x.float()
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)
        normed = norm * scaled
        return x + (silu(normed @ gate.t()) * (normed @ up.t())) @ down.t()

    found = _watch(kind, [x, *weights], block)
    # fp32 input of the norm and its factor; scaled and normed; gate, up, silu and their product
    saved = tokens * (4 * HIDDEN + 4 + 2 * 2 * HIDDEN + 4 * 2 * FFN)
    return [Proof("tensors that a block keeps", (saved + 2 * tokens * HIDDEN,), (found.saved,))]


def _grouped_products(kind: str) -> list[Proof]:
    """Rows with the matrices of their groups: the product, and gradients of both; in any dtype."""
    return [_grouped_product(kind, dtype) for dtype in (torch.bfloat16, torch.float32)]


def _grouped_product(kind: str, dtype: torch.dtype) -> Proof:
    rows = _empty(kind, TOKENS, HIDDEN, dtype=dtype)
    weights = _empty(kind, HEADS, FFN, HIDDEN, dtype=dtype)
    ends = torch.empty(HEADS, dtype=torch.int32, device=kind).fill_(TOKENS)
    inputs, out = [rows, weights], list[Tensor]()
    forward = _watch(
        kind, [*inputs, ends],
        lambda: out.append(grouped_mm(rows, weights.transpose(1, 2), offs=ends)),
    )  # fmt: skip
    outer = torch.empty_like(out[0])
    backward = _watch(
        kind, [*inputs, ends, *out, outer], lambda: torch.autograd.grad(out[0], inputs, outer)
    )
    return Proof(
        f"a grouped product of {str(dtype).removeprefix('torch.')} and its gradients",
        (outer.nbytes, rows.nbytes + weights.nbytes),
        (forward.saved, backward.saved),
    )


def _silu_backward(kind: str) -> list[Proof]:
    x = _empty(kind, TOKENS, FFN)
    y = silu(x)
    outer = torch.empty_like(y)
    found = _watch(kind, [x, y, outer], lambda: torch.autograd.grad(y, x, outer))
    one = 2 * TOKENS * FFN
    missing = found.without("silu_backward")
    return [
        Proof("backward of silu has no temporaries", (one, one), (found.saved, found.peak), missing)
    ]


def _autocast_casts(kind: str) -> list[Proof]:
    """bf16 copies of the input and of the weight, for backward; and the bf16 product."""
    weight, x = (
        _empty(kind, FFN, HIDDEN, dtype=torch.float32),
        _empty(kind, TOKENS, HIDDEN, dtype=torch.float32),
    )

    def product() -> Tensor:
        with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
            return nn.functional.linear(x, weight)

    found = _watch(kind, [weight, x], product)
    saved = 2 * (TOKENS * HIDDEN + FFN * HIDDEN + TOKENS * FFN)
    return [Proof("bf16 copies under autocast", (saved,), (found.saved,))]


def _recomputation(kind: str) -> list[Proof]:
    """Three silus: the output is saved; backward recomputes two inputs (not the output), and holds
    a gradient beside them. Without recomputation three would be saved.
    """
    x = _empty(kind, TOKENS, FFN)
    out: list[Tensor] = []

    def chain(t: Tensor) -> Tensor:
        return silu(silu(silu(t)))

    def forward() -> None:
        out.append(checkpoint(chain, x, use_reentrant=False, preserve_rng_state=False))

    ran = _watch(kind, [x], forward)
    outer = torch.empty_like(out[0])
    recomputed = _watch(kind, [x, *out, outer], lambda: torch.autograd.grad(out[0], x, outer))
    one = 2 * TOKENS * FFN
    return [
        Proof("recomputed blocks keep their input alone", (one,), (ran.saved,)),
        Proof(
            "what recomputation holds at once", (one, 3 * one), (recomputed.saved, recomputed.peak)
        ),
    ]


def _optimizer_step(kind: str) -> list[Proof]:
    """AdamW on three fp32 tensors: two states, and the foreach form's copy of one of them."""
    proofs = []
    forms = [("foreach", 1), ("fused", 0)]
    if kind == "cuda":  # where foreach is chosen by the tensors' type
        forms.append(("default", 1))
    for implementation, copies in forms:
        weights = [nn.Parameter(torch.empty(n, device=kind)) for n in (100, 2000, 30)]
        options = {} if implementation == "default" else {implementation: True}
        optimizer = torch.optim.AdamW(weights, **options)  # type: ignore[arg-type]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        first = _watch(kind, [*weights, *gradients], optimizer.step)
        states = [t for state in optimizer.state.values() for t in state.values()]
        later = _watch(kind, [*weights, *gradients, *states], optimizer.step)
        nbytes = sum(4 * weight.numel() for weight in weights)
        # a step count a tensor: on the device when fused, and where the host is the device
        counters = 4 * len(weights) if implementation == "fused" or kind == "cpu" else 0
        proofs += [
            Proof(f"states of {implementation} AdamW", (2 * nbytes + counters,), (first.saved,)),
            Proof(f"temporaries of {implementation} AdamW", (0, copies * nbytes),
                  (later.saved, later.peak)),
        ]  # fmt: skip
    return proofs


def _clipping(kind: str) -> list[Proof]:
    weight = nn.Parameter(torch.empty(1000, device=kind))
    weight.grad = torch.empty_like(weight)

    def clip() -> Tensor:
        return nn.utils.clip_grad_norm_([weight], 1.0)  # chooses foreach by the tensors' type

    found = _watch(kind, [weight, weight.grad], clip)
    missing = found.without("_foreach_norm")
    return [Proof("clipping keeps the norm", (4,), (found.saved,), missing)]


def _order_of_frees(kind: str) -> list[Proof]:
    """A storage is gone when its last tensor is: the bytes alive after each event."""
    live = LiveBytes(kind)
    with live:
        first = torch.empty(100, dtype=torch.uint8, device=kind)
        view, second = first[10:], torch.empty(200, dtype=torch.uint8, device=kind)
        del first
        third = torch.empty(50, dtype=torch.uint8, device=kind)
        del view
        del second, third
    alive, found = 0, []
    for sign, _, nbytes in live.tape():
        alive += sign * nbytes
        found.append(alive)
    return [Proof("storages are freed in order", (100, 300, 350, 250, 50, 0), tuple(found))]


def _show(figures: Figures) -> str:
    return ", ".join(str(n) for n in figures)


_PROOFS: tuple[Callable[[str], list[Proof]], ...] = (
    _nothing_is_computed, _math_attention, _a_block, _grouped_products, _silu_backward,
    _autocast_casts, _recomputation, _optimizer_step, _clipping, _order_of_frees,
)  # fmt: skip
_FLASH: tuple[Callable[[str], list[Proof]], ...] = (_flash_attention,)
_CUDA: tuple[Callable[[str], list[Proof]], ...] = (_efficient_attention,)
