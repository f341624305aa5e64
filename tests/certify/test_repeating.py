"""The tape of a deep model from a trace of some of its blocks: event for event the full trace's."""

from __future__ import annotations

from collections import OrderedDict
from itertools import cycle
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from test_exactness import VARIANTS as EXACT
from tiny_steps import CONFIGS, CPU, FAMILIES, H100, LORA_TARGETS, make_recipe, possible
from torch import nn

from memfit import certify as certification
from memfit.certify.evidence.certificate import make_certificate
from memfit.certify.repeating import shortest
from memfit.certify.repeating.alike import Layout, Unlike, describe_module, find_layout
from memfit.certify.repeating.lengthened import Few, lengthen
from memfit.certify.repeating.live import RepeatingRecorder
from memfit.certify.tracing.recorder import Recorder, Trace, make_recorder
from memfit.certify.tracing.runs import DEPTH_KEYS, find_runs, with_runs
from memfit.certify.tracing.trace_step import trace_generation, trace_step
from memfit.core.errors import NotCertified
from memfit.families import read_model
from memfit.records.hardware import Device
from memfit.records.ledger import Phase
from memfit.records.recipe import Freeze, Lora, Parallel, Recipe
from memfit.train.measure.storages import Block

LAYERS = 11
BF16 = {"precision": "bf16", "base_format": "bf16"}
# of `test_exactness`, and what is added here: kinds of state, of base and of blocks
VARIANTS: dict[str, dict[str, Any]] = {
    **EXACT,
    "adafactor": {"name": "adafactor", "implementation": "loop"},
    "muon": {**BF16, "name": "muon", "implementation": "loop"},
    "lion": {"name": "lion", "implementation": "loop"},
    "nf4": {
        "method": "lora", "precision": "bf16-mixed", "base_format": "nf4", "recompute_blocks": 1,
    },
    "int8": {"method": "lora", "precision": "bf16-mixed", "base_format": "int8"},
    "dropout": {"method": "lora", "lora": "dropout", "recompute_blocks": 1},
    "qat": {"qat": "int8", "precision": "bf16-mixed"},
    "lean": {"lean": ("norm", "mlp"), "precision": "bf16-mixed"},
    "one-block-trained": {
        "method": "freeze", "freeze": Freeze(patterns=("model.layers.6.*",)),
    },
    "head-trained": {"method": "freeze", "freeze": Freeze(patterns=("lm_head.*",))},
}  # fmt: skip
SPLITS = ("recompute_blocks", "selective_blocks")
# families whose blocks have something of their own, or take turns
OWN_BLOCKS = (
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "gpt2",
    "bloom",
    "falcon",
    "qwen3_moe",
    "deepseek_v3",
)
QUICK = (
    "bf16", "lora-bf16-base", "recompute-all-mixed", "freeze", "selective-some-lora-mixed",
    "foreach", "accumulation", "dpo-chunked-mixed-recompute", "fp16-foreach-accumulation", "nf4",
    "8-bit-lora-mixed", "packing-mixed-recompute", "one-block-trained", "muon",
)  # fmt: skip


def deep(family: str, layers: int = LAYERS, **changes: Any) -> Recipe:
    key = next(key for key in DEPTH_KEYS if key in CONFIGS[family])
    if changes.get("lora") == "dropout":
        targets = LORA_TARGETS.get(family, ("q_proj", "v_proj"))
        changes["lora"] = Lora(rank=4, alpha=8.0, dropout=0.1, targets=targets)
    return make_recipe(family, config={**CONFIGS[family], key: layers}, **changes)


def with_depth(changes: dict[str, Any], layers: int = LAYERS) -> dict[str, Any]:
    """A variant of three blocks, for more: what covered some or all of them still does."""
    found = dict(changes)
    for key in SPLITS:
        if found.get(key):
            found[key] = layers if found[key] == 3 else layers // 2
    if found.get("freeze") == Freeze(last_blocks=1):
        found["freeze"] = Freeze(last_blocks=5)
    return found


def trace_both(recipe: Recipe, device: Device, trace: Any = trace_step) -> list[Trace]:
    """Of some of the blocks, and of all; from one line, which the trace names."""
    recorders = make_recorder(RepeatingRecorder, device), make_recorder(Recorder, device)
    few, full = (trace(recipe, device, recorder=recorder) for recorder in recorders)
    assert any("of its blocks: blocks" in bound for bound in few.bounds), "all blocks ran"
    return [few, full]


