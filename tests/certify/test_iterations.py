"""Iterations of reinforcement learning hold on this CPU what a trace says they hold."""

from __future__ import annotations

import gc
import json
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from msgspec.structs import replace
from tiny_steps import CONFIGS, CPU, H100, build_watched
from tiny_steps import make_recipe as make_deeper

from memfit.adapters import find_adapter
from memfit.allocator.caching import replay
from memfit.allocator.settings import read_settings
from memfit.certify.evidence.certificate import make_certificate
from memfit.certify.iterations import First, trace_iterations
from memfit.families import read_model
from memfit.families.capabilities.kv_cache import cache_bytes
from memfit.families.capabilities.turned import LEAST_TOKENS
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.records.ledger import Kind, Phase
from memfit.records.recipe import Recipe
from memfit.records.reinforcement import Online, Policy, RewardSettings, Rollout
from memfit.train.measure.live import LiveBytes
from memfit.train.rl.judging import Judges
from memfit.train.rl.learn import Learning, iterate
from memfit.train.rl.rehearsal import Constant
from memfit.train.rl.rollout import Prompt, Sampling
from memfit.train.rl.sampling import answer_greedily, sample_in_slots
from reward_adapters import TARGETS, reward_of, write_adapter

TWO_BLOCKS = {"num_hidden_layers": 2}  # the first one and the last one; more take their turns
BENCH = Path(__file__).parents[2] / "bench"
ROLLOUT = Rollout(num_generations=2, max_prompt_length=20, max_completion_length=16, rows=3)
REWARD = RewardSettings(funcs=("number", "format"))
LORA = {"method": "lora"}
MIXED = {"precision": "bf16-mixed"}
CHUNKED = {"loss": "chunked", "loss_chunk": 20}
KL = Policy(beta=0.1)
TWICE = Policy(num_iterations=2)
PAIRS = Policy(loss_type="sigmoid", beta=0.1)
SHORT = {"max_completion_length": 4}
LONGER = {"max_completion_length": 9}  # llama's, which shows what steps of a long answer add
PPO, ALONE = Policy(beta=0.05, num_iterations=2), {"num_generations": 1}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gemma3, within windows": ("gemma3_text", {"sliding_window": 15}),
    "experts": ("qwen3_moe", {}),
    "latent attention": ("deepseek_v3", {}),
    "linear attention": ("qwen3_5_text", {}),
}
SETTINGS: dict[str, tuple[str, dict[str, Any], Policy, dict[str, Any]]] = {
    "grpo, full": ("grpo", {}, Policy(), {}),
    "rloo, full": ("rloo", {**MIXED, "recompute_blocks": 2}, TWICE, {"rows": 0}),
    "grpo, lora": ("grpo", {**LORA, **MIXED, "base_format": "bf16"}, KL, {}),
    "online_dpo, lora": (
        "online_dpo",
        {**LORA, **MIXED, "base_format": "bf16"},
        PAIRS,
        {"temperature": 0.9},
    ),
    "ppo, lora": ("ppo", {**LORA, **MIXED, "base_format": "bf16"}, PPO, ALONE),
    "ppo, recomputed": ("ppo", {**LORA, **CHUNKED, "recompute_blocks": 2}, PPO, ALONE),
    "ppo, full": ("ppo", {**MIXED, "recompute_blocks": 1}, PPO, ALONE),
    "rloo, lora": (
        "rloo",
        {**LORA, "loss": "chunked", "loss_chunk": 20},
        KL,
        {"rows": 2, "top_k": 90, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2},
    ),
}


