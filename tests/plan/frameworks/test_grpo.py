"""TRL's GRPOTrainer and RLOOTrainer, phase by phase, held to the trainers themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.plan.memory.declared import predict_ledger
from memfit.plan.request.defaults import read_defaults
from memfit.plan.request.problem import find_device
from memfit.records import from_data
from memfit.records.ledger import Kind, Ledger, Phase
from memfit.records.request import Request
from neighbour_programs import run_program

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "bench"))
import grpo

BENCH = Path(grpo.__file__).parent
LIMIT = 0.5  # percent of a phase's peak
BEYOND = {  # and where a prediction is further below, by less than WIDE_LIMIT
    ("gpt_neox: mixed, padded, recomputed", "decode"), ("gpt2: lora, mixed, dropout", "update"),
    ("olmo2: mixed, padded, recomputed", "prefill"),
}  # fmt: skip
WIDE_LIMIT = 1.5
RUN = (  # of those that are not run beside every wide test: one an axis
    "llama: lora, mixed, dropout", "gemma3_text: full, reference",
)  # fmt: skip
RUN_WIDE = (
    "gpt2: mixed, padded, recomputed", "llama: penalised, top-k, top-p", "llama: two iterations",
    "llama: rollouts within a step", "llama: rloo, reference", "llama: lora, reference",
)  # fmt: skip


def test_what_was_recorded_is_what_is_predicted_and_within_the_limit() -> None:
    rows = [json.loads(line) for line in grpo.OUT.read_text().splitlines()]
    cases = grpo.make_cases()
    assert [row["name"] for row in rows] == list(cases)
    assert {row["name"]: row["predicted"] for row in rows} == {
        name: grpo.predict(case) for name, case in cases.items()
    }
    off = {(row["name"], phase): x for row in rows for phase, x in grpo.off_by(row).items()}
    assert {name for name, x in off.items() if abs(x) > LIMIT} == BEYOND
    assert max(map(abs, off.values())) < WIDE_LIMIT
    assert all(row["measured"].keys() == row["predicted"].keys() for row in rows)
    assert len({row["name"].partition(":")[0] for row in rows}) >= 8


def run(*names: str) -> None:
    said = run_program(BENCH / "grpo.py", *names)
    lines = [line for line in said.splitlines() if line.startswith(names)]
    assert len(lines) == len(names)
    numbers = [float(word) for line in lines for word in line.split() if "." in word]
    assert len(numbers) >= 4 * len(names)
    assert max(map(abs, numbers)) <= LIMIT


@pytest.mark.slow
def test_trls_own_trainer() -> None:
    run(*RUN)


@pytest.mark.slow
@pytest.mark.wide  # what was recorded of them is held to the predictions above
def test_trls_own_trainers_of_other_settings() -> None:
    run(*RUN_WIDE)


def ask(**changes: Any) -> Request:
    asked: dict[str, Any] = {
        "framework": "trl", "model": "qwen3-0.6b", "hardware": {"device": "h100-sxm"},
        "task": {"objective": "grpo", "global_batch": 16}, "micro_batch": 4, "precision": "bf16",
        "rollout": {"num_generations": 8, "max_prompt_length": 128, "max_completion_length": 384},
    }  # fmt: skip
    return from_data(asked | changes, Request, source="request")


def ledger(**changes: Any) -> Ledger:
    recipe, model, _ = read_defaults(ask(**changes))
    return predict_ledger(recipe, model, find_device(recipe.device))


def test_the_cache_of_all_answers_of_a_rollout_is_there_in_the_last_step() -> None:
    """Qwen3-0.6B: 28 layers, 8 heads of keys and of values, 128 numbers each, 2 B a number."""
    token = 28 * 2 * 8 * 128 * 2
    held = {
        steps: ledger(options={"steps_per_generation": steps}).by_kind(Phase.DECODE)[Kind.KV_CACHE]
        for steps in (0, 2, 8)
    }
    for steps, rows in ((0, 16), (2, 8), (8, 32)):
        layer = rows * 511 * token // 28 // 2  # the keys or values that grow are there twice
        assert held[steps] - rows * 511 * token in range(-token * rows, layer + 1)


def test_a_rollout_amid_a_step_stands_beside_gradients() -> None:
    whole, amid = (ledger(options={"steps_per_generation": n}) for n in (4, 2))
    assert Kind.GRADIENTS not in whole.by_kind(Phase.PREFILL)
    weights = 2 * 596_049_920
    assert amid.by_kind(Phase.PREFILL)[Kind.GRADIENTS] == pytest.approx(weights, rel=1e-3)


@pytest.mark.parametrize(("objective", "policy", "options", "phases"), [
    ("grpo", {}, {}, set()),
    ("grpo", {"beta": 0.04}, {}, {Phase.REFERENCE}),
    ("grpo", {"num_iterations": 2}, {}, {Phase.SCORE}),
    ("grpo", {"num_iterations": 2, "beta": 0.1}, {}, {Phase.SCORE, Phase.REFERENCE}),
    ("grpo", {}, {"steps_per_generation": 8}, {Phase.SCORE}),
    ("grpo", {}, {"steps_per_generation": 2}, set()),
    ("rloo", {"beta": 0.0}, {}, {Phase.SCORE}),
    ("rloo", {}, {}, {Phase.SCORE, Phase.REFERENCE}),
])  # fmt: skip
def test_which_passes_score_tokens(
    objective: str, policy: dict[str, Any], options: dict[str, Any], phases: set[Phase]
) -> None:
    found = ledger(
        task={"objective": objective, "global_batch": 16}, policy=policy, options=options
    )
    assert {Phase.SCORE, Phase.REFERENCE} & {*found.phases} == phases


def test_a_reference_of_what_is_trained_whole_is_a_second_model() -> None:
    def weights(**changes: Any) -> int:
        return ledger(**changes).by_kind(Phase.LOAD)[Kind.PARAMETERS]

    assert weights(policy={"beta": 0.04}) == pytest.approx(2 * weights(), rel=1e-3)
    adapted = {"method": "lora", "lora": {"rank": 8, "targets": ["q_proj"]}}
    assert weights(policy={"beta": 0.04}, **adapted) == weights(**adapted)


@pytest.mark.parametrize(("changes", "message"), [
    ({"hardware": {"device": "h100-sxm", "count": 2}, "parallel": {"dp_shard": 2}},
     "with `parallel.dp_shard: 2` is not described"),
    ({"options": {"version": "0.29"}}, "with `options.version: 0.29` is not described"),
    ({"model": "bloom-560m"}, "with ALiBi"),
    ({"task": {"objective": "grpo", "global_batch": 12}}, "not of whole groups"),
    ({"options": {"steps_per_generation": 1}}, "not of whole groups"),
    ({"options": {"steps_per_generation": -1}}, "is below 0"),
    ({"framework": "deepspeed"}, "not how it samples and judges answers"),
    ({"framework": "hf-trainer"}, "not how it samples and judges answers"),
])  # fmt: skip
def test_what_is_not_described_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ledger(**changes)


def test_how_fast_rollouts_are_is_not_known() -> None:
    request = api.read("qwen3-0.6b", device="h100-sxm", changes={
        "framework": "trl", "task.objective": "grpo", "rollout.max_completion_length": 64,
    })  # fmt: skip
    plan = api.plan(request, levers=False)
    assert plan.recipe.framework == "trl"
    assert plan.time.step_seconds is None
    assert "how fast answers are sampled by `trl` is not described" in plan.time.because
    assert plan.memory.verdict == "fits"
    assert {Phase.PREFILL, Phase.DECODE} <= {*plan.ledger.phases}


def test_vllm_beside_the_trainer_takes_its_share_of_the_device() -> None:
    """gpu_memory_utilization x the driver's memory, its weights included; asleep it has none."""
    own, memory = 596_049_920 * 2, find_device("h100-sxm").memory_driver
    assert memory is not None
    engine = {"engine": "vllm-colocate", "vllm_gpu_memory_utilization": 0.25}
    awake, asleep, away = (
        ledger(options=options)
        for options in (
            engine,
            engine | {"vllm_enable_sleep_mode": True},
            {"engine": "vllm-server"},
        )
    )

    def held(found: Ledger, phase: Phase) -> int:
        return sum(e.nbytes for e in found.at(phase) if e.owner == "engine")

    share = round(0.25 * memory)
    assert {held(awake, phase) for phase in awake.phases if phase is not Phase.LOAD} == {share}
    assert held(asleep, Phase.DECODE) == share
    assert held(asleep, Phase.BACKWARD) == held(asleep, Phase.SCORE) == 0
    assert not any(held(away, phase) for phase in away.phases)
    assert {e.nbytes for e in awake.entries if e.owner == "engine"} == {own, share - own}
    for found in (awake, asleep, away):
        assert Phase.SCORE in found.phases  # by the trained model: vLLM's numbers differ
        assert Phase.PREFILL not in found.phases
    plain = ledger(options=engine | {"vllm_importance_sampling_correction": False})
    assert Phase.SCORE not in plain.phases