def assert_same(few: Trace, full: Trace) -> None:
    """Every event, what every tensor is, each peak and what is alive there."""
    for name in ("phases", "ledger", "marks", "stretches", "host", "tape"):
        assert getattr(few, name) == getattr(full, name), name
    for event in full.tape:
        if event.nbytes > 0:
            assert few.tensor(event.tensor) == full.tensor(event.tensor)
    for phase in full.phases:
        assert few.alive(phase) == full.alive(phase)


def cases() -> list[Any]:
    quick = {pair for pair in zip(OWN_BLOCKS, cycle(QUICK[:6]), strict=False)}
    quick |= {("llama", name) for name in QUICK[6:]}
    pairs = [
        (family, name)
        for family in FAMILIES
        for name, changes in VARIANTS.items()
        if possible(family, changes) and not (family != "llama" and "-trained" in name)
    ]
    return [
        pytest.param(
            *pair, id="-".join(pair),
            marks=() if pair in quick else (pytest.mark.slow, pytest.mark.wide),
        )
        for pair in pairs
    ]  # fmt: skip


@pytest.mark.parametrize(("family", "variant"), cases())
def test_the_tape_is_the_full_traces(family: str, variant: str) -> None:
    changes = VARIANTS[variant]
    halved = any(0 < changes.get(key, 0) < 3 for key in SPLITS) or "freeze" in changes
    kinds = read_model(deep(family, 24).model).architecture.layer_kinds
    layers = (11 if halved else 6) * max(1, len(kinds))
    recipe = deep(family, layers, **with_depth(VARIANTS[variant], layers))
    assert_same(*trace_both(recipe, CPU))


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama", 7), ("gemma2", 11), ("mixtral", 7),
        pytest.param("gemma3_text", 31, marks=pytest.mark.wide),  # a longer cycle than gemma2's
    ],
)  # fmt: skip
def test_the_tape_of_a_gpu_is_too(family: str, layers: int) -> None:
    recipe = deep(family, layers, **BF16, accumulation=2, recompute_blocks=0)
    assert_same(*trace_both(recipe, H100))


@pytest.mark.covering
@pytest.mark.parametrize("family", ["llama", "gpt2", "smollm3"])
@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "h100"])
def test_so_is_that_of_generating(family: str, device: Device) -> None:
    recipe = deep(family, 23, **BF16)
    assert_same(*trace_both(recipe, device, trace_generation))


@pytest.mark.parametrize("layers", [5, 6, 7, 16, pytest.param(40, marks=pytest.mark.wide)])
def test_at_every_depth(layers: int) -> None:
    recipe = deep("llama", layers, method="lora", recompute_blocks=0)
    assert_same(*trace_both(recipe, CPU))


def test_a_certificate_is_the_same_and_says_how_it_was_traced() -> None:
    recipe = deep("llama", **BF16)
    few, full = (
        make_certificate(recipe, H100, H100.memory, None, full_trace=full) for full in (False, True)
    )
    assert few.memory == full.memory
    assert (few.phases, few.ledger, few.at_peak) == (full.phases, full.ledger, full.at_peak)
    assert few.generation == full.generation
    said = "traced with 4 of its blocks: blocks 3 to 9 repeat 2"
    assert said in few.bounds
    assert set(few.bounds) - set(full.bounds) == {said}


def test_two_runs_and_a_cycle_are_named() -> None:
    recipe = deep("llama", recompute_blocks=5)
    assert trace_both(recipe, CPU)[0].bounds[-1] == (
        "traced with 8 of its blocks: blocks 3 to 3 repeat 2, blocks 8 to 9 repeat 7"
    )
    assert trace_both(deep("gemma2", 16), CPU)[0].bounds[-1] == (
        "traced with 8 of its blocks: blocks 6 to 13 repeat 4 to 5"
    )


def test_few_blocks_are_all_traced() -> None:
    recipe = deep("llama", 4)
    found = trace_step(recipe, CPU, recorder=make_recorder(RepeatingRecorder, CPU))
    assert found == trace_step(recipe, CPU)


@pytest.mark.parametrize("changes", [{"in_backward": True, "clip_norm": 0.0}], ids=str)
def test_what_mixes_blocks_is_traced_in_full(changes: dict[str, Any]) -> None:
    assert not shortest.may_repeat(deep("llama", **changes))
    assert shortest.may_repeat(deep("llama"))


