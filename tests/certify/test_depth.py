"""Peaks extrapolated from shallow twins are those of the full trace, to the byte."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny_steps import CONFIGS, CPU, FAMILIES, H100, make_recipe, possible

from memfit import catalog
from memfit.certify import sweep, trace
from memfit.certify.tracing import depth
from memfit.certify.tracing.runs import DEPTH_KEYS, find_runs, with_runs
from memfit.core.errors import NotCertified
from memfit.families import read_model
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Freeze, Lora, Recipe

LAYERS = 8
BF16 = {"precision": "bf16", "base_format": "bf16"}
MIXED = {"precision": "bf16-mixed"}
CHUNKED = {"loss": "chunked", "loss_chunk": 20}
VARIANTS: dict[str, dict[str, Any]] = {
    "none": {**BF16, "accumulation": 2},
    "full": {**BF16, "recompute_blocks": LAYERS, "implementation": "foreach"},
    "some": {"recompute_blocks": 2, "name": "sgd", "implementation": "loop", "attention": "math"},
    "freeze": {
        "method": "freeze", "freeze": Freeze(last_blocks=6), **BF16, **CHUNKED,
        "implementation": "loop",
    },
    "lora": {
        "method": "lora", **MIXED, "base_format": "bf16", "recompute_blocks": LAYERS,
        "packing": True,
    },
    "freeze-recompute": {
        "method": "freeze", "freeze": Freeze(last_blocks=2), **MIXED, "recompute_blocks": 7,
        "implementation": "foreach",
    },
}  # fmt: skip


def deep(family: str, variant: str, layers: int = LAYERS, **more: Any) -> Recipe:
    key = next(key for key in DEPTH_KEYS if key in CONFIGS[family])
    return make_recipe(family, config={**CONFIGS[family], key: layers, **more}, **VARIANTS[variant])


def cases() -> list[Any]:
    """Each variant on one family, and slowly every one on every family."""
    quick = set(zip(FAMILIES, cycle(VARIANTS), strict=False))
    # blocks of several kinds are refused: see below
    alike = [f for f in FAMILIES if not read_model(make_recipe(f).model).architecture.layer_kinds]
    pairs = [
        (family, variant)
        for family in alike
        for variant, changes in VARIANTS.items()
        if possible(family, changes)
    ]
    return [
        pytest.param(*pair, id="-".join(pair), marks=() if pair in quick else pytest.mark.slow)
        for pair in pairs
    ]


@pytest.mark.covering(VARIANTS)
@pytest.mark.parametrize(("family", "variant"), cases())
def test_every_phase_peaks_at_the_byte_of_the_full_trace(family: str, variant: str) -> None:
    recipe = deep(family, variant)
    device = CPU if family == "mistral" else H100
    (found,) = sweep([recipe], device)
    assert found == dict(trace(recipe, device).phases)


@pytest.mark.slow
def test_two_kinds_of_blocks_grow_on_their_own() -> None:
    recipe = replace(deep("llama", "none", 10), recompute_blocks=5)
    assert find_runs(recipe) == (5, 5)
    (found,) = sweep([recipe], H100)
    assert found == dict(trace(recipe, H100).phases)


def tape_of(codes: list[int]) -> list[tuple[depth.Token, int]]:
    """Events by number: a few kinds, some whose bytes depend on the depth, allocated and freed."""
    found = []
    for code in codes:
        sign, nbytes = (1, -1)[code % 2], None if code % 3 == 0 else 8 * (code // 2 + 1)
        token = depth.Token(sign, f"op{code // 2}", "block", Kind.ACTIVATIONS, nbytes)
        found.append((token, sign * (nbytes or 5)))
    return found


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 5), min_size=1, max_size=4)),
             max_size=4),
    st.booleans(),
)  # fmt: skip
def test_what_a_deeper_tape_adds_puts_it_together_again(shallow, added, turned) -> None:
    """Whatever stands where, whether it is compared from the start or from the end."""
    deep = list(shallow)
    for place, codes in added:
        deep[min(place, len(deep)) : min(place, len(deep))] = codes
    short, long = tape_of(shallow), tape_of(deep)
    try:
        slopes, insertions = depth._compare(short, long, 0, turned)
    except NotCertified:
        return  # it took an event of the shallow tape for another one
    sizes = tuple(n for _, n in short)
    stretch = depth.Stretch(sizes, (slopes,), tuple(insertions))
    assert stretch.at([0]) == list(sizes)
    assert stretch.at([1]) == [n for _, n in long]


def of_catalogue(name: str, **changes: Any) -> Recipe:
    reference = catalog.find_model(name).reference()
    recipe = make_recipe(config=reference.config, **BF16, sequence_length=2048, micro_batch=1)
    return replace(recipe, model=reference, **changes)


LORA = {"method": "lora", "lora": Lora(rank=16, alpha=16.0, targets=("q_proj", "v_proj"))}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {}, pytest.param({"recompute_blocks": 32}, marks=pytest.mark.wide),
    pytest.param(LORA, marks=pytest.mark.wide),
], ids=str)  # fmt: skip
def test_a_model_of_8_billion_parameters(changes: dict) -> None:
    recipe = of_catalogue("llama-3.1-8b", **changes)
    (found,) = sweep([recipe], H100)
    assert found == dict(trace(recipe, H100).phases)


@pytest.mark.slow
@pytest.mark.wide  # the tests before find each phase's peak from shallow twins, too
def test_a_model_of_80_blocks_where_a_line_through_two_depths_fails() -> None:
    recipe = of_catalogue("llama-3-70b", recompute_blocks=80, sequence_length=8192)
    full = dict(trace(recipe, H100).phases)
    (found,) = sweep([recipe], H100)
    assert found == full
    three, four = (trace(with_runs(recipe, [n]), H100).phases for n in (3, 4))
    line = {p: three[p] + (80 - 3) * (four[p] - three[p]) for p in full}
    assert line[Phase.BACKWARD] != full[Phase.BACKWARD]


def test_shallow_traces_serve_every_depth(monkeypatch) -> None:
    traced = []
    run = depth.trace_step
    monkeypatch.setattr(depth, "trace_step", lambda *args: traced.append(1) or run(*args))
    a, b, c = sweep([deep("llama", "none", n) for n in (30, 60, 90)], H100)
    assert len(traced) == 3
    assert b[Phase.BACKWARD] - a[Phase.BACKWARD] == c[Phase.BACKWARD] - b[Phase.BACKWARD] > 0


def test_shallow_models_are_traced_themselves() -> None:
    recipe = deep("llama", "none", 2)
    assert sweep([recipe], CPU) == [dict(trace(recipe, CPU).phases)]


def test_runs_of_blocks_that_are_alike() -> None:
    assert find_runs(deep("llama", "none")) == (8,)
    assert find_runs(deep("llama", "some")) == (2, 6)
    assert find_runs(deep("gpt2", "freeze-recompute")) == (6, 1, 1)
    shallow = with_runs(deep("gpt2", "freeze-recompute"), [3, 1, 1])
    assert shallow.model.config["n_layer"] == 5
    assert (shallow.recompute_blocks, shallow.freeze.last_blocks) == (4, 2)


def test_blocks_that_are_not_alike_are_refused() -> None:
    one = make_recipe(
        config={**CONFIGS["llama"], "num_hidden_layers": 9}, method="freeze",
        freeze=Freeze(patterns=("model.layers.4.*",)),
    )  # fmt: skip
    with pytest.raises(NotCertified, match="blocks of `llama` are not alike"):
        sweep([one], CPU)
    kinds = deep("llama", "none", some_list=[1, 2, 3, 4, 5, 6, 7, 8])
    with pytest.raises(NotCertified, match="`some_list` of config"):
        sweep([kinds], CPU)


def test_blocks_of_several_kinds_are_refused() -> None:
    with pytest.raises(NotCertified, match="blocks of `smollm3` are not alike"):
        sweep([deep("smollm3", "none")], CPU)


def test_a_tape_that_does_not_come_out_is_refused(monkeypatch) -> None:
    """One tensor of the deepest twin is larger than the others say."""
    run = depth.trace_step

    def uneven(recipe: Recipe, device: Any) -> Any:
        traced = run(recipe, device)
        if recipe.model.config["num_hidden_layers"] != depth.SHALLOW + depth.CHECKED:
            return traced
        events = list(traced.tape)
        place = next(i for i, e in enumerate(events) if i > traced.marks[1] and e.nbytes)
        events[place] = events[place]._replace(nbytes=events[place].nbytes + 512)
        return type(traced)(
            **{f: getattr(traced, f) for f in traced.__slots__} | {"tape": tuple(events)}
        )

    monkeypatch.setattr(depth, "trace_step", uneven)
    with pytest.raises(NotCertified, match="do not repeat in"):
        sweep([deep("llama", "none")], CPU)