def test_what_fits_beside_vllm_is_not_proven() -> None:
    def verdict(**options: Any) -> tuple[str, str]:
        found = api.predict(ask(options=options)).memory
        return found.verdict, found.because

    assert verdict()[0] == "fits"
    assert verdict(engine="vllm-server")[0] == "fits"
    word, why = verdict(engine="vllm-colocate")
    assert word == "unproven"
    assert "arithmetic of its documented options" in why
    assert verdict(engine="vllm-colocate", vllm_gpu_memory_utilization=0.99)[0] == "does_not_fit"


@pytest.mark.parametrize(("options", "message"), [
    ({"vllm_gpu_memory_utilization": 1.5}, "is no share of the device's memory"),
    ({"vllm_tensor_parallel_size": 2}, "does not divide the 1 ranks"),
    ({"vllm_gpu_memory_utilization": 0.01}, "vLLM does not start"),
    ({"vllm_gpu_memory_utilization": 0.05}, "one row of 40,960 tokens"),
    ({"vllm_max_model_length": 256}, "is less than a prompt of 128"),
])  # fmt: skip
def test_an_engine_that_would_not_start_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ledger(options={"engine": "vllm-colocate"} | options)


def test_a_shorter_longest_row_lets_the_engine_start() -> None:
    small = {"engine": "vllm-colocate", "vllm_gpu_memory_utilization": 0.05}
    assert ledger(options=small | {"vllm_max_model_length": 512}).peak
