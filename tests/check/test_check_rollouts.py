"""Files of TRL's trainers that sample answers: read as GRPOConfig and RLOOConfig read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfit import api
from memfit.check.answers import judge
from memfit.cli.app import app, run
from memfit.core.errors import InvalidRequest
from memfit.records.ledger import Kind, Phase
from neighbour_programs import run_program
from undescribed import list_undescribed

H100: dict[str, Any] = {"hardware": {"device": "h100-sxm"}}
FILE = """
model_name_or_path: Qwen/Qwen3-0.6B
dtype: bfloat16
num_generations: 8
max_prompt_length: 256
max_completion_length: 512
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
"""


def say_with_trl(folder: Path, program: str) -> Any:
    """What a program prints last, as JSON, where TRL is installed."""
    file = folder / "program.py"
    file.write_text(program)
    return json.loads(run_program(file).splitlines()[-1])


def check(
    folder: Path, more: str = "", text: str = FILE, data: dict[str, Any] | None = None
) -> Any:
    path = folder / "grpo.yaml"
    path.write_text(text + more)
    return api.check([path], data or json.loads(json.dumps(H100)))


def test_a_file_is_read_as_the_trainer_reads_it(tmp_path: Path) -> None:
    checked, plan = check(tmp_path, "beta: 0.04\ntemperature: 0.7\nnum_iterations: 2\ntop_k: 20\n")
    recipe = plan.recipe
    assert recipe.objective == "grpo"
    assert recipe.framework == "trl"
    assert (recipe.micro_batch, recipe.accumulation, recipe.sequence_length) == (4, 4, 768)
    assert recipe.rollout.num_generations == 8
    assert (recipe.rollout.max_prompt_length, recipe.rollout.max_completion_length) == (256, 512)
    assert (recipe.rollout.temperature, recipe.rollout.top_k) == (0.7, 20)
    assert (recipe.policy.beta, recipe.policy.num_iterations) == (0.04, 2)
    assert recipe.method == "full"
    assert recipe.recompute_blocks == 28  # TRL's own default
    assert not checked.undescribed
    assert {Phase.PREFILL, Phase.DECODE, Phase.SCORE, Phase.REFERENCE} <= {*plan.ledger.phases}


def test_defaults_are_the_trainers_own(tmp_path: Path) -> None:
    ask = (
        "import json; from trl import GRPOConfig as A, RLOOConfig as B;"
        "print(json.dumps([[x.__dataclass_fields__[k].default for k in ('num_generations',"
        " 'max_completion_length', 'per_device_train_batch_size', 'beta', 'num_iterations',"
        " 'temperature', 'top_k', 'top_p', 'repetition_penalty')] for x in (A, B)]))"
    )
    usual = say_with_trl(tmp_path, ask)
    for objective, theirs in zip(("grpo", "rloo"), usual, strict=True):
        data = {**H100, "task": {"objective": objective}}
        _, plan = check(tmp_path, text="model_name_or_path: Qwen/Qwen3-0.6B\n", data=data)
        recipe, r = plan.recipe, plan.recipe.rollout
        assert theirs == [
            r.num_generations, r.max_completion_length, recipe.micro_batch, recipe.policy.beta,
            recipe.policy.num_iterations, r.temperature, r.top_k, r.top_p, r.repetition_penalty,
        ]  # fmt: skip


def test_every_argument_of_the_trainers_is_known(tmp_path: Path) -> None:
    """Described, moving no memory, or named as not described: none is `no such key`."""
    from memfit.check.keys.trl import MOVED, STILL
    from memfit.check.rollouts import QUIET

    ask = (
        "import json, dataclasses; from trl import GRPOConfig, RLOOConfig, SFTConfig;"
        "f = lambda x: {y.name for y in dataclasses.fields(x)};"
        "print(json.dumps(sorted((f(GRPOConfig) | f(RLOOConfig)) - f(SFTConfig))))"
    )
    theirs = say_with_trl(tmp_path, ask)
    assert len(theirs) > 60
    read = {"beta", "disable_dropout"}
    assert [key for key in theirs if key not in {*MOVED, *STILL, *QUIET, *read}] == []


@pytest.mark.parametrize(("more", "objective", "said"), [
    ("", "grpo", "the file is GRPO's, as it has `num_generations`"),
    ("scale_rewards: none\n", "grpo", ""),
    ("loss_type: dr_grpo\n", "grpo", ""),
    ("normalize_advantages: true\n", "rloo", ""),
])  # fmt: skip
def test_which_trainers_a_file_is(tmp_path: Path, more: str, objective: str, said: str) -> None:
    checked, plan = check(tmp_path, more)
    assert plan.recipe.objective == objective
    assert any(said in line for line in checked.assumed) is bool(said) or not said
    assert not checked.undescribed
    if not said:
        assert not any("the file is GRPO's" in line for line in checked.assumed)


def test_the_command_line_says_which_trainers_a_file_is(tmp_path: Path) -> None:
    _, plan = check(tmp_path, data={**H100, "task": {"objective": "rloo"}})
    assert plan.recipe.objective == "rloo"
    assert Phase.SCORE in plan.ledger.phases  # of the policy that sampled, whatever the step is


def test_a_prompts_bound_is_assumed_where_no_key_says_it(tmp_path: Path) -> None:
    text = FILE.replace("max_prompt_length: 256\n", "")
    checked, plan = check(tmp_path, text=text)
    assert plan.recipe.rollout.max_prompt_length == 512
    assert any("prompts are taken to be 512 tokens at most" in line for line in checked.assumed)
    shorter = {**H100, "rollout": {"max_prompt_length": 128}}
    checked, plan = check(tmp_path, text=text, data=shorter)
    assert plan.recipe.rollout.max_prompt_length == 128
    assert not any("prompts are taken" in line for line in checked.assumed)


def test_how_many_answers_are_sampled_at_once(tmp_path: Path) -> None:
    def cache(more: str, count: int = 1) -> int:
        data = {"hardware": {"device": "h100-sxm", "count": count}}
        held = check(tmp_path, more, data=data)[1].ledger.by_kind(Phase.DECODE)
        return int(held[Kind.KV_CACHE])

    usual = cache("")  # of an optimizer's step
    assert cache("steps_per_generation: 4\n") == usual
    assert cache("generation_batch_size: 16\n") == usual
    assert cache("generation_batch_size: 16\n", count=2) == pytest.approx(usual / 2, rel=1e-6)
    assert cache("steps_per_generation: 8\n") == pytest.approx(2 * usual, rel=1e-6)


@pytest.mark.parametrize(("more", "message"), [
    ("steps_per_generation: 4\ngeneration_batch_size: 16\n", "TRL takes one of both"),
    ("generation_batch_size: 18\n", "is not a multiple of 4"),
    ("steps_per_generation: 1\n", "is not of whole groups of `rollout.num_generations: 8`"),
    ("num_iterations: 0\n", "num_iterations"),
])  # fmt: skip
def test_what_the_trainer_refuses_is_refused(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check(tmp_path, more)


@pytest.mark.parametrize(("more", "key"), [
    ("use_transformers_continuous_batching: true\n", "use_transformers_continuous_batching"),
    ("cache_implementation: static\n", "cache_implementation"),
    ("generation_kwargs: {num_beams: 4}\n", "generation_kwargs"),
    ("sync_ref_model: true\nbeta: 0.1\n", "sync_ref_model"),
    ("cast_lm_head_to_fp32: true\n", "cast_lm_head_to_fp32"),
    ("max_tool_calling_iterations: 3\n", "max_tool_calling_iterations"),
    ("reward_model_name_or_path: Qwen/Qwen3-0.6B\n", "reward_model_name_or_path"),
    ("loss_type: another\n", "loss_type"),
    ("num_generatoins: 4\n", "num_generatoins"),
])  # fmt: skip
def test_no_fits_beside_a_key_that_is_not_described(tmp_path: Path, more: str, key: str) -> None:
    checked, plan = check(tmp_path, more)
    assert list_undescribed(checked) == [f"grpo.yaml: {key}"]
    answer = judge(checked, plan)
    assert answer.exit_code == 4
    assert answer.headline.startswith("at least ")
    assert f"`{key}` is not described" in answer.headline


def test_what_moves_no_memory_changes_no_byte(tmp_path: Path) -> None:
    _, plain = check(tmp_path)
    checked, plan = check(
        tmp_path,
        "epsilon: 0.1\nepsilon_high: 0.28\ndelta: 2.0\nloss_type: bnpo\nlog_completions: true\n"
        "scale_rewards: batch\nreward_weights: [1.0]\nimportance_sampling_level: sequence\n"
        "entropy_coef: 0.01\nmask_truncated_completions: true\n",
    )
    assert not checked.undescribed
    assert plan.memory.peak_allocated == plain.memory.peak_allocated


def test_what_does_not_fit_names_a_change_of_the_files_own_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grpo.yaml"
    text = FILE.replace("0.6B", "4B") + "use_peft: true\nlora_target_modules: [q_proj]\n"
    path.write_text(text.replace("max_completion_length: 512", "max_completion_length: 8192"))
    typed = ["check", str(path), "--device", "h100-sxm", "--memory", "24 GiB"]
    assert run(lambda: app.main(typed, prog_name="memfit", standalone_mode=False)) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "DOES NOT FIT" in said
    assert "max_completion_length" in said


def test_the_same_training_in_memfits_own_step(tmp_path: Path) -> None:
    data = {**H100, "framework": "memfit"}
    _, plan = check(tmp_path, "steps_per_generation: 4\n", data=data)
    assert plan.recipe.is_own
    assert plan.recipe.objective == "grpo"
    assert plan.recipe.rollout.max_completion_length == 512


VLLM = "use_vllm: true\nvllm_max_model_length: 768\n"


def test_vllms_keys_are_read(tmp_path: Path) -> None:
    checked, plan = check(
        tmp_path,
        VLLM + "vllm_gpu_memory_utilization: 0.4\nvllm_enable_sleep_mode: true\n"
        "vllm_importance_sampling_correction: false\nvllm_importance_sampling_mode: token_mask\n",
    )
    assert not checked.undescribed
    options = plan.recipe.options
    assert options["engine"] == "vllm-colocate"
    assert options["vllm_gpu_memory_utilization"] == 0.4
    assert options["vllm_enable_sleep_mode"] is True
    assert options["vllm_importance_sampling_correction"] is False
    assert plan.memory.verdict == "unproven"
    assert judge(checked, plan).exit_code == 0
    _, usual = check(tmp_path, VLLM)
    assert usual.recipe.options["vllm_gpu_memory_utilization"] == 0.3


def test_a_server_is_elsewhere_and_no_vllm_has_no_share(tmp_path: Path) -> None:
    checked, plan = check(tmp_path, VLLM + "vllm_mode: server\nvllm_server_host: a.b\n")
    assert plan.memory.verdict == "fits"
    assert any("vLLM runs on other devices" in line for line in checked.assumed)
    _, plan = check(tmp_path, "vllm_gpu_memory_utilization: 0.9\n")
    assert plan.recipe.options["engine"] == "transformers"
    with pytest.raises(InvalidRequest, match="TRL has `colocate` and `server`"):
        check(tmp_path, VLLM + "vllm_mode: beside\n")


def test_a_prompts_bound_is_what_vllms_longest_row_leaves(tmp_path: Path) -> None:
    text = FILE.replace("max_prompt_length: 256\n", "")
    _, plan = check(tmp_path, "use_vllm: true\nvllm_max_model_length: 700\n", text=text)
    assert plan.recipe.rollout.max_prompt_length == 188


def test_sleep_and_a_smaller_share_are_changes_of_the_files_own_keys(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(FILE + VLLM + "vllm_gpu_memory_utilization: 0.8\n")
    data: dict[str, Any] = {**H100, "limits": {"memory": "60 GiB"}}
    _, plan = api.check([path], dict(data))
    assert plan.memory.verdict == "does_not_fit"
    changes = api.find_changes([path], dict(data), plan)
    keys = [{one.key: one.after for one in change.edited} for change in changes]
    assert any("vllm_gpu_memory_utilization" in key for key in keys)
    assert {change.keeps for change in changes} == {"the same training"}
