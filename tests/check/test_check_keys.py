"""No FITS beside a key that is not described, and no cry of wolf beside one that moves no memory.

The keys that move memory are `mutated_files.MOVING`: read from the tools, not from memfit.
"""

import json
from pathlib import Path

import pytest

import mutated_files
from memfit import api
from memfit.check import ORDER, readers
from memfit.check.keys import Effect, find_declared
from memfit.cli.app import app, run
from undescribed import list_undescribed

ROOT = Path(__file__).resolve().parents[2]
CARD = {"hardware": {"device": "a100-sxm-80"}}
SFT = "model_name_or_path: Qwen/Qwen3-0.6B\nper_device_train_batch_size: 1\nbf16: true\n"
# the keys that were seen to be passed over beside FITS and exit 0, with a value
SEEN = {
    "teacher_model_name_or_path": "Qwen/Qwen2.5-72B", "reward_model_path": "Qwen/Qwen2.5-72B",
    "use_vllm": "true", "num_labels": 2, "simpo_gamma": 0.5, "rloo_k": 4, "torch_compile": "true",
}  # fmt: skip
COUNT = 400  # mutated files at least


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return list(mutated_files.make_files(tmp_path_factory.mktemp("files")))


def ask(folder, text, *options, name="trl.yaml", device=("--device", "a100-sxm-80")):
    path = folder / name
    path.write_text(text)
    words = ["check", str(path), *device, *options]
    return run(lambda: app.main(words, prog_name="memfit", standalone_mode=False))


def test_every_tool_has_a_file_that_fits(files):
    own = set(ORDER) - {"commands", "programs"}  # whose keys are those of other tools
    assert {made.tool for made in files} == own == set(mutated_files.MOVING)
    assert sum(len(mutated_files.MOVING[made.tool]) for made in files) >= COUNT


@pytest.mark.parametrize("tool", sorted(mutated_files.MOVING))
def test_some_keys_that_move_memory_beside_one_file_of_each_tool(tool, files):
    made = next(one for one in files if one.tool == tool)
    some = list(mutated_files.MOVING[tool].items())[::7]
    assert {made.answer(key, value) for key, value in some} <= {"not_known", "does_not_fit"}


@pytest.mark.wide
@pytest.mark.parametrize("tool", sorted(mutated_files.MOVING))
def test_no_file_fits_beside_a_key_that_moves_memory(tool, files):
    for made in files:
        if made.tool == tool:
            answers = {k: made.answer(k, v) for k, v in mutated_files.MOVING[tool].items()}
            assert not {k for k, verdict in answers.items() if verdict in ("fits", "at_risk")}


@pytest.mark.wide
@pytest.mark.parametrize("tool", sorted(mutated_files.MOVING))
def test_every_file_still_fits_beside_a_key_that_moves_none(tool, files):
    for made in files:
        if made.tool == tool:
            answers = {key: made.answer(key, 7) for key in readers.find(tool).still}
            taken = {k for k, verdict in answers.items() if verdict == "refused"}
            assert all(verdict in ("fits", "refused") for verdict in answers.values())
            assert len(taken) <= len(answers) // 10  # keys that are sections, and no number


@pytest.mark.parametrize("key", SEEN)
def test_keys_that_were_passed_over_change_headline_and_exit_code(key, tmp_path, capsys):
    assert ask(tmp_path, SFT) == 0
    assert "FITS" in capsys.readouterr().out
    assert ask(tmp_path, f"{SFT}{key}: {SEEN[key]}\n") == 4
    said = " ".join(capsys.readouterr().out.split())
    assert "NOT KNOWN" in said
    assert "FITS" not in said
    assert f"`{key}` is not described" in said
    assert "at least" in said


@pytest.mark.parametrize("key", ["neftune_noise_alpha", "logging_steps", "learning_rate"])
def test_keys_that_move_no_memory_change_nothing(key, tmp_path):
    assert ask(tmp_path, f"{SFT}{key}: 5\n") == 0


def test_lora_plus_keeps_the_same_states(tmp_path):
    text = SFT + "finetuning_type: lora\nloraplus_lr_ratio: 16\n"
    assert ask(tmp_path, text) == 0
    assert ask(tmp_path, f"{text}pissa_init: true\n") == 4


