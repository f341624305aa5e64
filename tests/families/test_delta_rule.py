"""The chunked gated delta rule over sizes against Hugging Face's own function, chunk for chunk."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule as their_rule,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_recurrent_gated_delta_rule as their_step,
)

from memfit import meta
from memfit.families.shared.hybrid.delta_rule import (
    CHUNK,
    TURNS,
    chunked_delta_rule,
    chunks_of,
    step_delta_rule,
)
from memfit.records.model import Linear
from size_oracle import HOST_SCALAR, Births, make, meter_events, ordered, total

HEADS = Linear(key_heads=2, value_heads=4, key=8, value=12, kernel=4)
ROWS = 2


def shapes(tokens, linear):
    """Of queries, keys, values, decays and betas."""
    keys = (ROWS, tokens, linear.key_heads, linear.key)
    gates = (ROWS, tokens, linear.value_heads)
    return keys, keys, (ROWS, tokens, linear.value_heads, linear.value), gates, gates


def theirs(tokens, linear, dtype, wanted):
    """Events of Hugging Face's function and its backward."""
    given = [
        torch.zeros(shape, dtype=getattr(torch, "float32" if i == 3 else dtype), requires_grad=grad)
        for i, (shape, grad) in enumerate(zip(shapes(tokens, linear), wanted, strict=True))
    ]
    with Births(*given) as births:
        query, key, value, decay, beta = given
        out = their_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        out.sum().backward()
        del out
    return list(births.events)  # as the inputs live until here


def ours(tokens, linear, dtype, wanted, *, unrolled):
    """The meter of the same over sizes, where its events begin, and its inputs, which live on."""
    meter = meta.Meter(unrolled=unrolled)
    given = [
        make(meter, shape, "float32" if i == 3 else dtype, grad)
        for i, (shape, grad) in enumerate(zip(shapes(tokens, linear), wanted, strict=True))
    ]
    start = len(meter.events)
    out = chunked_delta_rule(SimpleNamespace(linear=linear), given)
    meta.backward(total(out))
    del out
    return meter, start, given


def highest(meter, start):
    """As `plan/simulate/segments.py` reads a log in which storages stand for several."""
    level = top = 0
    for event in meter.events[start:]:
        index = event if event >= 0 else ~event
        level += meter.requested[index] * meter.counts[index] * (1 if event >= 0 else -1)
        if event >= 0 and meter.counts[index] == 1:
            top = max(top, level)
    return top, level


EVERY = (True,) * 5
ALIKE = Linear(key_heads=4, value_heads=4, key=8, value=12, kernel=4)
LENGTHS = (1, 16, CHUNK, CHUNK + 1, 2 * CHUNK, TURNS * CHUNK, 6 * CHUNK, 6 * CHUNK + 7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("linear", [HEADS, ALIKE], ids=["repeated", "alike"])
def test_every_chunk_holds_what_hugging_faces_function_holds(tokens, linear, dtype):
    meter, start, _ = ours(tokens, linear, dtype, EVERY, unrolled=True)
    assert meter_events(meter, start) == ordered(theirs(tokens, linear, dtype, EVERY))


def dtypes(dtype):
    return [dtype] * 3 + ["float32", dtype]


def generated(tokens, linear, dtype):
    """Events of Hugging Face's function while answers are sampled: of prompts, or of one token."""
    whole = zip(shapes(tokens, linear), dtypes(dtype), strict=True)
    given = [torch.zeros(shape, dtype=getattr(torch, kind)) for shape, kind in whole]
    held = torch.zeros(ROWS, linear.value_heads, linear.key, linear.value)
    more = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with torch.no_grad(), Births(held, *given) as births:
        query, key, value, decay, beta = given
        if tokens == 1:
            out = their_step(query, key, value, decay, beta, initial_state=held, **more)
        else:
            out = their_rule(query, key, value, decay, beta, **more)
        del out
    return list(births.events)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("linear", [HEADS, ALIKE], ids=["repeated", "alike"])
@pytest.mark.parametrize("tokens", [1, 16, CHUNK + 1, (TURNS + 2) * CHUNK])
def test_prompts_and_steps_hold_what_hugging_faces_functions_hold(tokens, linear, dtype):
    """With the state that each leaves."""
    events = [e for e in generated(tokens, linear, dtype) if abs(e) > HOST_SCALAR]
    meter, a = meta.Meter(unrolled=True), SimpleNamespace(linear=linear)
    whole = zip(shapes(tokens, linear), dtypes(dtype), strict=True)
    given = [make(meter, shape, kind, False) for shape, kind in whole]
    held = make(meter, (ROWS, linear.value_heads, linear.key, linear.value), "float32", False)
    start, states = len(meter.events), []
    with meter.without_graph():
        if tokens == 1:
            out, state = step_delta_rule(a, given, held)
        else:
            out = chunked_delta_rule(a, given, states)
            state = states.pop()
        assert state.shape == held.shape
        del out, state
    top, left = highest(meter, start)
    assert (top, left) == (max(accumulate(events)), sum(events))
    assert meter_events(meter, start) == ordered(events)


# the first block under an adapter may have a gradient in some of them alone
PARTS = {
    "all": EVERY, "the decay alone": (False, False, False, True, False),
    "beta alone": (False, False, False, False, True), "products": (True, True, True, False, False),
}  # fmt: skip


@pytest.mark.parametrize("wanted", PARTS)
@pytest.mark.parametrize("chunks", [TURNS + 1, TURNS + 2, 12])
def test_five_turns_stand_for_all_chunks(chunks, wanted):
    """The highest instant is that of the whole scan, and nothing is left at its end."""
    tokens = chunks * CHUNK - 5
    events = theirs(tokens, HEADS, "float32", PARTS[wanted])
    meter, start, _held = ours(tokens, HEADS, "float32", PARTS[wanted], unrolled=False)
    whole, *_ = ours(tokens, HEADS, "float32", PARTS[wanted], unrolled=True)
    assert len(meter.events) < len(whole.events)
    top, left = highest(meter, start)
    kept = [e for e in events if abs(e) > HOST_SCALAR]
    real = max(accumulate(kept, initial=0))
    assert abs(top - real) <= HOST_SCALAR
    assert abs(left - sum(kept)) <= HOST_SCALAR
    assert chunks_of(tokens) == chunks