def make_recipe(family: str, config: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    return make_deeper(family, config=(config or CONFIGS[family]) | TWO_BLOCKS, **changes)


class _Short:
    """`LiveBytes` whose first iteration's update is one phase, as a trace has it."""

    def __init__(self, live: LiveBytes) -> None:
        self.enter, self.register_batch = live.enter, live.register_batch
        self.register_cache = live.register_cache

    def stay(self, phase: Phase) -> None:
        self.enter(Phase.FIRST_STEP)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def watch_real(recipe: Recipe, iterations, *, end=None) -> LiveBytes:
    """As the trainer runs them; iterations: (tokens of each prompt, limits of answers) of each."""
    built, live = build_watched(recipe)
    judges = Judges(recipe.reward, start=Constant)
    groups = recipe.global_batch // recipe.rollout.num_generations
    gc.collect()
    gc.disable()
    try:
        with live:
            for index, (lengths, limits) in enumerate(iterations):
                prompts = [Prompt([3] * n, {"prompt": ""}) for n in lengths[:groups]]
                sample = partial(sample_in_slots, observer=live, limits=limits)
                sampling = Sampling(
                    recipe.rollout, prompts, groups, judges, lambda ids: "", sample, end, 0
                )
                learning = Learning(recipe.objective, recipe.policy, sampling, recipe.value)
                observer = live if index else First(_Short(live))
                iterate(built, learning, index, observer=observer)
    finally:
        gc.enable()
    return live


def longest(rollout: Rollout):
    return [rollout.max_prompt_length] * 64, ()


@pytest.mark.covering
@pytest.mark.parametrize(("family", "config"), FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    ("objective", "changes", "policy", "slots"), SETTINGS.values(), ids=SETTINGS
)
def test_every_phase_holds_the_same_bytes_real_and_fake(
    family, config, objective, changes, policy, slots
):
    rollout = replace(ROLLOUT, **(LONGER if family == "llama" else SHORT), **slots)
    recipe = make_recipe(
        family, config=CONFIGS[family] | config, accumulation=2,
        objective=objective, sequence_length=rollout.width, **changes,
    )  # fmt: skip
    recipe = replace(recipe, rollout=rollout, policy=policy, reward=REWARD)
    fake = trace_iterations(recipe, CPU)
    real = watch_real(recipe, [longest(recipe.rollout)] * 2)
    peaks = {phase: n for phase, n in real.peaks.items() if phase is not Phase.LOAD}
    assert {Phase.PREFILL, Phase.DECODE, Phase.ACCUMULATE} < set(peaks)
    assert {phase: fake.phases[phase] for phase in peaks} == peaks
    for phase in peaks:
        assert fake.ledger.by_kind(phase) == real.ledger().by_kind(phase)


LARGE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
LONG = {"rows": 0, "max_completion_length": 64}  # whose slots are larger than any weight
LEAST = {"max_completion_length": LEAST_TOKENS}
TURNED: dict[str, Any] = {
    "llama, full": ("llama", LARGE, {}, LEAST),
    "qwen2, biases, tied, lean": ("qwen2", LARGE, {"lean": ("norm", "mlp")}, LONG),
    "llama, bf16": ("llama", LARGE, {"precision": "bf16"}, LEAST),
    "gpt2, whose head alone is an nn.Linear": pytest.param(
        "gpt2", {"n_embd": 256, "vocab_size": 512, "n_positions": 256}, {}, LONG,
        marks=pytest.mark.wide,
    ),
    "experts": pytest.param(
        "qwen3_moe", LARGE | {"num_experts": 512}, {}, LEAST, marks=pytest.mark.wide
    ),
    "opt, lora, projected": pytest.param(
        "opt", {"hidden_size": 256, "ffn_dim": 512, "word_embed_proj_dim": 512}, LORA, LONG,
        marks=pytest.mark.wide,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("family", "config", "changes", "slots"), TURNED.values(), ids=TURNED)
def test_weights_that_lie_by_columns_are_counted(family, config, changes, slots):
    """Of weights at least 256 wide, in fp32: spare rows, and one weight that is there twice."""
    rollout = replace(ROLLOUT, **slots)
    recipe = make_recipe(
        family, config=CONFIGS[family] | config, accumulation=2, objective="grpo",
        sequence_length=rollout.width, **changes,
    )  # fmt: skip
    recipe = replace(recipe, rollout=rollout, reward=REWARD)
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    predicted, fake = predict_memory(model, recipe, CPU), trace_iterations(recipe, CPU).ledger
    real = watch_real(recipe, [longest(recipe.rollout)] * 2).ledger()
    for phase in (Phase.PREFILL, Phase.DECODE):
        assert predicted.by_kind(phase) == fake.by_kind(phase) == real.by_kind(phase)
    step = real.by_kind(Phase.FORWARD)[Kind.PARAMETERS]
    more = {p: real.by_kind(p)[Kind.PARAMETERS] - step for p in (Phase.PREFILL, Phase.DECODE)}
    assert all((n == 0) == ("precision" in changes) for n in more.values())
    told = [e.because for e in predicted.at(Phase.DECODE) if e.kind is Kind.PARAMETERS]
    assert any("by columns meanwhile" in text for text in told) == (more[Phase.DECODE] > 0)


def test_predicted_certified_and_measured_were_equal_in_every_cell():
    """bench/results/rl_memory.json: objectives that sample and two variants, seven families, LoRA
    and full."""
    cells = json.loads((BENCH / "results" / "rl_memory.json").read_text())["cells"]
    objectives = (*get_args(Online), "dapo", "gspo")
    expected = {
        f"{objective}, {family}, {method}"
        for objective in objectives for family in FAMILIES for method in ("lora", "full")
    }  # fmt: skip
    assert set(cells) == expected
    for name, cell in cells.items():
        assert cell["differ"] == [], name
        beside = {"prefill", "decode", "first_step", "forward", "backward", "optimizer_step"}
        if name.startswith("ppo"):
            beside |= {"score", "reference", "values"}
        assert all(len(cell["bytes"][phase]) == 3 for phase in beside), name


def test_a_certificate_has_the_phases_and_wants_segments_that_expand():
    rollout = replace(ROLLOUT, **SHORT)
    recipe = make_recipe(
        "llama", accumulation=2, objective="grpo", rollout=rollout, reward=REWARD, attention="math",
        sequence_length=rollout.width,
    )  # fmt: skip
    verdicts = []
    for allocator in ("", "expandable_segments:True"):
        made = make_certificate(replace(recipe, allocator=allocator), H100, H100.memory, None)
        verdicts.append(made.memory.verdict)
        assert list(made.phases)[:4] == ["load", "prefill", "decode", "first_step"]
        bytes_of_slots = cache_bytes(
            read_model(recipe.model).architecture,
            rows=3,
            tokens=rollout.width,
            dtype="float32",
            spare=20,
        )
        for phase in (Phase.PREFILL, Phase.DECODE):
            assert made.ledger.by_kind(phase)[Kind.KV_CACHE] == bytes_of_slots
        assert Kind.KV_CACHE not in made.ledger.by_kind(Phase.BACKWARD)
        assert any("3 of 4 answers in flight" in bound for bound in made.bounds)
    assert verdicts == ["at_risk", "fits"]


@pytest.mark.parametrize(
    ("rows", "group"),  # all in flight: also "rloo, full" above
    [(3, 2), *(pytest.param(*given, marks=pytest.mark.wide) for given in ((5, 4), (0, 3)))],
)
def test_answers_of_any_lengths_hold_no_more_than_the_trace(rows, group):
    """Prompts of 1 to 20 tokens and answers of 1 to 9, so that slots are refilled one by one."""
    random = torch.Generator().manual_seed(1)
    policy = Policy(beta=0.1, num_iterations=2)
    rollout = replace(ROLLOUT, rows=rows, num_generations=group, **LONGER)
    recipe = make_recipe(
        "llama", method="lora", accumulation=6, objective="grpo", sequence_length=rollout.width
    )
    recipe = replace(recipe, rollout=rollout, policy=policy, reward=REWARD)
    fake = trace_iterations(recipe, CPU)
    asked = []
    for _ in range(2):
        lengths = torch.randint(1, 21, (12,), generator=random).tolist()
        limits = torch.randint(1, 10, (12,), generator=random).tolist()
        asked.append((lengths, tuple(limits)))
    real = watch_real(recipe, asked)
    rollout_phases = {Phase.PREFILL, Phase.DECODE, Phase.SCORE, Phase.REFERENCE}
    assert rollout_phases < set(real.peaks)
    for phase in set(real.peaks) - {Phase.LOAD}:
        assert real.peaks[phase] <= fake.phases[phase], phase


def test_held_out_prompts_are_answered_within_what_a_rollout_holds():
    """As many rows are in flight, and no more prompts are read at once; sampling holds more."""
    width = replace(ROLLOUT, **SHORT).width
    recipe = make_recipe(
        "llama", method="lora", accumulation=6, objective="grpo", sequence_length=width
    )
    for rows, group in ((3, 2), (0, 3)):
        rollout = replace(ROLLOUT, rows=rows, num_generations=group, **SHORT)
        recipe = replace(recipe, rollout=rollout, policy=Policy(), reward=REWARD)
        fake = trace_iterations(recipe, CPU)
        built, live = build_watched(recipe)
        prompts = [[3] * (20 - n % 3) for n in range(17)]
        with live:
            answer_greedily(built, prompts, rollout, recipe.global_batch, None, observer=live)
        assert {Phase.PREFILL, Phase.DECODE} <= set(live.peaks)
        for phase in (Phase.PREFILL, Phase.DECODE):
            assert 0 < live.peaks[phase] <= fake.phases[phase], (rows, group, phase)


@pytest.mark.parametrize(
    ("family", "objective", "policy", "changes"),
    [
        ("llama", "ppo", PPO, {**MIXED, "base_format": "bf16"}),
        pytest.param("gpt_neox", "grpo", KL, {}, marks=pytest.mark.wide),
        pytest.param("qwen3_moe", "online_dpo", PAIRS, {}, marks=pytest.mark.wide),
        pytest.param("gemma3_text", "rloo", TWICE, {"loss": "chunked", "loss_chunk": 20},
                     marks=pytest.mark.wide),
        pytest.param("deepseek_v3", "ppo", PPO, {}, marks=pytest.mark.wide),
    ],
)  # fmt: skip
def test_a_reward_on_the_same_base_is_predicted_and_certified_to_the_byte(
    tmp_path, family, objective, policy, changes
):
    """Its adapter has targets that the policy's has not, and a rank of its own."""
    folder = write_adapter(tmp_path / "reward", CONFIGS[family] | TWO_BLOCKS, rank=6)
    rollout = replace(ROLLOUT, **SHORT, **(ALONE if objective == "ppo" else {}))
    reward = reward_of(folder, rank=6, targets=TARGETS[family], funcs=("format",))
    recipe = make_recipe(
        family, accumulation=2, objective=objective, method="lora", rollout=rollout, policy=policy,
        reward=reward, sequence_length=rollout.width, **changes,
    )  # fmt: skip
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    predicted, fake = predict_memory(model, recipe, CPU), trace_iterations(recipe, CPU)
    real = watch_real(recipe, [longest(rollout)] * 2)
    assert Phase.REWARD in real.peaks
    for phase in set(real.peaks) - {Phase.LOAD}:
        certified = fake.ledger.by_kind(phase)
        assert certified == real.ledger().by_kind(phase), phase
        if phase not in (Phase.FIRST_STEP, Phase.OPTIMIZER_STEP):  # see `SCALARS` of the bench
            assert predicted.by_kind(phase) == certified, phase
    bare = trace_iterations(replace(recipe, reward=REWARD), CPU).ledger
    held = sum(w.nbytes for w in model.weights if ".reward." in w.name or "reward_score" in w.name)
    parameters = [made.by_kind(Phase.DECODE)[Kind.PARAMETERS] for made in (fake.ledger, bare)]
    assert parameters[0] - parameters[1] == held


def test_updates_between_the_first_and_the_last_change_nothing_of_a_certificate():
    """Every phase, every kind, and what the allocator reserves, with all updates and with two."""
    rollout = replace(ROLLOUT, **SHORT, **ALONE)
    recipe = make_recipe(
        "llama", accumulation=2, objective="ppo", method="lora", rollout=rollout, reward=REWARD,
        policy=replace(PPO, num_iterations=4), sequence_length=rollout.width, attention="math",
        allocator="expandable_segments:True",
    )  # fmt: skip
    settings = read_settings(recipe.allocator)
    few, every = (trace_iterations(recipe, H100, all_updates=every) for every in (False, True))
    assert len(few.tape) < 0.8 * len(every.tape)
    assert few.phases == every.phases
    for phase in few.phases:
        assert few.ledger.by_kind(phase) == every.ledger.by_kind(phase), phase
    reserved = [max(s.reserved for s in replay(t.tape, settings, t.marks).stretches)
                for t in (few, every)]  # fmt: skip
    assert reserved[0] == reserved[1] > 0
    assert any("2 of 4 updates" in bound for bound in few.bounds)
