"""The candidates that fit with the least recomputing, against every candidate's own memory."""

import numpy
import pytest

from memfit.plan.frameworks.shared.columns import pick
from memfit.plan.memory.bounds import find_bounds
from memfit.plan.search.candidates import span
from memfit.plan.search.fitting import find_fitting
from memfit.records import from_data
from memfit.records.request import Request

LLAMA = {
    "name": "llama", "model_type": "llama", "vocab_size": 2048, "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip
DEEPSEEK = {
    "name": "deepseek", "model_type": "deepseek_v3", "vocab_size": 4096, "hidden_size": 512,
    "intermediate_size": 1408, "moe_intermediate_size": 256, "num_hidden_layers": 13,
    "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 2,
    "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "n_group": 1, "topk_group": 1, "max_position_embeddings": 8192,
}  # fmt: skip


# blocks that are built again together, so that recomputing the whole of a chunk may need more
GROUPED = {"recompute_num_layers": 4}


def ask(model, framework, **more):
    request = {
        "model": model, "framework": framework, "hardware": {"device": "h100-sxm", "count": 16},
        "task": {"sequence_length": 2048, "global_batch": 64}, "attention": "flash", **more,
    }  # fmt: skip
    return from_data(request, Request, source="test")


def weigh(space, part, certain):
    """Bytes of the device of every candidate of a part, one after the other."""
    found = []
    for recipes in part.slices(5000):
        peak = space.framework.measure(space.job(recipes)).peak
        bounds = find_bounds(space.framework, space.device, recipes.parallel, peak)
        found.append(bounds.high if certain else bounds.low)
    return numpy.concatenate(found)


def key(recipe):
    p, o = recipe.parallel, recipe.options
    splits = [value for name, value in o.items() if "pipeline" in name]
    return repr((p, recipe.micro_batch, recipe.recompute_blocks, splits))


def keys(recipes):
    return [key(recipe) for recipe in recipes]


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize(
    ("model", "framework"),
    [(LLAMA, "megatron"), (DEEPSEEK, "megatron"), (LLAMA, "torchtitan")],
)
def test_the_leanest_that_fit_are_those_that_trying_all_finds(model, framework, certain):
    more = {"options": GROUPED} if framework == "megatron" else {}
    space = span(ask(model, framework, **more))
    for part in space.parts[:3]:
        needed = weigh(space, part, certain)
        choices = part.choices if part.choices is not None else numpy.ones(part.size, int)
        starts = choices.cumsum() - choices
        for share in (0.0, 0.02, 0.3, 0.7, 1.0):
            usable = int(numpy.quantile(needed, share)) + 1
            right = [
                start + int(fits.argmax())
                for start, count in zip(starts, choices, strict=True)
                if (fits := needed[start : start + count] <= usable).any()
            ]
            found = [
                key(pick(recipes, row))
                for recipes in find_fitting(space, part, usable, certain=certain)
                for row in range(len(recipes.micro_batch))
            ]
            assert len(found) == len(right) > 0
            if share in (0.02, 0.3):
                assert sorted(found) == sorted(keys(part.recipe_of(row) for row in right))


def test_memory_only_falls_as_long_as_a_part_says_it_does():
    for model in (LLAMA, DEEPSEEK):
        space = span(ask(model, "megatron", options=GROUPED))
        part = space.parts[0]
        needed, begin = weigh(space, part, True), part.choices.cumsum() - part.choices
        for start, falling in zip(begin, part.falling, strict=True):
            assert (numpy.diff(needed[start : start + falling]) <= 0).all()
        rises = [
            numpy.diff(needed[start : start + count]).max(initial=0) > 0
            for start, count in zip(begin, part.choices, strict=True)
        ]
        assert any(rises)  # where a chunk is recomputed whole, so that the rest is tried one by one


def test_an_unknown_context_fits_nothing():
    space = span(ask(LLAMA, "megatron", hardware={"device": "gaudi3", "count": 4}))
    assert list(find_fitting(space, space.parts[0], 2**60)) == []