def test_where_blocks_are_unlike_after_all_every_block_is_traced() -> None:
    """The second of the two blocks that are compared makes one storage more."""
    recipe, ran = deep("llama"), list[type]()

    def trace(recorder: Any) -> Trace:
        ran.append(type(recorder))
        register = recorder.register_model

        def registered(model: nn.Module) -> None:
            register(model)
            block = model.model.layers[2].mlp
            plain = block.forward
            if len(ran) == 1:  # unseen by who compares the modules
                block.forward = lambda x: plain(x) + torch.zeros_like(x)

        recorder.register_model = registered
        return trace_step(recipe, CPU, recorder=recorder)

    found = shortest.trace_shortest(trace, recipe, CPU, full=False)
    assert len(ran) == 2
    assert found.bounds[-1].startswith("all blocks traced: blocks that are alike do not have")
    assert found.tape == trace_step(recipe, CPU).tape


def test_what_reads_every_block_is_traced_in_full() -> None:
    """A class that hands on what each block made, as a router's loss does."""
    recipe, held = deep("llama"), list[torch.Tensor]()
    recorder = make_recorder(RepeatingRecorder, CPU)
    register = recorder.register_model

    def registered(model: nn.Module) -> None:
        register(model)
        for block in model.model.layers:
            block.register_forward_hook(lambda *call: held.append(call[2]))
        model.model.norm.register_forward_pre_hook(lambda *_: torch.stack(held[-4:]))

    recorder.register_model = registered
    with pytest.raises(Unlike, match="outside of the blocks reads"):
        trace_step(recipe, CPU, recorder=recorder)


def test_a_failing_step_fails_as_ever() -> None:
    def trace(recorder: Any) -> Trace:
        raise NotCertified(f"no {type(recorder).__name__}", hint="")

    with pytest.raises(NotCertified, match="no Recorder"):
        shortest.trace_shortest(trace, deep("llama"), CPU, full=False)


# -- which blocks are alike ------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self, width: int, index: int, **attributes: Any) -> None:
        super().__init__()
        self.layer_idx = index
        self.path = f"model.layers.{index}.part"
        self.product = nn.Linear(width, width, device="meta")
        self.__dict__.update(attributes)


def layout_of(kinds: str, config: object = None) -> Layout | None:
    """Of blocks as wide as their letters say."""
    blocks = [Part(ord(kind), n) for n, kind in enumerate(kinds)]
    return find_layout("layers.", blocks, config or type("Config", (), {})())


@pytest.mark.parametrize(
    ("kinds", "kept", "more"),
    [
        ("aaaaaaaa", (0, 1, 2, 7), {2: 4}),
        ("baaaaaaa", (0, 1, 2, 3, 7), {3: 3}),
        ("aaaaaabbbbbbbb", (0, 1, 2, 5, 6, 7, 8, 13), {2: 2, 6: 4}),
        ("abababababab", (0, 1, 2, 3, 4, 5, 10, 11), {2: 2}),
        ("aaabaaabaaabaaabaaabaa", (*range(12), 16, 17, 18, 19, 20, 21), {2: 1}),
    ],
)
def test_runs_of_alike_blocks(kinds: str, kept: tuple[int, ...], more: dict[int, int]) -> None:
    found = layout_of(kinds)
    assert found is not None
    assert (found.traced, dict(found.more)) == (kept, more)
    left_out = {block for block, _, _ in found.repeated}
    assert left_out == set(range(len(kinds))) - set(kept)
    assert all(kinds[block] == kinds[like] for block, like, _ in found.repeated)


@pytest.mark.parametrize("kinds", ["aaaa", "abcdefgh", "ababab"])
def test_too_few_alike(kinds: str) -> None:
    assert layout_of(kinds) is None


def test_a_list_of_the_config_must_say_the_same_of_each_blocks_new_place() -> None:
    config = type("Config", (), {})()
    config.layer_types = ["full"] * 7 + ["sliding"]
    assert layout_of("aaaaaaaa", config) is None
    config.layer_types = ["full"] * 8
    assert layout_of("aaaaaaaa", config) is not None


@pytest.mark.parametrize(
    "attributes",
    [
        {"window": 5}, {"training": False}, {"act": torch.tanh}, {"names": ["a", "b"]},
        {"settings": OrderedDict(a=1)}, {"path": "model.layers.9.part"},
    ],
    ids=lambda attributes: next(iter(attributes)),
)  # fmt: skip
def test_a_block_differs_by_any_attribute(attributes: dict[str, Any]) -> None:
    plain = describe_module(Part(3, 1), 1)
    assert describe_module(Part(3, 2), 2) == plain
    assert describe_module(Part(3, 2, **attributes), 2) != plain


def test_a_block_differs_by_what_its_forward_closes_over() -> None:
    def wrapped(value: object) -> Part:
        part = Part(3, 1)
        part.forward = lambda x: (x, value)
        return part

    first, same, other = (describe_module(wrapped(value), 1) for value in (1, 1, 2))
    assert first == same != other


