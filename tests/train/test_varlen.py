"""Documents end to end under one call of the kernel: the numbers of one call a document.

torch has the kernel on CUDA alone. Here a textbook's attention, written out forward and backward,
stands in its operators' place on this CPU: what is proven is what memfit tells the kernel (where
documents begin, how long the longest is, scale, windows, heads) and what it makes of the result.
tests/gpu/test_varlen_on_gpu.py runs the kernel itself.
"""

from itertools import pairwise

import pytest
import torch
from msgspec.structs import replace
from test_step import assert_same_gradients, one_step, pack
from torch.nn.attention.varlen import varlen_attn
from transformers.models.stablelm.modeling_stablelm import StableLmAttention

from memfit import api, catalog
from memfit.certify import trace
from memfit.core.errors import InvalidRequest
from memfit.families import families_that
from memfit.train.model import varlen
from memfit.train.model.classes.falcon import FalconAttention
from memfit.train.step import build
from memfit.train.step.build import build_model
from tiny_models import CONFIGS, FAMILIES, make_recipe

H100 = catalog.find_device("h100-sxm")
BF16 = {"precision": "bf16", "base_format": "bf16"}
DOCUMENTS = ((5, 9, 2), (16,))
ATTENTION = (StableLmAttention, FalconAttention)


def scores(query, key, scale, window, causal):
    """Softmax of (heads, n, head_dim) times itself: (heads, n, n)."""
    n = query.shape[1]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    reach = n if window is None or window[0] < 0 else window[0]
    assert causal == (reach == n)
    hidden = (distance < 0) | (distance > reach)
    made = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return made.masked_fill(hidden, -torch.inf)


def cut(starts, longest, *tensors):
    """(tokens, heads, head_dim) by document, as (heads, n, head_dim)."""
    bounds = starts.tolist()
    lengths = [b - a for a, b in pairwise(bounds)]
    assert starts.dtype == torch.int32
    assert bounds[0] == 0
    assert longest == max(lengths)
    assert all(bounds[-1] == len(x) for x in tensors)
    return zip(*(x.transpose(0, 1).split(lengths, 1) for x in tensors), strict=True)


def forward(query, key, value, starts, keys_start, longest, longest_key, causal=False, scale=None,
            window=None, grouped=False, used=None, table=None, splits=None):  # fmt: skip
    """`torch_attn::_varlen_attn` of a textbook."""
    del used, table, splits
    assert torch.equal(starts, keys_start)
    assert longest == longest_key
    groups = query.shape[1] // key.shape[1]
    assert grouped == (groups > 1 and varlen.ASKS_FOR_GROUPS)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    outputs, sums = [], []
    for q, k, v in cut(starts, longest, query, key, value):
        made = scores(q, k, scale, window, causal)
        sums.append(made.logsumexp(-1))
        outputs.append(made.softmax(-1) @ v)
    out = torch.cat(outputs, 1).transpose(0, 1).contiguous()
    return out, torch.cat(sums, 1), torch.zeros(2, dtype=torch.uint64)


def backward(grad, query, key, value, out, sums, starts, keys_start, longest, longest_key, causal,
             state, scale=None, window=None):  # fmt: skip
    """`torch_attn::_varlen_attn_backward` of a textbook."""
    del keys_start, longest_key, state
    groups, size = query.shape[1] // key.shape[1], query.shape[-1]
    wide = [x.repeat_interleave(groups, 1) for x in (key, value)]
    parts = []
    for g, q, k, v, o, s in cut(starts, longest, grad, query, *wide, out, sums.t()[..., None]):
        weights = (scores(q, k, scale, window, causal) - s).exp()
        inner = weights * (g @ v.transpose(1, 2) - (g * o).sum(-1, keepdim=True))
        inner = inner * (size**-0.5 if scale is None else scale)
        parts.append((inner @ k, inner.transpose(1, 2) @ q, weights.transpose(1, 2) @ g))
    made = [torch.cat(p, 1).transpose(0, 1) for p in zip(*parts, strict=True)]
    made[1:] = [x.unflatten(1, (-1, groups)).sum(2) for x in made[1:]]
    return tuple(x.contiguous() for x in made)


@pytest.fixture
def on_a_cpu(monkeypatch):
    """The textbook in the place of both operators, and no refusal of a CPU."""
    library = torch.library.Library("torch_attn", "IMPL")
    library.impl("_varlen_attn", forward, "CPU")
    library.impl("_varlen_attn_backward", backward, "CPU")
    monkeypatch.setattr(build, "check_attention", lambda *_: None)
    yield
    library._destroy()


