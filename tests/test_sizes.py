"""Sizes against torch: the same allocations and frees, in the same order, and the same saved bytes.

The oracle is a dispatch mode of this file's own on real CPU tensors, and torch's hooks on saved
tensors; nothing of memfit's tracer is used.
"""

import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from memfit import sizes
from memfit.families import find_family
from memfit.families._config import ACTIVATIONS as described_activations
from memfit.families.forward import Forward, rotation
from memfit.ledger import Kind
from memfit.sizes.loss import chunked_sum, cross_entropy_sum
from memfit.train.attention import register_attention

HOST_SCALAR = 16  # bytes; loss values and such, which no peak depends on


class Births(TorchDispatchMode):
    """Sizes of storages as they come (positive) and go (negative)."""

    def __init__(self, *known):
        super().__init__()
        self.events = []
        self.alive = {t.untyped_storage()._cdata: None for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.see(tensor.untyped_storage())
        return out

    def see(self, storage):
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.alive:
            return

        def gone(_):
            del self.alive[key]
            self.events.append(-nbytes)

        self.alive[key] = weakref.ref(storage, gone)
        self.events.append(nbytes)


def ordered(events):
    """Frees between two allocations have no order of their own; host scalars are left out."""
    kept = [e for e in events if abs(e) > HOST_SCALAR]
    groups = itertools.groupby(kept, key=lambda e: e < 0)
    return [e for freed, group in groups for e in (sorted(group) if freed else group)]


def meter_events(meter, start=0):
    return ordered(meter.sizes[e] if e >= 0 else -meter.sizes[~e] for e in meter.events[start:])


def saved_bytes(saved, inputs):
    """Bytes of distinct storages that autograd keeps, beside those of the inputs."""
    own = {id(t.storage) if hasattr(t, "storage") and not isinstance(t, torch.Tensor)
           else t.untyped_storage()._cdata for t in inputs}  # fmt: skip
    found = {}
    for t in saved:
        if isinstance(t, torch.Tensor):
            found[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        else:
            found[id(t.storage)] = t.meter.sizes[t.storage.index]
    return sum(n for key, n in found.items() if key not in own and n > HOST_SCALAR)


def listen(meter):
    """The tensors that nodes save from now on, outside recomputed regions."""
    saved, plain = [], meter.pack

    def pack(tensor):
        if meter.saver is None:
            saved.append(tensor)
        return plain(tensor)

    meter.pack = pack
    return saved


def ours(function, inputs, autocast=False):
    meter = sizes.Meter()
    tensors = [make(meter, *i) for i in inputs]
    saved = listen(meter)
    start = len(meter.events)
    with meter.with_autocast(autocast):
        out = function(*tensors)
    kept = saved_bytes(saved, tensors)
    del saved[:]
    sizes.backward(total(out))
    del out
    return meter_events(meter, start), kept


def total(x):
    """A scalar whose backward hands an expanded view to x's node, as `x.sum()` does."""
    from memfit.sizes.autograd import record
    from memfit.sizes.elementwise import attach

    def rule(node, grads):
        return (grads[0].viewed(x_shape, (0,) * len(x_shape)),)

    x_shape = x.shape
    return attach(record(rule, (x,)), sizes.empty(x.meter, (), x.dtype))


def make(meter, shape, dtype="float32", grad=True):
    t = sizes.empty(meter, shape, dtype, Kind.PARAMETERS)
    t.requires_grad = grad
    return t


def theirs(function, inputs, autocast=False):
    tensors = [
        torch.zeros(shape, dtype=getattr(torch, (rest or ["float32"])[0]),
                    requires_grad=rest[1] if len(rest) > 1 else True)
        for shape, *rest in inputs
    ]  # fmt: skip
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with Births(*tensors) as births:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False), keep:
            out = function(*tensors)
        kept = saved_bytes(saved, tensors)
        del saved[:]
        out.sum().backward()
        del out
    return ordered(births.events), kept


def agree(torch_function, sizes_function, *inputs, autocast=False):
    real, saved = theirs(torch_function, inputs, autocast)
    mine, kept = ours(sizes_function, inputs, autocast)
    assert kept == saved
    return real, mine


X, W, B = ((2, 8, 16),), ((24, 16),), ((24,),)
HALF = ((2, 8, 16), "bfloat16")
HEADS = ((2, 4, 8, 16),)
GROUPED = ((2, 2, 8, 16),)


def gelu_new(x):
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


def sizes_gelu_new(x):
    half = sizes.scale(x)
    inner = sizes.scale(sizes.add(x, sizes.scale(sizes.power(x))))
    curve = sizes.tanh(inner)
    del inner
    bent = sizes.shift(curve)
    del curve
    return sizes.mul(half, bent)


def rms(x, w):
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(variance + 1e-6)
    return w * wide.to(x.dtype)


def sizes_rms(x, w):
    wide = sizes.cast(x, "float32")
    variance = sizes.mean_last(sizes.power(wide))
    wide = sizes.mul(wide, sizes.rsqrt(sizes.shift(variance)))
    return sizes.mul(w, sizes.cast(wide, x.dtype))


def attend(backend, grouped=False):
    def run(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=0.25, enable_gqa=grouped
            )

    return run


OPERATIONS = {
    "mul": (torch.mul, sizes.mul, X, X),
    "mul by a row": (torch.mul, sizes.mul, ((16,),), X),
    "mul by a constant": (torch.mul, sizes.mul, X, ((16,), "float32", False)),
    "mul of two dtypes": (torch.mul, sizes.mul, HALF, X),
    "add": (torch.add, sizes.add, X, X),
    "add of two dtypes": (torch.add, sizes.add, X, HALF),
    "add of a broadcast": (torch.add, sizes.add, X, ((1, 8, 16),)),
    "number": (lambda x: x * 0.5, sizes.scale, X),
    "negative": (torch.neg, sizes.negative, X),
    "power": (lambda x: x.pow(2), sizes.power, X),
    "mean": (lambda x: x.mean(-1, keepdim=True), sizes.mean_last, X),
    "rsqrt": (torch.rsqrt, sizes.rsqrt, X),
    "cast": (lambda x: x.to(torch.bfloat16), lambda x: sizes.cast(x, "bfloat16"), X),
    "silu": (F.silu, sizes.silu, X),
    "gelu": (F.gelu, sizes.gelu, X),
    "gelu_new": (gelu_new, sizes_gelu_new, X),
    "rms norm": (rms, sizes_rms, X, ((16,),)),
    "rms norm in bf16": (rms, sizes_rms, HALF, ((16,), "bfloat16")),
    "rms norm, frozen": (rms, sizes_rms, X, ((16,), "float32", False)),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (16,), w, b), sizes.layer_norm, X, ((16,),), ((16,),)
    ),
    "linear": (F.linear, sizes.linear, X, W),
    "linear with bias": (F.linear, sizes.linear, X, W, B),
    "linear, frozen": (F.linear, sizes.linear, X, ((24, 16), "float32", False)),
    "linear of a constant": (F.linear, sizes.linear, ((2, 8, 16), "float32", False), W),
    "linear of a matrix": (F.linear, sizes.linear, ((8, 16),), W),
    "conv1d": (
        lambda x, w, b: torch.addmm(b, x.view(-1, 16), w).view(2, 8, 24), sizes.conv1d,
        X, ((16, 24),), B,
    ),
    "concatenate": (
        lambda a, b: torch.cat((a, b), 1), lambda a, b: sizes.concatenate((a, b), 1), X, X
    ),
    "split": (
        lambda x: torch.split(x, (4, 12), 2)[1], lambda x: sizes.split(x, (4, 12), 2)[1], X
    ),
    "narrow": (lambda x: x[:, :3], lambda x: sizes.narrow(x, 1, 0, 3), X),
    "transpose and copy": (
        lambda x: x.transpose(1, 2).contiguous(),
        lambda x: sizes.contiguous(sizes.transpose(x, 1, 2)), X,
    ),
    "reshape of a transpose": (
        lambda x: x.transpose(0, 1).reshape(16, 16),
        lambda x: sizes.reshape(sizes.transpose(x, 0, 1), 16, 16), X,
    ),
    "repeated heads": (
        lambda x: x.repeat_interleave(2, dim=1), lambda x: sizes.expand_heads(x, 2), HEADS
    ),
    "flash": (
        attend(SDPBackend.FLASH_ATTENTION), lambda *a: sizes.attention("flash", *a),
        HEADS, HEADS, HEADS,
    ),
    "flash, grouped": (
        attend(SDPBackend.FLASH_ATTENTION, True), lambda *a: sizes.attention("flash", *a),
        HEADS, GROUPED, GROUPED,
    ),
    "math": (
        attend(SDPBackend.MATH), lambda *a: sizes.attention("math", *a), HEADS, HEADS, HEADS
    ),
    "math, grouped": (
        attend(SDPBackend.MATH, True), lambda *a: sizes.attention("math", *a),
        HEADS, GROUPED, GROUPED,
    ),
    "math in bf16": (
        attend(SDPBackend.MATH), lambda *a: sizes.attention("math", *a),
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
        lambda x, labels: cross_entropy_sum(sizes.cast(x, "float32"), labels),
        ((8, 40), dtype), ((8,), "int64", False),
    )  # fmt: skip
    assert mine == real