def test_what_is_too_much_already_does_not_fit(tmp_path, capsys):
    """8 B weights of fp32 with gradients and Adam's states are beyond 80 GB, whatever else runs."""
    text = SFT.replace("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B") + "teacher_model_kind: ema\n"
    assert ask(tmp_path, text) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "DOES NOT FIT" in said
    assert "at least" in said


def test_a_key_that_may_lower_memory_promises_no_bound(tmp_path):
    """8 B trained whole do not fit, unless they are stored otherwise."""
    text = "base_model: meta-llama/Llama-3.1-8B\nbf16: true\nsequence_len: 512\nadapter: lora\n"
    assert ask(tmp_path, text + "lora_target_linear: true\n", name="a.yaml") == 0
    assert ask(tmp_path, text + "lora_target_linear: true\nqat: {x: 1}\n", name="a.yaml") == 4
    checked, plan = api.check([tmp_path / "a.yaml"], CARD)
    assert api.judge(checked, plan).least is None


def test_a_misspelt_key_is_asked_about(tmp_path, capsys):
    assert ask(tmp_path, f"{SFT}max_lenght: 4096\n") == 4
    assert "is `max_length` meant?" in " ".join(capsys.readouterr().out.split())


def test_a_refusal_of_the_step_is_said_in_the_files_own_words(tmp_path):
    """Liger's loss beside ZeRO-3: its key is named, and the rest is answered."""
    (tmp_path / "z3.json").write_text('{"zero_optimization": {"stage": 3}}')
    text = (
        "base_model: Qwen/Qwen3-0.6B\nbf16: true\nsequence_len: 512\n"
        f"deepspeed: {tmp_path / 'z3.json'}\nliger_fused_linear_cross_entropy: true\n"
        "plugins: [axolotl.integrations.liger.LigerPlugin]\n"
    )
    path = tmp_path / "a.yaml"
    path.write_text(text)
    checked, plan = api.check([path], {"hardware": {"device": "h100-sxm", "count": 8}})
    assert list_undescribed(checked) == ["a.yaml: liger_fused_linear_cross_entropy"]
    answer = api.judge(checked, plan)
    assert (answer.verdict, answer.exit_code) == ("not_known", 4)
    assert 0 < answer.least < plan.memory.needed


def test_an_evaluation_of_more_rows_than_the_step_is_no_part_of_it(tmp_path):
    """transformers' default of 8 rows: their logits in 16 bits, in fp32 and their losses."""
    text = SFT + "max_length: 32768\neval_strategy: steps\n"
    assert ask(tmp_path, text) == 4
    assert ask(tmp_path, f"{text}per_device_eval_batch_size: 1\n") == 0
    assert ask(tmp_path, text.replace("steps", "'no'")) == 0


def test_a_device_is_asked_for(tmp_path, capsys):
    assert ask(tmp_path, SFT, device=()) == 2
    said = capsys.readouterr().err
    assert "memfit devices" in said
    assert "--device h100-sxm" in said
    assert ask(tmp_path, SFT, device=("--device", "cpu")) in (0, 3)


def test_declarations_are_of_one_class_each():
    for name in ORDER:
        reader = readers.find(name)
        assert not reader.still.keys() & reader.moved.keys()
        assert all(isinstance(effect, Effect) for effect in reader.moved.values())
        assert all(find_declared(reader.still, key)[1] for key in reader.still)


def test_the_campaign_is_committed():
    """bench/results/check_keys.json, by bench/check_keys.py."""
    found = json.loads((ROOT / "bench/results/check_keys.json").read_text())
    assert not found["wrong"]
    assert sum(found["answers"].values()) >= COUNT
    said = " ".join((ROOT / "docs/neighbours.md").read_text().split())
    assert f"{sum(found['answers'].values())} such files" in said
    before = sum(one["understood"] for one in found["examples"].values())
    changed = sum(len(one["changed"]) for one in found["examples"].values())
    assert f"Of {before} examples that were understood whole before, {changed} have" in said
