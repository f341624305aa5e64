"""Sizes against torch: the same allocations and frees in the same order, the same saved bytes."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from memfit import meta
from memfit.meta.losses.cross_entropy import chunked_sum, cross_entropy_sum
from size_oracle import agree, make, ours, theirs

X, W, B = ((2, 8, 16),), ((24, 16),), ((24,),)
HALF = ((2, 8, 16), "bfloat16")
HEADS = ((2, 4, 8, 16),)
GROUPED = ((2, 2, 8, 16),)


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


def sizes_gelu_new(x):
    half = meta.scale(x)
    inner = meta.scale(meta.add(x, meta.scale(meta.power(x))))
    curve = meta.tanh(inner)
    del inner
    bent = meta.shift(curve)
    del curve
    return meta.mul(half, bent)


def rms(x, w):
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + 1e-6)
    return w * wide.to(x.dtype)


def sizes_rms(x, w):
    wide = meta.cast(x, "float32")
    variance = meta.mean_last(meta.power(wide))
    wide = meta.mul(wide, meta.rsqrt(meta.shift(variance)))
    return meta.mul(w, meta.cast(wide, x.dtype))


def attend(backend, grouped=False):
    def run(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=0.25, enable_gqa=grouped
            )

    return run


OPERATIONS = {
    "mul": (torch.mul, meta.mul, X, X),
    "mul by a row": (torch.mul, meta.mul, ((16,),), X),
    "mul by a constant": (torch.mul, meta.mul, X, ((16,), "float32", False)),
    "mul of two dtypes": (torch.mul, meta.mul, HALF, X),
    "add": (torch.add, meta.add, X, X),
    "add of two dtypes": (torch.add, meta.add, X, HALF),
    "add of a broadcast": (torch.add, meta.add, X, ((1, 8, 16),)),
    "number": (lambda x: x * 0.5, meta.scale, X),
    "negative": (torch.neg, meta.negative, X),
    "power": (lambda x: x.pow(2), meta.power, X),
    "mean": (lambda x: x.mean(-1, keepdim=True), meta.mean_last, X),
    "rsqrt": (torch.rsqrt, meta.rsqrt, X),
    "cast": (lambda x: x.to(torch.bfloat16), lambda x: meta.cast(x, "bfloat16"), X),
    "silu": (F.silu, meta.silu, X),
    "gelu": (F.gelu, meta.gelu, X),
    "gelu_new": (gelu_new, sizes_gelu_new, X),
    "rms norm": (rms, sizes_rms, X, ((16,),)),
    "rms norm in bf16": (rms, sizes_rms, HALF, ((16,), "bfloat16")),
    "rms norm, frozen": (rms, sizes_rms, X, ((16,), "float32", False)),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (16,), w, b), meta.layer_norm, X, ((16,),), ((16,),)
    ),
    "linear": (F.linear, meta.linear, X, W),
    "linear with bias": (F.linear, meta.linear, X, W, B),
    "linear, frozen": (F.linear, meta.linear, X, ((24, 16), "float32", False)),
    "linear of a constant": (F.linear, meta.linear, ((2, 8, 16), "float32", False), W),
    "linear of a matrix": (F.linear, meta.linear, ((8, 16),), W),
    "conv1d": (
        lambda x, w, b: torch.addmm(b, x.view(-1, 16), w).view(2, 8, 24), meta.conv1d,
        X, ((16, 24),), B,
    ),
    "concatenate": (
        lambda a, b: torch.cat((a, b), 1), lambda a, b: meta.concatenate((a, b), 1), X, X
    ),
    "split": (
        lambda x: torch.split(x, (4, 12), 2)[1], lambda x: meta.split(x, (4, 12), 2)[1], X
    ),
    "narrow": (lambda x: x[:, :3], lambda x: meta.narrow(x, 1, 0, 3), X),
    "transpose and copy": (
        lambda x: x.transpose(1, 2).contiguous(),
        lambda x: meta.contiguous(meta.transpose(x, 1, 2)), X,
    ),
    "reshape of a transpose": (
        lambda x: x.transpose(0, 1).reshape(16, 16),
        lambda x: meta.reshape(meta.transpose(x, 0, 1), 16, 16), X,
    ),
    "repeated heads": (
        lambda x: x.repeat_interleave(2, dim=1), lambda x: meta.expand_heads(x, 2), HEADS
    ),
    "flash": (
        attend(SDPBackend.FLASH_ATTENTION), lambda *a: meta.attention("flash", *a),
        HEADS, HEADS, HEADS,
    ),
    "flash, grouped": (
        attend(SDPBackend.FLASH_ATTENTION, True), lambda *a: meta.attention("flash", *a),
        HEADS, GROUPED, GROUPED,
    ),
    "math": (
        attend(SDPBackend.MATH), lambda *a: meta.attention("math", *a), HEADS, HEADS, HEADS
    ),
    "math, grouped": (
        attend(SDPBackend.MATH, True), lambda *a: meta.attention("math", *a),
        HEADS, GROUPED, GROUPED,
    ),
    "math in bf16": (
        attend(SDPBackend.MATH), lambda *a: meta.attention("math", *a),
        *[((2, 4, 8, 16), "bfloat16")] * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_allocates_frees_and_saves_what_torch_does(name):
    real, mine = agree(*OPERATIONS[name])
    assert mine == real


@pytest.mark.parametrize("name", ["linear", "linear with bias", "conv1d", "flash", "concatenate"])
def test_autocast_makes_the_copies_that_torch_makes(name):
    real, mine = agree(*OPERATIONS[name], autocast=True)
    assert mine == real


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cross_entropy_holds_what_torch_holds(dtype):
    real, mine = agree(
        lambda x, labels: F.cross_entropy(x.float(), labels, reduction="sum"),
        lambda x, labels: cross_entropy_sum(meta.cast(x, "float32"), labels),
        ((8, 40), dtype), ((8,), "int64", False),
    )  # fmt: skip
    assert mine == real


def test_chunked_loss_holds_one_chunk_of_logits_at_a_time():
    meter = meta.Meter(vocab=40)
    hidden, weight = make(meter, (32, 16)), make(meter, (40, 16))
    start = len(meter.events)
    loss = chunked_sum(hidden, weight, 8)
    logits = [meter.held(e) for e in meter.events[start:] if e >= 0 and meter.kinds[e] == "logits"]
    assert set(logits) == {8 * 40 * 4}
    meta.backward(loss)
    assert weight.grad is not None


def torch_block(x, w, v):
    return F.linear(F.silu(F.linear(x, w)), v) + x


def sizes_block(x, w, v):
    return meta.add(meta.linear(meta.silu(meta.linear(x, w)), v), x)


def test_a_recomputed_region_is_run_again_and_stops_early():
    inputs = (X, W, ((16, 24),))
    real, _ = theirs(
        lambda x, w, v: checkpoint(
            lambda x: torch_block(x, w, v), x * 1.0,
            use_reentrant=False, preserve_rng_state=False,
        ),
        inputs,
    )  # fmt: skip
    mine, _ = ours(
        lambda x, w, v: meta.checkpoint(lambda x: sizes_block(x, w, v), meta.scale(x)), inputs
    )
    assert mine == real


def test_a_recomputed_tensor_is_given_up_before_gradients_are_summed():
    inputs = (X, ((16,),), W)
    real, _ = theirs(
        lambda x, w, v: checkpoint(
            lambda x: F.linear(rms(x, w), v), x * 1.0,
            use_reentrant=False, preserve_rng_state=False,
        ),
        inputs,
    )  # fmt: skip
    mine, _ = ours(
        lambda x, w, v: meta.checkpoint(lambda x: meta.linear(sizes_rms(x, w), v), meta.scale(x)),
        inputs,
    )
    assert mine == real