def test_chunked_loss_holds_one_chunk_of_logits_at_a_time():
    meter = sizes.Meter(vocab=40)
    hidden, weight = make(meter, (32, 16)), make(meter, (40, 16))
    start = len(meter.events)
    loss = chunked_sum(hidden, weight, 8)
    logits = [meter.sizes[e] for e in meter.events[start:] if e >= 0 and meter.kinds[e] == "logits"]
    assert set(logits) == {8 * 40 * 4}
    sizes.backward(loss)
    assert weight.grad is not None


def torch_block(x, w, v):
    return F.linear(F.silu(F.linear(x, w)), v) + x


def sizes_block(x, w, v):
    return sizes.add(sizes.linear(sizes.silu(sizes.linear(x, w)), v), x)


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
        lambda x, w, v: sizes.checkpoint(lambda x: sizes_block(x, w, v), sizes.scale(x)), inputs
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
        lambda x, w, v: sizes.checkpoint(
            lambda x: sizes.linear(sizes_rms(x, w), v), sizes.scale(x)
        ),
        inputs,
    )
    assert mine == real


CONFIGS = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mistral": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "gpt_neox": {"num_attention_heads": 4},
    "gpt2": {"n_head": 4},
}


ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")


def config_of(family, activation=None):
    common = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 96, "use_cache": False}
    common |= {"num_hidden_layers": 1, "max_position_embeddings": 64}
    if family == "gpt2":
        common = {"n_embd": 32, "n_layer": 1, "vocab_size": 50, "n_positions": 64}
        common |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    chosen = {} if activation is None else {"hidden_act": activation}
    return {"model_type": family, **common, **CONFIGS[family], **chosen}