def test_a_weight_that_is_trained_is_another() -> None:
    frozen = Part(3, 1).requires_grad_(False)
    assert describe_module(frozen, 1) != describe_module(Part(3, 1), 1)


# -- made by hand ----------------------------------------------------------------------------


def by_hand(events: list[int], units: list[int], regions: Any = None) -> Few:
    """A recording whose storages are of these units, in a forward."""
    blocks = [
        Block(1, "op", f"layers.{[0, 1, 2, 9][u]}" if u >= 0 else "", "", False) for u in units
    ]
    regions = regions or [(0, len(events))]
    return Few(events, blocks, [(Phase.LOAD, 0)], regions, [False] * len(units), [])


LAYOUT = Layout("layers.", ((0,), (1,), (2,), (9,)), {2: 6})


def test_each_block_frees_what_the_one_before_it_made() -> None:
    made = lengthen(by_hand([0, 1, ~0, 2, ~1, 3, ~2], [0, 1, 2, 3]), LAYOUT)
    assert made.events == [0, 1, ~0, 2, ~1, 3, ~2, 4, ~3, 5, ~4, 6, ~5, 7, ~6, 8, ~7, 9, ~8]
    assert [block.module for block in made.blocks] == [f"layers.{n}" for n in range(10)]
    assert made.peaks == {Phase.LOAD: (2, 2)}


@pytest.mark.parametrize(
    ("events", "units", "why"),
    [
        ([0, 1, ~0, 2, 3], [0, 1, 2, 3], "do not have the same events"),
        ([0, 1, 2, ~0, 3], [0, 1, 2, 3], "no neighbour"),
        ([0, 1, 2, 3, ~2], [0, 1, 2, 3], "one is let go and another is not"),
        ([0, 2, 1, 3], [0, 1, 2, 3], "one after the other"),
        ([0, 1, 2], [0, 1, 2], "one after the other"),
        ([4, 0, 1, ~4, 2, 3], [0, 1, 2, 3, -1], "no neighbour"),
    ],
)
def test_a_doubt_is_no_tape(events: list[int], units: list[int], why: str) -> None:
    with pytest.raises(Unlike, match=why):
        lengthen(by_hand(events, units), LAYOUT)


def test_what_holds_something_of_each_block_lets_it_go_in_a_row() -> None:
    events = [0, 1, 2, 3, ~3, ~2, ~1, ~0]
    made = lengthen(by_hand(events, [0, 1, 2, 3], [(0, 4)]), LAYOUT)
    assert made.events == [*range(10), *(~n for n in reversed(range(10)))]


# -- how it is asked for ---------------------------------------------------------------------


def test_an_order_says_whether_every_block_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def run(orders: Any) -> list[Any]:
        seen.extend(order.full_trace for order in orders)
        return [NotCertified("not now", hint="")] * len(orders)

    monkeypatch.setattr(certification, "_run", run)
    order = certification.Order(recipe=deep("llama"), device=CPU, usable=None)
    certification.certify_all([order])
    with certification.with_full_traces():
        certification.certify_all([order])
    assert seen == [False, True]


@pytest.mark.parametrize(("pp", "stages"), [(1, False), (2, True)])
def test_an_order_of_one_stage_is_no_order_of_stages(
    monkeypatch: pytest.MonkeyPatch, pp: int, stages: bool
) -> None:
    """Else its tape would not be written: a certificate of stages writes none."""
    seen: list[bool] = []

    def run(orders: Any) -> list[Any]:
        seen.extend(order.stages for order in orders)
        return [NotCertified("not now", hint="")] * len(orders)

    monkeypatch.setattr(certification, "_run", run)
    recipe = replace(deep("llama"), parallel=Parallel(pp=pp), accumulation=2)
    with pytest.raises(NotCertified):
        certification.certify(recipe, CPU, None, stages=True)
    assert seen == [stages]


def test_runs_of_blocks_that_are_alike():
    freeze = {"method": "freeze", "freeze": Freeze(last_blocks=2), "recompute_blocks": 7}
    some = deep("gpt2", 8, **freeze)
    assert find_runs(deep("llama", 8)) == (8,)
    assert find_runs(deep("llama", 8, recompute_blocks=2)) == (2, 6)
    assert find_runs(some) == (6, 1, 1)
    shallow = with_runs(some, [3, 1, 1])
    assert shallow.model.config["n_layer"] == 5
    assert (shallow.recompute_blocks, shallow.freeze.last_blocks) == (4, 2)
