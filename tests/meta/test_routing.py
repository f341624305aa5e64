"""What experts run over sizes, against torch; and the trainer's experts against Hugging Face's."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from memfit import meta
from memfit.meta.elementwise import sigmoid
from memfit.meta.layers import routing
from memfit.train.model.experts import _Restore, _Spread, register_experts
from size_oracle import Births, agree, ordered
from tiny_models import CONFIGS

ROWS, HALF = ((20, 32),), ((20, 32), "bfloat16")
WEIGHTS, FROZEN = ((4, 48, 32),), ((4, 48, 32), "float32", False)
ENDS, INDICES = ((4,), "int32", False), ((40,), "int64", False)


def shares(x):
    values, _ = torch.topk(x, 4, dim=-1)
    values /= values.sum(dim=-1, keepdim=True)
    return values


def sizes_shares(x):
    values, _ = routing.top_k(x, 4)
    return routing.divide_in_place(values, routing.total(values, -1, keep=True))


def product(x, w, ends):
    """Times ones: the gradient of a bare sum is a view that no grouped product takes."""
    return F.grouped_mm(x, w.transpose(-2, -1), offs=ends) * torch.ones(20, 48, dtype=x.dtype)


def sizes_product(x, w, ends):
    ones = meta.empty(x.meter, (20, 48), x.dtype)
    return meta.mul(routing.grouped_linear(x, w, ends), ones)


OPERATIONS = {
    "softmax": (lambda x: F.softmax(x, -1, dtype=torch.float), routing.softmax_in_float, ROWS),
    "softmax of bf16": (
        lambda x: F.softmax(x, -1, dtype=torch.float), routing.softmax_in_float, HALF
    ),
    "sigmoid": (torch.sigmoid, sigmoid, ROWS),
    "top k": (lambda x: torch.topk(x, 4)[0], lambda x: routing.top_k(x, 4)[0], ROWS),
    "shares": (shares, sizes_shares, ROWS),
    "gather": (
        lambda x, i: x.gather(1, i), routing.gather_last, ROWS, ((20, 4), "int64", False)
    ),
    "sum": (lambda x: x.sum(dim=1), lambda x: routing.total(x, 1), ((5, 4, 32),)),
    "spread": (
        lambda x, i, j: _Spread.apply(x, i, j, 2),
        routing.spread, ROWS, INDICES, INDICES,
    ),
    "restore": (_Restore.apply, routing.restore, ((40, 32),), INDICES, INDICES),
    "grouped product": (product, sizes_product, ROWS, WEIGHTS, ENDS),
    "grouped product in bf16": (product, sizes_product, HALF, ((4, 48, 32), "bfloat16"), ENDS),
    "grouped product, frozen": (product, sizes_product, ROWS, FROZEN, ENDS),
    "grouped product of a constant": (
        product, sizes_product, ((20, 32), "float32", False), WEIGHTS, ENDS
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_allocates_frees_and_saves_what_torch_does(name):
    real, mine = agree(*OPERATIONS[name])
    assert mine == real


def sparse_block(family, experts, dtype=torch.float32):
    """The experts of the last block, equal for equal names."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**CONFIGS[family]), experts_implementation=experts
    )
    return model.model.layers[-1].mlp.to(dtype)


MIXTURES = [f for f in CONFIGS if "num_experts_per_tok" in CONFIGS[f]]


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_compute_what_hugging_faces_loop_computes(family):
    ours, theirs = (sparse_block(family, name) for name in (register_experts(), "eager"))
    x = torch.randn(2, 16, 32)
    outs = []
    for block in (ours, theirs):
        out = block(x)
        outs.append(out[0] if isinstance(out, tuple) else out)  # gpt_oss: and its router's scores
        outs[-1].square().sum().backward()
    assert torch.allclose(*outs, rtol=1e-4, atol=1e-7)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_experts_are_chosen_changes_no_allocation(dtype):
    """All tokens to the same few experts, against every expert in turn: not one byte apart."""
    block = sparse_block("mixtral", register_experts(), dtype).experts
    count, tokens = block.num_experts, 32
    inputs = [torch.randn(tokens, 32, dtype=dtype), torch.rand(tokens, 2, dtype=dtype)]

    def events(chosen):
        x, weights = (t.clone().requires_grad_() for t in inputs)
        with Births(x, weights, chosen, *block.parameters()) as births:
            out = block(x, chosen, weights)
            out.sum().backward()
        block.zero_grad(set_to_none=True)
        return ordered(births.events), out.detach()

    skewed = torch.tensor([[0, 1]]).expand(tokens, 2).contiguous()
    even = torch.arange(tokens * 2).view(tokens, 2) % count
    (first, skewed_out), (second, even_out) = events(skewed), events(even)
    assert first == second
    assert not torch.allclose(skewed_out, even_out)


def test_hugging_faces_loop_does_hold_what_the_routing_makes_it_hold():
    """The test above can fail: the form that memfit does not run fails it."""
    block, sizes_of = sparse_block("mixtral", "eager").experts, []
    for chosen in (torch.zeros(32, 2, dtype=torch.int64), torch.arange(64).view(32, 2) % 4):
        x = torch.randn(32, 32, requires_grad=True)
        with Births(x, chosen, *block.parameters()) as births:
            block(x, chosen, torch.rand(32, 2))
        sizes_of.append(ordered(births.events))
    assert sizes_of[0] != sizes_of[1]


def test_products_of_experts_are_autocast():
    block = sparse_block("mixtral", register_experts()).experts
    seen = []
    hook = torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t)
    chosen = torch.arange(64).view(32, 2) % 4
    with torch.autocast("cpu", torch.bfloat16), hook:
        block(torch.randn(32, 32, requires_grad=True), chosen, torch.rand(32, 2))
    weights = [t.dtype for t in seen if t.dim() == 3 and t.shape[0] == block.num_experts]
    assert weights == [torch.bfloat16] * 2