CASES = {
    "llama": ("llama", {}),  # grouped heads
    "a window": ("mistral", {"config": CONFIGS["mistral"] | {"sliding_window": 5}}),
    "windows of some blocks": ("gemma3_text", {}),
    "joined q, k, v": ("gpt_neox", {}),
    "a scale of its own": ("granite", {}),
    "values narrower than keys": ("deepseek_v3", {}),
    "recomputed": ("llama", {"recompute_blocks": 2}),
    "recomputed but for products": ("llama", {"selective_blocks": 2}),
    "lean": ("llama", {"lean": ("norm", "mlp")}),
    "adapters": ("llama", {"method": "lora"}),
    "activations on the host": ("llama", {"offload": "activations"}),
}  # fmt: skip


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("name", CASES)
def test_one_call_learns_what_one_call_a_document_does(name):
    family, changes = CASES[name]
    packed, _ = pack(DOCUMENTS)
    recipe = make_recipe(family, packing=True, **changes)
    _, many, expected = one_step(recipe, packed)
    _, one, gradients = one_step(replace(recipe, attention="varlen"), packed)
    torch.testing.assert_close(one.loss, many.loss, rtol=1e-6, atol=0)
    assert_same_gradients(gradients, expected, rtol=1e-5)


@pytest.mark.usefixtures("on_a_cpu")
def test_under_autocast_the_kernel_is_given_16_bits(monkeypatch):
    seen = []

    def spy(query, *given, **named):
        seen.append(query.dtype)
        return varlen_attn(query, *given, **named)

    monkeypatch.setattr(varlen, "varlen_attn", spy)
    packed, _ = pack(DOCUMENTS)
    one_step(make_recipe(attention="varlen", packing=True, precision="bf16-mixed"), packed)
    assert {*seen} == {torch.bfloat16}


def test_torch_has_no_kernel_for_a_cpu_and_memfit_says_so():
    """Where this fails torch has one: the refusal can go."""
    x = torch.randn(4, 2, 8)
    starts = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        varlen_attn(x, x, x, starts, starts, 4, 4, window_size=(-1, 0))
    with pytest.raises(InvalidRequest, match="exists on CUDA only") as caught:
        build_model(make_recipe(attention="varlen", packing=True), "cpu")
    assert "flash" in caught.value.hint


def test_rows_that_are_not_packed_are_refused():
    with pytest.raises(InvalidRequest, match="is for packed rows") as caught:
        trace(make_recipe(attention="varlen", **BF16), H100)
    assert "`attention: flash`" in caught.value.hint
    changes = {"attention": "varlen", "task.packing": False}
    with pytest.raises(InvalidRequest, match="is for packed rows"):
        api.plan(api.read("gpt2", device="h100-sxm", changes=changes), levers=False)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*families_that("hands_on_documents")}))
def test_blocks_that_are_told_nothing_of_documents_are_refused(family):
    """Where this fails Hugging Face's backbone hands on what it is given: the refusal can go."""
    recipe = make_recipe(family, packing=True)
    told = []
    built = build_model(recipe, "meta")
    for module in built.modules():
        if isinstance(module, ATTENTION):
            module.register_forward_pre_hook(
                lambda _, given, named: told.append({*named}), with_kwargs=True
            )
    ids = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    built(input_ids=ids, position_ids=ids, documents=DOCUMENTS, use_cache=False)
    assert told
    assert not any("documents" in names for names in told)
    with pytest.raises(InvalidRequest, match="does not hand on") as caught:
        trace(replace(recipe, attention="varlen", precision="bf16", base_format="bf16"), H100)
    assert "`attention: flash`" in caught.value.hint


@pytest.mark.usefixtures("on_a_cpu")
def test_grouped_heads_need_no_word_where_torch_has_none(monkeypatch):
    """torch 2.11: there is no `enable_gqa`, and nothing compares the numbers of heads."""
    given = []

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
        given.append(query.shape[1] // key.shape[1])
        return torch.ops.torch_attn._varlen_attn(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size == (-1, 0), scale,
            list(window_size),
        )[0]  # fmt: skip

    packed, _ = pack(DOCUMENTS)
    recipe = make_recipe(attention="varlen", packing=True)
    _, newer, expected = one_step(recipe, packed)
    monkeypatch.setattr(varlen, "varlen_attn", older)
    monkeypatch.setattr(varlen, "ASKS_FOR_GROUPS", False)
    _, found, gradients = one_step(recipe, packed)
    assert {*given} == {2}
    torch.testing.assert_close(found.loss, newer.loss, rtol=0, atol=0)
    assert_same_gradients(gradients, expected, rtol=1e-6)