def real_block(family, dtype, autocast, activation=None):
    """Events and saved bytes of one block of Hugging Face's class, and of its backward."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config_of(family, activation)),
        attn_implementation=register_attention("flash"),
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    backbone = getattr(model, model.base_model_prefix)
    block = (backbone.h if family == "gpt2" else backbone.layers)[0]
    x = torch.zeros(2, 16, 32, dtype=dtype, requires_grad=True)
    given = {}
    if family != "gpt2":
        turn = backbone.rotary_emb(x, torch.arange(16).unsqueeze(0))
        given = {"position_embeddings": turn}
    known = [x, *model.parameters(), *given.get("position_embeddings", ())]
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with Births(*known) as births:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False), keep:
            out = block(x, attention_mask=None, **given)
        kept = saved_bytes(saved, known)
        del saved[:]
        out.sum().backward()
        del out
    return ordered(births.events), kept


def size_only_block(family, dtype, autocast, activation=None):
    meter, found = sizes.Meter(), find_family(family)
    architecture = found.architecture(config_of(family, activation))
    weights = {}
    for row in found.weights(architecture):
        name = row.name.partition(".0.")[2]
        if row.layer == 0:
            weights[name] = sizes.parameter(meter, row.shape, dtype, trainable=True)
    forward = Forward(
        architecture=architecture, meter=meter, kernel="flash", position_ids=None, documents=None,
        input_ids=sizes.empty(meter, (2, 16), "int64", Kind.INPUT),
    )  # fmt: skip
    x = make(meter, (2, 16, 32), dtype)
    positions = sizes.empty(meter, (1, 16), "int64", Kind.INPUT)
    given = () if family == "gpt2" else rotation(forward, dtype, positions)
    known = [x, *weights.values(), *given]
    saved, start = listen(meter), len(meter.events)
    with meter.with_autocast(autocast):
        out = found.block(forward, weights, x, (*given, positions))
    kept = saved_bytes(saved, known)
    del saved[:]
    sizes.backward(total(out))
    del out
    return meter_events(meter, start), kept


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_a_block_holds_what_hugging_faces_class_holds(family, precision):
    dtype = "bfloat16" if precision == "bf16" else "float32"
    mixed = precision == "bf16-mixed"
    real, saved = real_block(family, getattr(torch, dtype), mixed)
    mine, kept = size_only_block(family, dtype, mixed)
    assert kept == saved
    assert mine == real


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_that_a_family_accepts_holds_what_hugging_faces_holds(activation):
    assert set(ACTIVATIONS) == set(described_activations)
    real, saved = real_block("gpt_neox", torch.float32, True, activation)
    mine, kept = size_only_block("gpt_neox", "float32", True, activation)
    assert kept == saved
    assert mine == real
