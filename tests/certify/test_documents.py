"""Hostile documents: no cut of the rows holds more than the shapes that bound them."""

from __future__ import annotations

import pytest
from tiny_steps import CONFIGS, CPU, H100, make_recipe

from memfit.allocator.caching import Settings, replay
from memfit.certify.evidence.certificate import make_certificate
from memfit.certify.tracing.trace_step import trace_step
from memfit.records.shapes import BatchShape, RowBounds, bounding_shapes, evaluation_shapes

BF16 = {"precision": "bf16", "base_format": "bf16"}
W = 48
CUTS = {
    "whole": (W,),
    "one apart": (W - 1, 1),
    "halves": (W // 2, W // 2),
    "uneven": (20, 28),
    "just above a padding": (33, 15),
    "ones and twos": (1, 2) * 16,
    "one by one": (1,) * W,
    "a long one in the middle": (3, 3, 3, 27, 3, 3, 3, 3),
    "last one long": (1,) * 20 + (28,),
}


def peaks(recipe, device, shapes, evaluation) -> tuple[dict, int]:
    """The live bytes of each phase, and on CUDA the allocator's."""
    traced = trace_step(recipe, device, shapes[:1], also=shapes[1:], evaluation=evaluation)
    if device is CPU:
        return dict(traced.phases), traced.peak
    replayed = replay(traced.tape, Settings(), traced.marks)
    return dict(traced.phases), replayed.peaks.allocated


@pytest.mark.parametrize(
    ("device", "kernel"),
    [
        (H100, "flash"),
        pytest.param(H100, "efficient", marks=pytest.mark.slow),
        pytest.param(H100, "math", marks=[pytest.mark.slow, pytest.mark.wide]),
        pytest.param(CPU, "flash", marks=[pytest.mark.slow, pytest.mark.wide]),
        pytest.param(CPU, "math", marks=pytest.mark.slow),
    ],
)
def test_no_documents_within_the_bounds_hold_more(device, kernel) -> None:
    recipe = make_recipe(packing=True, attention=kernel, micro_batch=1, device=device.id, **BF16)
    some = slice(1, None, 3) if kernel == "flash" else slice(0, None, 3)
    cuts = dict(list(CUTS.items())[some])
    for name, cut in cuts.items():
        shape = (BatchShape(rows=1, tokens=W, documents=(cut,)),)
        held, allocated = peaks(recipe, device, shape, shape)
        bounds = RowBounds(tokens=W, documents=len(cut), longest=max(cut))
        shapes = bounding_shapes(recipe, bounds), evaluation_shapes(recipe, bounds)
        limit, limit_allocated = peaks(recipe, device, *shapes)
        assert all(held[phase] <= limit[phase] for phase in held), name
        assert allocated <= limit_allocated, name


def test_a_certificate_says_its_bounds_and_grows_with_the_documents() -> None:
    recipe = make_recipe(packing=True, micro_batch=1, device="h100-sxm", **BF16)
    few, many = (
        make_certificate(recipe, H100, None, None, data=RowBounds(tokens=W, documents=n, longest=W))
        for n in (2, 24)
    )
    assert many.data == RowBounds(tokens=W, documents=24, longest=W)
    assert many.bounds[0].endswith("at most 24 documents a micro-batch, none longer than 48 tokens")
    assert many.memory.peak_allocated > few.memory.peak_allocated
    plain = make_certificate(recipe, H100, None, None)
    assert plain.data == RowBounds(tokens=W, documents=2, longest=W)
    assert plain.bounds[0] == str(plain.data)
    assert plain.phases["backward"] == few.phases["backward"]


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [128, pytest.param(512, marks=pytest.mark.wide)])
def test_hundreds_of_documents_of_one_token_are_certified(tokens: int) -> None:
    config = {**CONFIGS["llama"], "num_hidden_layers": 1, "max_position_embeddings": 512}
    recipe = make_recipe(config=config, packing=True, micro_batch=2, device="h100-sxm",
                         sequence_length=tokens, **BF16)  # fmt: skip
    bounds = RowBounds(tokens=tokens, documents=2 * tokens, longest=1)
    made = make_certificate(recipe, H100, None, None, data=bounds)
    two = make_certificate(recipe, H100, None, None)
    assert made.memory.peak_allocated > two.memory.peak_allocated
