"""Shell scripts that start a trainer, read as that trainer's own file is."""

import shlex

import pytest
from accelerate.commands.launch import launch_command_parser

from memfit import api
from memfit.check.tools.commands import find_commands
from memfit.core.errors import InvalidRequest

DEVICE = {"hardware": {"device": "a100-sxm-80", "count": 2}}
SFT = """
model_name_or_path: qwen3-0.6b
max_length: 512
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
use_peft: true
lora_r: 8
lora_target_modules: [q_proj, v_proj]
learning_rate: 2.0e-4
"""
FACTORY = """
stage: sft
model_name_or_path: qwen3-0.6b
finetuning_type: lora
lora_target: all
cutoff_len: 512
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
dataset: alpaca
template: qwen
bf16: true
"""
ZERO3 = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {zero_stage: 3, offload_optimizer_device: none, zero3_init_flag: true}
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
# the script, and the files that say the same
SAME = {
    "trl's own command": (
        "trl sft --model_name_or_path qwen3-0.6b --max_length 512 --use_peft --lora_r=8 \\\n"
        " --per_device_train_batch_size 2 --gradient-accumulation-steps 4 \\\n"
        " --lora_target_modules q_proj v_proj --learning_rate 2e-4 --output_dir out\n",
        [SFT]),
    "variables, a launcher and a log": (
        "#!/bin/bash\nset -e\nexport MODEL=qwen3-0.6b\nLEN=${LEN:-512}  # of a row\n"
        "cd $(dirname $0) && CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2"
        ' train_sft.py --model_name_or_path "${MODEL}" --max_length $LEN --use_peft True --lora_r 8'
        " --per_device_train_batch_size 2 --gradient_accumulation_steps 4"
        " --lora_target_modules q_proj v_proj --learning_rate 2e-4 > log.txt 2>&1\n",
        [SFT]),
    "options in a variable of several lines, a default beside an argument": (
        "#!/bin/bash\nGPUS=$(nvidia-smi -L | wc -l)\nMODEL='qwen3-0.6b' # don't forget\n"
        "function usage() {\n  echo '\nUsage: train.sh [-m MODEL]\n'\n}\n"
        'case $1 in\n  -m ) MODEL=$1 ;;\nesac\nARGS="\n  --nproc_per_node $GPUS \\\n'
        '  --master_port 6001\n"\ntorchrun $ARGS train_sft.py --model_name_or_path $MODEL'
        " --max_length 512 --use_peft --lora_r 8 --per_device_train_batch_size 2"
        " --gradient_accumulation_steps 4 --lora_target_modules q_proj v_proj"
        " --learning_rate 2e-4\n",
        [SFT]),
    "llama-factory": (
        "llamafactory-cli train --stage sft --do_train --model_name_or_path qwen3-0.6b"
        " --finetuning_type lora --lora_target all --cutoff_len 512 --dataset alpaca"
        " --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --template qwen --bf16\n",
        [FACTORY]),
    "files named": (
        "llamafactory-cli train trainer.yaml\n", [FACTORY]),
    "a configuration and a launcher's, both changed": (
        "torchrun --nproc_per_node 2 eval.py --suite mmlu\n"
        "accelerate launch --config_file=launcher.yaml --num_processes=2 sft.py"
        " --config trainer.yaml --max_length=256\n",
        [SFT.replace("512", "256"), ZERO3.replace("num_processes: 8", "num_processes: 2")]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_script_is_read_as_the_files_that_say_the_same(name, tmp_path):
    text, files = SAME[name]
    script = tmp_path / "train.sh"
    script.write_text(text)
    (tmp_path / "trainer.yaml").write_text(files[0].replace("256", "512"))
    (tmp_path / "launcher.yaml").write_text(ZERO3)
    written = []
    for number, each in enumerate(files):
        written.append(tmp_path / f"{number}.yaml")
        written[-1].write_text(each)
    expected, plan = api.check(written, DEVICE)
    found, own = api.check([script], DEVICE)
    assert found.request == expected.request
    assert own.memory.needed == plan.memory.needed
    assert [(one.key, one.least) for one in found.undescribed] == [
        (one.key, one.least) for one in expected.undescribed
    ]


def test_a_program_of_its_own_is_transformers_trainers_without_recomputing(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node=2 train.py --model_name_or_path qwen3-0.6b"
                      " --per_device_train_batch_size 2 --bf16 --rope_of_mine 3 --block_size 1280"
                      " --data_path x.json\n")  # fmt: skip
    checked, plan = api.check([script], DEVICE)
    assert (plan.recipe.framework, plan.recipe.recompute_blocks) == ("hf-trainer", 0)
    assert any("transformers' Trainer" in line for line in checked.assumed)
    assert [one.key for one in checked.undescribed] == ["rope_of_mine"]
    assert plan.recipe.sequence_length == 1280
    limited = {**DEVICE, "limits": {"memory": "12 GiB"}}
    changes = api.find_changes([script], limited, api.check([script], limited)[1])
    assert any("gradient_checkpointing" in str(change) for change in changes)


@pytest.mark.parametrize(
    ("program", "objective"),
    [("trl dpo", "dpo"), ("scripts/sft/run_rloo.py", "rloo"), ("trl kto", ""), ("trl reward", ""),
     ("online-dpo.py", "")],
)  # fmt: skip
def test_what_a_program_trains_is_predicted_or_refused_and_never_another(
    program, objective, tmp_path
):
    script = tmp_path / "run.sh"
    started = program if program.startswith("trl ") else f"python {program}"
    script.write_text(f"{started} --model_name_or_path qwen3-0.6b --max_length 512\n")
    if objective:
        assert api.check([script], DEVICE)[0].request.task.objective == objective
        return
    with pytest.raises(InvalidRequest, match="memfit describes how it") as refused:
        api.check([script], DEVICE)
    assert refused.value.hint == "use `framework: memfit`"


def test_deepspeeds_engine_is_started_by_its_launcher_or_an_argument(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    script = tmp_path / "run.sh"
    script.write_text("deepspeed --num_gpus 2 train.py --deepspeed ds.json --model_name_or_path"
                      " qwen3-0.6b --per_device_train_batch_size 2 --bf16\n")  # fmt: skip
    request = api.check([script], DEVICE)[0].request
    assert (request.framework, request.parallel.zero) == ("deepspeed", 2)
    script.write_text("deepspeed --num_gpus 4 train.py --model_name_or_path qwen3-0.6b\n")
    with pytest.raises(InvalidRequest, match="start 4 processes, and there are 2 devices"):
        api.check([script], DEVICE)


@pytest.mark.parametrize("line", [
    "--num_processes 4 --multi_gpu --mixed_precision bf16 train.py --lr 1e-4 --flag",
    "--config_file a.yaml --main_process_port=29501 scripts/sft.py --x -1 --y a b",
    "--use_deepspeed --zero_stage 3 -m pkg.train --z=3", "--use_fsdp --debug train.py --z",
])  # fmt: skip
def test_a_launchers_options_end_where_accelerates_own_parser_ends_them(line):
    known = launch_command_parser().parse_args(shlex.split(line))
    (found,) = find_commands(f"accelerate launch {line}".replace("pkg.train", "trl.train"))
    assert found.program == known.training_script.replace("pkg.train", "trl.train")
    own = [word.partition("=")[0].lstrip("-") for word in known.training_script_args
           if word.startswith("--")]  # fmt: skip
    assert list(found.arguments) == own
    for key, value in found.options.items():
        assert key == "m" or getattr(known, key) == value
