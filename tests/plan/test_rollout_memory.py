"""Every phase of an iteration of reinforcement learning: plan against trace, to the byte."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memfit import catalog
from memfit.adapters import find_adapter
from memfit.certify.iterations import trace_iterations
from memfit.core.units import show_bytes
from memfit.families import read_model
from memfit.families.capabilities.kv_cache import cache_bytes
from memfit.plan.memory.predicted_memory import predict_memory
from memfit.plan.simulate.sampled.rollout import Admission, Slots
from memfit.records.ledger import Kind, Phase
from memfit.records.model import LINEAR
from memfit.records.recipe import Freeze, Lora
from memfit.records.reinforcement import Policy, RewardSettings, Rollout
from tiny_models import CONFIGS, make_recipe

CPU, H100 = catalog.find_device("cpu-x86"), catalog.find_device("h100-sxm")
SCALARS = 16  # bytes of 0-dim results that a step's caller may still hold
ROLLOUT = Rollout(num_generations=2, max_prompt_length=20, max_completion_length=28, rows=3)
REWARD = RewardSettings(funcs=("number", "format"))
KL, TWICE = Policy(beta=0.1), Policy(num_iterations=2)
LORA = {"method": "lora"}
MIXED = {"precision": "bf16-mixed"}
ADAPTED = {**LORA, **MIXED, "base_format": "bf16"}
CHUNKED = {"loss": "chunked", "loss_chunk": 20}
AWAY = {"offload": "activations"}
FULL = ("grpo", {}, Policy(), {})
OFF_POLICY = ("rloo", {**MIXED, "recompute_blocks": 2}, TWICE, {"rows": 0})
WITH_KL = ("grpo", ADAPTED, KL, {})
OF_PAIRS = ("online_dpo", ADAPTED, Policy(loss_type="sigmoid", beta=0.1), {"temperature": 0.9})
OF_PAIRS_CHUNKED = (
    "online_dpo", {**LORA, **CHUNKED}, Policy(loss_type="ipo", beta=0.1), {"rows": 2}
)  # fmt: skip
PENALISED = ("rloo", {**LORA, **CHUNKED}, KL, {"rows": 2})
VALUED = ("ppo", ADAPTED, Policy(beta=0.05, num_iterations=2), {"num_generations": 1})
AT_ONCE = ("ppo", {**LORA, **CHUNKED, "recompute_blocks": 2}, Policy(), {"num_generations": 1})
WHOLE = ("ppo", MIXED, *VALUED[2:])
PENALTY, MANY = {"repetition_penalty": 1.3}, {"rows": 0}  # MANY: sampling decides
FILTERED = ("grpo", ADAPTED, KL, {"top_k": 7, **PENALTY, **MANY})
CASES = {
    "llama, ppo": ("llama", VALUED),
    "llama, ppo, full": ("llama", WHOLE),
    "qwen3, ppo, full, recomputed in part": (
        "qwen3", ("ppo", {**CHUNKED, "selective_blocks": 2}, Policy(), {"num_generations": 1})
    ),
    "gpt2, ppo, freeze": (
        "gpt2", ("ppo", {"method": "freeze", "freeze": Freeze(last_blocks=1)}, *VALUED[2:])
    ),
    "qwen3_moe, ppo, full, experts": ("qwen3_moe", WHOLE),
    "llama, ppo, chunked, recomputed": ("llama", AT_ONCE),
    "llama, ppo, nf4": ("llama", (VALUED[0], {**ADAPTED, "base_format": "nf4"}, *VALUED[2:])),
    "gpt_neox, ppo": ("gpt_neox", VALUED),
    "gpt_neox, ppo, int8": (
        "gpt_neox", (VALUED[0], {**ADAPTED, "base_format": "int8"}, *VALUED[2:])
    ),
    "gpt2, ppo": ("gpt2", VALUED),
    "opt, ppo": ("opt", VALUED),
    "qwen3_moe, ppo, experts": ("qwen3_moe", VALUED),
    "gemma3, ppo, within windows": ("gemma3_text", AT_ONCE),
    "deepseek_v3, ppo, latent attention": ("deepseek_v3", VALUED),
    "llama, full": ("llama", FULL),
    "llama, full, several updates": ("llama", OFF_POLICY),
    "llama, lora": ("llama", WITH_KL),
    "llama, lora, chunked": ("llama", PENALISED),
    "llama, bf16, warmer": (
        "llama", ("grpo", {"precision": "bf16", "base_format": "bf16"}, Policy(),
                  {"temperature": 0.7})
    ),
    "llama, nf4, inputs of blocks on the host": (
        "llama", ("grpo", {**ADAPTED, "base_format": "nf4", "recompute_blocks": 3, **AWAY}, KL, {})
    ),
    "gpt_neox, ppo, activations on the host": (
        "gpt_neox", ("ppo", {**ADAPTED, **AWAY}, *VALUED[2:])
    ),
    "llama, full, activations on the host": ("llama", ("rloo", {**MIXED, **AWAY}, TWICE, {})),
    "llama, top-k and a penalty": ("llama", FILTERED),
    "llama, top-k of all": ("llama", ("grpo", {}, Policy(), {"top_k": 5000, **MANY})),
    "llama, top-p": ("llama", ("rloo", {}, Policy(), {"top_p": 0.9, "temperature": 0.7, **MANY})),
    "llama, top-k and top-p": (
        "llama", ("grpo", {}, Policy(), {"top_k": 90, "top_p": 0.9, **MANY})
    ),
    "qwen3, pairs, min-p": ("qwen3", (*OF_PAIRS[:3], {"min_p": 0.1, "temperature": 0.9, **MANY})),
    "llama, ppo, a penalty and a temperature": (
        "llama", ("ppo", *AT_ONCE[1:3], {"num_generations": 1, "temperature": 0.7, **PENALTY})
    ),
    "llama, ppo, all filters": (
        "llama", ("ppo", *VALUED[1:3], {"num_generations": 1, "top_k": 90, "top_p": 0.9,
                  "min_p": 0.1, **PENALTY})
    ),
    "llama, many prompts at once": (
        "llama", ("grpo", {}, Policy(), {"rows": 0, "max_completion_length": 5})
    ),
    # what the prompts' keys are picked into holds more than their logits
    "llama, many answers to a long prompt": (
        "llama", ("grpo", {"micro_batch": 16}, Policy(),
                  {"num_generations": 16, "max_prompt_length": 60, "max_completion_length": 2,
                   "rows": 16})
    ),
    "llama, within its positions": (
        "llama", ("rloo", ADAPTED, KL, {"max_prompt_length": 40, "max_completion_length": 9})
    ),
    "llama, nf4": ("llama", ("grpo", {**ADAPTED, "base_format": "nf4"}, KL, {})),
    "gpt_oss, nf4, experts": ("gpt_oss", ("grpo", {**ADAPTED, "base_format": "nf4"}, KL, {})),
    "qwen3_moe, ppo, nf4, experts": (
        "qwen3_moe", (VALUED[0], {**ADAPTED, "base_format": "nf4"}, *VALUED[2:])
    ),
    "llama, nf4, chunked, recomputed": (
        "llama", ("rloo", {**ADAPTED, **CHUNKED, "base_format": "nf4", "recompute_blocks": 3}, KL,
                  {})
    ),
    "llama, lora on the head": (
        "llama", ("grpo", {**LORA, "lora": Lora(rank=4, alpha=8.0, targets=("q_proj", "lm_head"))},
                  KL, {})
    ),
    "llama, pairs": ("llama", OF_PAIRS),
    "llama, nf4, pairs": (
        "llama", ("online_dpo", {**ADAPTED, "base_format": "nf4"}, *OF_PAIRS[2:])
    ),
    "qwen3, pairs, chunked": ("qwen3", OF_PAIRS_CHUNKED),
    "llama, pairs, full": ("llama", ("online_dpo", MIXED, *OF_PAIRS[2:])),
    "gpt2, freeze, with a reference": (
        "gpt2", ("grpo", {"method": "freeze", "freeze": Freeze(last_blocks=1)}, KL, {})
    ),
    "gpt_neox, pairs": ("gpt_neox", OF_PAIRS),
    "gemma2, pairs, capped": ("gemma2", OF_PAIRS),
    "gemma3, pairs, within windows": ("gemma3_text", OF_PAIRS_CHUNKED),
    "qwen3_moe, pairs, experts": ("qwen3_moe", OF_PAIRS),
    "deepseek_v3, pairs, latent attention": ("deepseek_v3", OF_PAIRS),
    "llama, dora": ("llama", ("grpo", {**ADAPTED, "method": "dora"}, KL, {})),
    "qwen3, full": ("qwen3", FULL),
    "qwen3, lora": ("qwen3", WITH_KL),
    "gpt_neox, full, several updates": ("gpt_neox", OFF_POLICY),
    "gpt_neox, lora": ("gpt_neox", WITH_KL),
    "gpt_neox, int8": ("gpt_neox", ("grpo", {**ADAPTED, "base_format": "int8"}, KL, {})),
    "gpt2, full": ("gpt2", FULL),
    "gpt2, lora, chunked": ("gpt2", PENALISED),
    "opt, lora": ("opt", WITH_KL),
    "gemma3, full, within windows": ("gemma3_text", FULL),
    "gemma3, lora, within windows": ("gemma3_text", PENALISED),
    "gemma2, lora, capped": ("gemma2", WITH_KL),
    "granite, rloo, scaled": ("granite", PENALISED),
    "gpt_oss, sinks": ("gpt_oss", WITH_KL),
    "qwen3_moe, full, experts": ("qwen3_moe", FULL),
    "qwen3_moe, lora, experts": ("qwen3_moe", PENALISED),
    "deepseek_v3, full, latent attention": ("deepseek_v3", FULL),
    "deepseek_v3, lora, latent attention": ("deepseek_v3", WITH_KL),
    "deepseek_v2, lora, latent attention": ("deepseek_v2", PENALISED),
    # states of a row decide: they are larger than what a step makes of the vocabulary
    "qwen3_5, ppo, states": ("qwen3_5_text", VALUED),
    "qwen3_5, full, states": ("qwen3_5_text", FULL),
    "qwen3_5, lora, states, prompts of two chunks": (
        "qwen3_5_text", ("grpo", ADAPTED, KL, {"max_prompt_length": 70, "rows": 2})
    ),
    "qwen3_5, nf4, states": (
        "qwen3_5_text", ("grpo", {**ADAPTED, "base_format": "nf4"}, KL, {})
    ),
    "qwen3_next, nf4, states and experts": (
        "qwen3_next", ("grpo", {**ADAPTED, "base_format": "nf4"}, KL, {})
    ),
    "bloom, lora, by distance": ("bloom", ("grpo", {**ADAPTED, "attention": "math"}, KL, {})),
    "mpt, full, by distance": ("mpt", ("rloo", {"attention": "math"}, TWICE, {})),
    "falcon, lora": ("falcon", WITH_KL),
    "gptj, lora": ("gptj", WITH_KL),
    "phi, lora": ("phi", WITH_KL),
    "phi3, lora": ("phi3", PENALISED),
    "olmo2, full": ("olmo2", OFF_POLICY),
    "stablelm, full": ("stablelm", FULL),
    "glm4_moe, lora": ("glm4_moe", WITH_KL),
}  # fmt: skip
_LARGE_STATES = {
    "linear_key_head_dim": 32, "linear_value_head_dim": 48, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "max_position_embeddings": 256,
}  # fmt: skip
CHANGED = {
    "gemma3_text": {"sliding_window": 15},
    "qwen3_5_text": _LARGE_STATES, "qwen3_next": _LARGE_STATES,
}  # fmt: skip
SHORT = {"max_completion_length": 4}
LONG = ("llama, dora", "llama, nf4")  # which show what steps of a long answer add
# whose parts another family of these has, too
ALIKE = (
    "qwen3, lora", "qwen3, full", "opt, lora", "phi, lora", "phi3, lora", "olmo2, full",
    "stablelm, full", "glm4_moe, lora", "deepseek_v2, lora, latent attention", "opt, ppo",
    "falcon, lora", "gptj, lora", "granite, rloo, scaled", "mpt, full, by distance",
    "gpt2, freeze, with a reference", "qwen3_moe, ppo, full, experts",
)  # fmt: skip


def cases(device, names):
    marks = {n: [pytest.mark.wide] if n in ALIKE else [] for n in names}
    return [pytest.param(device, n, marks=marks[n]) for n in names]


def make(family, setting, **more):
    objective, changes, policy, slots = setting
    rollout = replace(ROLLOUT, **slots)
    recipe = make_recipe(
        family, config=CONFIGS[family] | CHANGED.get(family, {}), accumulation=4,
        objective=objective, sequence_length=rollout.width, **changes, **more,
    )  # fmt: skip
    return replace(recipe, rollout=rollout, policy=policy, reward=REWARD)


def make_short(name, **more):
    family, (objective, changes, policy, slots) = CASES[name]
    return make(family, (objective, changes, policy, slots if name in LONG else SHORT | slots),
                **more)  # fmt: skip


def compare(recipe, device):
    fake = trace_iterations(recipe, device).ledger
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger = predict_memory(model, recipe, device)
    assert ledger.phases == fake.phases
    for phase in fake.phases:
        predicted, found = ledger.by_kind(phase), fake.by_kind(phase)
        predicted.pop(Kind.FRAGMENTATION, None)
        if phase is Phase.OPTIMIZER_STEP:
            assert abs(sum(predicted.values()) - sum(found.values())) <= SCALARS
            continue
        assert predicted == found, phase


ON_CUDA = [
    "llama, ppo", "llama, ppo, chunked, recomputed", "llama, ppo, nf4", "gpt_neox, ppo, int8",
    "llama, full", "llama, full, several updates", "llama, lora, chunked", "llama, nf4",
    "llama, top-k and a penalty", "llama, ppo, all filters",
    "gpt_neox, lora", "gpt_neox, int8", "gemma3, full, within windows", "gemma2, lora, capped",
    "gpt_oss, sinks", "deepseek_v3, lora, latent attention", "qwen3_moe, full, experts",
    "llama, pairs", "gpt_neox, pairs", "qwen3, pairs, chunked",
    "llama, nf4, inputs of blocks on the host", "gpt_neox, ppo, activations on the host",
    "llama, full, activations on the host", "llama, pairs, full", "llama, ppo, full",
    "qwen3_5, ppo, states", "qwen3_5, lora, states, prompts of two chunks", "qwen3_5, full, states",
]  # fmt: skip


# one matrix: what a case on one device has shown of its settings, the other need not show again
@pytest.mark.covering(CASES)
@pytest.mark.parametrize(("device", "name"), [*cases("cpu", CASES), *cases("cuda", ON_CUDA)])
def test_every_phase_holds_what_is_predicted(device, name):
    """Such traces are held to real tensors by tests/certify/test_iterations.py."""
    if device == "cpu":
        compare(make_short(name), CPU)
        return
    family, setting = CASES[name]
    wide = "precision" not in setting[1] or family == "gemma3_text"
    attention = "math" if family in ("gpt_oss", "gemma2") else "efficient" if wide else "flash"
    compare(make_short(name, attention=attention), H100)


WITHIN = {
    "ppo, full": ("llama, ppo, full", MIXED), "ppo, lora": ("llama, ppo, full", ADAPTED),
    "grpo": ("llama, full", {}), "several updates": ("llama, full, several updates", {}),
    "rloo": ("llama, lora, chunked", ADAPTED), "pairs": ("llama, pairs, full", MIXED),
}  # fmt: skip
OF_OTHERS = ("ppo, lora", "grpo")  # an adapter as of "rloo", whole weights as of "several updates"


@pytest.mark.parametrize("device", [CPU, H100], ids=["cpu", "cuda"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.wide] if n in OF_OTHERS else []) for n in WITHIN]
)
def test_an_update_within_backward_holds_what_is_predicted(name, device):
    """One micro-batch of each model a step, and no gradient of any is left at its end, nor what
    the iteration's figures are made of: the optimizer's step is held to the byte, too."""
    case, changes = WITHIN[name]
    made = make_short(case)
    changes = changes | ({} if device is CPU else {"attention": "efficient"})
    recipe = make_recipe(
        "llama", objective=made.objective, accumulation=1, micro_batch=8, rollout=made.rollout,
        policy=made.policy, reward=REWARD, sequence_length=made.rollout.width,
        optimizer={"in_backward": True, "clip_norm": 0.0}, **changes,
    )  # fmt: skip
    fake = trace_iterations(recipe, device).ledger
    model = find_adapter(recipe).adapt(read_model(recipe.model), recipe)
    ledger = predict_memory(model, recipe, device)
    assert ledger.phases == fake.phases
    assert Kind.GRADIENTS not in ledger.by_kind(Phase.OPTIMIZER_STEP)
    for phase in fake.phases:
        predicted = ledger.by_kind(phase)
        predicted.pop(Kind.FRAGMENTATION, None)
        assert predicted == fake.by_kind(phase), phase


def test_the_slots_are_those_that_the_loop_allocates():
    recipe = make("gemma3_text", FULL)
    model = read_model(recipe.model)
    ledger = predict_memory(model, recipe, CPU)
    expected = cache_bytes(model.architecture, rows=3, tokens=48, dtype="float32", spare=20)
    for phase in (Phase.PREFILL, Phase.DECODE):
        assert ledger.by_kind(phase)[Kind.KV_CACHE] == expected
    for phase in set(ledger.phases) - {Phase.PREFILL, Phase.DECODE}:
        assert Kind.KV_CACHE not in ledger.by_kind(phase)


def test_the_ledger_says_what_a_rollout_s_bytes_are_of():
    model = read_model(make("llama", FULL).model)
    ledger = predict_memory(model, make("llama", FULL), CPU)
    because = {(e.phase, e.kind): e.because for e in ledger.entries}
    a = model.architecture
    each = 2 * a.layers * a.kv_heads * a.head_dim * 4
    for phase in (Phase.PREFILL, Phase.DECODE):
        text = because[phase, Kind.KV_CACHE]
        assert text.startswith(f"3 rows of 48 tokens and one of 20 x {each} B in")
    assert because[Phase.PREFILL, Kind.ACTIVATIONS] == "a call over 2 x 20 tokens of prompts"
    assert "a step of 3 rows over 48 tokens" in because[Phase.DECODE, Kind.LOGITS]


def test_states_of_rows_are_in_the_ledger_and_do_not_grow_with_answers():
    """By hand: 8 heads of 32 x 48 fp32, and 4 columns of 2 x 4 x 32 + 8 x 48 channels."""
    recipe = make("qwen3_5_text", FULL)
    a, held, told = read_model(recipe.model).architecture, [], []
    stateful = sum(a.kind(layer) == LINEAR for layer in range(a.layers))
    state = stateful * (8 * 32 * 48 + 4 * 640) * 4
    for completion in (28, 58):
        rollout = replace(recipe.rollout, max_completion_length=completion)
        asked = replace(recipe, rollout=rollout, sequence_length=rollout.width)
        ledger = predict_memory(read_model(recipe.model), asked, CPU)
        entry = next(e for e in ledger.at(Phase.DECODE) if e.kind is Kind.KV_CACHE)
        held.append(entry.nbytes)
        told.append(entry.because)
    token = (a.layers - stateful) * 2 * a.kv_heads * a.head_dim * 4
    assert held == [(3 * (20 + n) + 20) * token + 4 * state for n in (28, 58)]
    assert f", and {show_bytes(state)} of states each in {stateful} layers" in told[0]
    assert told[0].startswith(f"3 rows of 48 tokens and one of 20 x {token} B in")


@pytest.mark.parametrize(
    ("rows", "group", "prompt", "answers", "expected"),
    [  # by hand: (prompts, answers, whether an earlier prompt's logits are kept)
        (3, 2, 20, 6, [(2, 3, False), (0, 1, True), (1, 2, True)]),
        (4, 2, 3000, 4, [(1, 2, False), (1, 2, True)]),  # two prompts are above 4,096 tokens
        (4, 2, 2048, 4, [(2, 4, False)]),
        (3, 8, 20, 8, [(1, 3, False), (0, 3, True), (0, 2, True)]),
        (2, 3, 20, 6, [(1, 2, False), (0, 1, True), (1, 1, True), (0, 2, True)]),
    ],
)  # fmt: skip
def test_prompts_are_read_while_slots_are_free(rows, group, prompt, answers, expected):
    slots = Slots(
        rows=rows, group=group, prompt=prompt, tokens=prompt + 9, reach=2, answers=answers,
    )  # fmt: skip
    made = [Admission(prompts=p, answers=a, later=later) for p, a, later in expected]
    assert list(slots.admissions()) == made
