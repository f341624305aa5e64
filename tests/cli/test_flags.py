"""Flags are keys of the request: each sets one, says which, and does not contradict `--set`."""

import shlex

import pytest

import made_by_hand
from memfit import api
from memfit.cli import options
from memfit.cli.app import app
from memfit.core.errors import InvalidRequest
from memfit.files.flags import FLAGS, find_field, find_flag, gather
from memfit.files.request_file import KEYS
from typed_commands import quick

VERBS = ("plan", "predict", "certify", "solve", "export", "train", "measure")
WORDS = {
    "device": "rtx-4090", "gpus": 2, "nodes": 2, "memory": "20 GiB", "method": "lora",
    "seq_len": "8k", "batch": 2, "tokens": "50M", "epochs": 1.5, "data": "x.jsonl",
    "objective": "sft", "steps": 30, "lora_rank": 8, "precision": "bf16",
    "optimizer": "adamw8bit", "framework": "trl", "save_every": 50, "evaluate_every": 20,
    "lr": 2e-4, "seed": 3, "global_batch": 16, "num_generations": 4, "max_prompt_length": 64,
    "max_completion_length": "8k",
}  # fmt: skip
READ = {"seq_len": 8192, "max_completion_length": 8192, "tokens": 50_000_000}


def read(given, changes=()):
    return api.read("gpt2", changes=gather(given, dict(changes)))


def value_at(request, key):
    for name in key.split("."):
        request = getattr(request, name)
    return request


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_every_flag_and_its_help_names_the_key(verb):
    command = app.get_command(None, verb)
    found = {name: option for option in command.params for name in option.opts}
    for flag in FLAGS:
        if verb == "measure" and flag.parameter == "steps":
            continue  # its own: how many steps are timed
        for name in flag.names:
            assert flag.key in found[f"--{name}"].help


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.metavar], ids=lambda f: f.names[0])
def test_a_flag_sets_its_key(flag):
    assert flag.key in KEYS
    value = WORDS[flag.parameter]
    made = read({flag.parameter: value})
    assert value_at(made, flag.key) == READ.get(flag.parameter, value)
    assert find_flag(flag.key) is flag


def test_qlora_is_a_method_and_a_format():
    for given in ({"qlora": True}, {"method": "QLoRA"}, {"qlora": True, "method": "lora"}):
        made = read(given)
        assert (made.method, made.base_format) == ("lora", "nf4")


@pytest.mark.parametrize(
    ("device", "hardware"),
    [("8xh100-sxm", ("h100-sxm", 8, 1)), ("h100-sxm:8", ("h100-sxm", 8, 1)),
     ("64xh100-sxm", ("h100-sxm", 8, 8)), ("rtx-4090:4x2", ("rtx-4090", 2, 4)),
     ("1xh100-sxm", ("h100-sxm", 1, 1))],
)  # fmt: skip
def test_a_device_may_be_written_with_its_number(device, hardware):
    for made in (read({"device": device}), read({}, {"hardware.device": device})):
        found = made.hardware
        assert (found.device, found.count, found.nodes) == hardware


def test_devices_by_number_are_laid_out_in_machines():
    found = read({"device": "h100-sxm", "gpus": 64}).hardware
    assert (found.count, found.nodes) == (8, 8)
    found = read({"device": "h100-sxm", "gpus": 4, "nodes": 2}).hardware
    assert (found.count, found.nodes) == (4, 2)


@pytest.mark.parametrize(
    ("given", "changes", "said"),
    [
        ({"method": "lora"}, {"method": "full"}, "`--method lora` and `--set method=full` both"),
        ({"qlora": True, "method": "full"}, {}, "`--method full` and `--qlora` both set `method`"),
        ({"device": "h100-sxm:8", "gpus": 4}, {}, "`--device h100-sxm:8` and `--gpus 4` both say"),
        ({"device": "a"}, {"hardware.device": "b"}, "both set `hardware.device`"),
        ({"memory": ""}, {}, "`--memory` is empty, and it sets `limits.memory`"),
        ({"device": " "}, {}, "`--device` is empty"),
        ({"device": "8xh100-sxm"}, {"hardware.count": 4}, "both say how many"),
        ({"device": "12xh100-sxm"}, {}, "is no whole number of nodes of 8"),
        ({"qlora": True}, {"base_format": "int8"}, "`base_format: int8` is stated"),
    ],
)  # fmt: skip
def test_what_disagrees_is_one_error_with_both_values(given, changes, said):
    with pytest.raises(InvalidRequest) as caught:
        read(given, changes)
    assert said in caught.value.message
    assert caught.value.hint


def test_what_agrees_is_no_error():
    made = read({"method": "lora", "batch": 2}, {"method": "lora", "micro_batch": 2})
    assert (made.method, made.micro_batch) == ("lora", 2)


def test_a_key_is_typed_again_as_its_flag():
    words = options.same_options(
        "8xH100", None, {"method": "qlora", "task.sequence_length": "8k", "lora.targets": ["q"]}
    )
    assert shlex.split(words) == [
        "--device", "8xH100", "--method", "qlora", "--seq-len", "8k", "--set", "lora.targets=[q]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--memory="], "error: `--memory` is empty"),
        (["--objective", "cheapest"], "error: `--objective cheapest` says which of several"),
        (["--devices", "l4,l40s", "--gpus", "2"], "both say how many devices there are"),
        (["--set", "deepspeed=zero3"], "error: unknown key `deepspeed` in the options\nhint: that"),
        (["--method", "lorra"], "error: `method: lorra` in the options: invalid enum value"),
        (["--tokens", "50M", "--epochs", "2"], "both say how long to train"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_one_error(words, said):
    code, out, err = quick("plan", "gpt2", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("error:") == err.count("hint:") == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--model-max-length", "4096"], "that is `--seq-len 4096` here"),
        (["--load-in-8bit"], "that is `--set base_format=int8 --method lora` here"),
        (["--use-peft"], "that is `--method lora` here"),
        (["--gradient-checkpointing"], "that is `--set recompute=full` here"),
        (["--max-grad-norm", "0.5"], "that is `--set optimizer.clip_norm=0.5` here"),
        (["--max-grad-norm"], "that is `--set optimizer.clip_norm=…` here"),
        (["--lr_scheduler_type=cosine"], "that is `--set optimizer.schedule=cosine` here"),
        (["--gradient-accumulation-steps", "4"], "those of a micro-batch x 4 x devices"),
        (["--report-to", "wandb"], "that is `--set 'run.trackers=[wandb]'` here"),
        (["--output-dir", "x"], "`--folder runs/first`"),
        # a key of the request, an objective, a framework
        (["--recompute", "full"], "that is `--set recompute=full` here"),
        (["--dp-shard", "4"], "that is `--set parallel.dp_shard=4` here"),
        (["--orpo"], "that is `--objective orpo` here"), (["--trl"], "that is `--framework trl`"),
        (["--full-finetune"], "that is `--method full` here"),
        (["--deadline", "3 days"], "that is `--set 'limits.time=3 days'` here"),
        (["--budget", "500"], "that is `--set 'limits.cost=500 USD'` here"),
        (["--zero", "3"], "zero: 3}'` here; 8 stands for your number of devices; "),
        (["--world-size", "8"], "that is `--gpus 8` here; `memfit plan"),  # in all, not of a node
        (["--no-such-flag"], "`memfit plan --help`"),
        (["--gpu", "rtx", "3090"], "one of the two; a device of several words stands in quotes"),
    ],
)  # fmt: skip
def test_an_option_of_another_trainer_is_answered(words, hint):
    code, out, err = quick("plan", "gpt2", *words)
    assert (code, out) == (2, "")
    assert f"hint: {hint}" in err or hint in err
    assert "Did you mean" not in err  # what click guesses by letters, where the answer is known


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("rules gpt2 --device l4", "`memfit rules` reads no such setting; `memfit plan` does"),
        ("check pyproject.toml --seq-len 4k", "that is `--set task.sequence_length=4k` here"),
        ("budget 7B", "it is typed as `memfit budget --parameters …`"),
        ("formats 1 nf4", "it is typed as `memfit formats X`"),
    ],
)
def test_a_verb_is_offered_no_flag_that_it_lacks(words, hint):
    code, out, err = quick(*words.split())
    assert (code, out) == (2, "")
    assert f"hint: {hint}; `memfit " in err


def test_a_name_of_several_words_needs_no_quotes():
    code, out, _ = quick("plan", "pythia", "14m", "--device", "l4", "--method", "lora")
    assert code == 0
    assert "pythia-14m on l4" in out
    code, out, err = quick("plan", "pythia", "71m", "--device", "l4")
    assert (code, out) == (2, "")
    assert "`pythia 71m`" in err


def test_a_negative_number_stays_a_whole_one():
    assert "`micro_batch: -1` in the options" in quick("plan", "gpt2", "--batch", "-1")[2]


def test_an_objective_of_a_task_is_one_of_the_request():
    code, out, err = quick("plan", "gpt2", "--device", "l4", "--objective", "sft", "--seq-len",
                           "512", "--json")  # fmt: skip
    assert (code, err) == (0, "")
    assert '"objective": "sft"' in out


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("--max_seq_length 512", "task.sequence_length", 512),
        ("--cutoff_len 1k", "task.sequence_length", 1024),
        ("--per_device_train_batch_size 2", "micro_batch", 2),
        ("--finetuning_type lora --lora_r 8", "lora.rank", 8),
        ("--load_in_4bit --gpu 4090", "base_format", "nf4"), ("--full", "method", "full"),
        ("--dpo --lora", "task.objective", "dpo"), ("--max_steps 30", "task.steps", 30),
        ("--gpu 2x4090", "hardware.count", 2), ("--num_gpus 2 --gpu 4090", "hardware.count", 2),
    ],
)  # fmt: skip
def test_words_of_other_trainers_are_flags(typed, key, value, monkeypatch):
    """Of the request alone: a plan of each takes seconds."""
    asked, planned = [], made_by_hand.plan()
    monkeypatch.setattr(api, "plan", lambda request: asked.append(request) or planned)
    words = ("plan", "--model_name_or_path", "smollm2-135m", *shlex.split(typed), "--json")
    code, _, err = quick(*words)
    assert code == 0, err
    (found,) = asked
    assert found.model == "smollm2-135m"
    assert value_at(found, key) == value


def test_a_model_is_named_as_trainers_name_it():
    for words in (["--model=gpt2"], ["--base_model", "gpt2"]):
        assert quick("plan", *words, "--seq-len", "64")[1].startswith("FITS  gpt2")
    assert quick("models", "--model", "gpt2")[0] == 2  # it takes no request


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("seq-len", "sequence_length"), ("context_length", "sequence_length"),
        ("task.sequence_length", "sequence_length"), ("sequence-length", "sequence_length"),
        ("batch", "micro_batch"), ("per_device_train_batch_size", "micro_batch"),
        ("gpus", "devices"), ("devices", "devices"), ("model", "model"), ("rank", "rank"),
    ],
)  # fmt: skip
def test_what_to_solve_for_has_the_names_of_its_flags(word, field):
    assert find_field(word) == field


@pytest.mark.parametrize(("text", "count"), [("2xL40S", 2), ("L40S:4", 4), ("l40s", 1)])
def test_gpus_may_name_the_device(text, count):
    made = read({"gpus": text})
    assert (made.hardware.device.lower(), made.hardware.count) == ("l40s", count)


def test_gpus_do_not_name_a_second_device():
    with pytest.raises(InvalidRequest, match=r"--gpus 2xL40S"):
        read({"gpus": "2xL40S", "device": "h100-sxm"})


@pytest.mark.ways_out
def test_solve_takes_model_and_field_in_either_order_and_says_what_would_fit():
    asked = ["gpt2", "seq-len", "--device", "rtx-4080", "--memory", "300 MiB", "--full"]
    code, out, err = quick("solve", *asked, "--precision", "bf16")
    assert code == 3
    assert "sequence_length" in err
    assert "Ways out at sequence length 128" in out
    assert "--memory '3 GiB'" in out


@pytest.mark.parametrize(
    ("mesh", "shards"),
    [({"tp": 2}, 4), ({"ep": 8}, 8), ({"pp": 2, "cp": 2}, 2), ({"dp_replicate": 8}, 1),
     ({"tp": 8}, 1), ({"tp": 3}, 1), ({"tp": 2, "dp_shard": 2, "dp_replicate": 2}, 2)],
)  # fmt: skip
def test_the_devices_that_the_axes_named_leave_are_shards(mesh, shards):
    changes = {f"parallel.{axis}": n for axis, n in mesh.items()}
    assert read({"device": "8xh100-sxm"}, changes).parallel.dp_shard == shards
    if "dp_shard" not in mesh:
        other = read({"device": "8xh100-sxm", "framework": "megatron"}, changes)
        assert other.parallel.dp_shard == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--objective", "rlhf"], "that is `task.objective: ppo` here"),
        (["--objective", "reward-model"], "that is `task.objective: reward` here"),
        (["--objective", "sftt"], "did you mean `sft`"),
        (["--method", "full-finetune"], "that is `method: full` here"),
        (["--method", "lora+"], "that is `optimizer.lora_plus: 16` (with `method: lora`) here"),
        (["--optimizer", "paged_adamw_8bit"], "that is `optimizer.name: adamw8bit-paged` here"),
        (["--optimizer", "galore"], "GaLore is not described"),
        (["--set", "offload=cpu"], "that is `offload: optimizer` here"),
        (["--set", "hardware=4090"], "it holds keys of its own: `hardware: {device: 4090}`"),
    ],
)
def test_a_value_of_other_words_is_answered(words, hint):
    code, out, err = quick("plan", "gpt2", *words)
    assert (code, out) == (2, "")
    assert f"hint: {hint}" in err or hint in err


def test_a_device_that_yaml_reads_as_a_number_is_its_name(tmp_path):
    (tmp_path / "r.yaml").write_text("model: gpt2\nhardware: {device: 4090}\n")
    for words in ([str(tmp_path / "r.yaml")], ["gpt2", "--set", "hardware.device=4090"]):
        code, out, err = quick("plan", *words)
        assert (code, err) == (0, "")
        assert out.startswith("FITS  gpt2 on rtx-4090")


def test_adapters_that_nobody_trains_are_named_and_a_file_that_is_not_here(tmp_path):
    _, out, _ = quick("plan", "gpt2", "--device", "l4", "--full", "--lora-rank", "8", "--why")
    assert "`lora` is not used, as `method: full` trains no adapters" in " ".join(out.split())
    _, out, _ = quick("plan", "gpt2", "--device", "l4", "--data", "nowhere.jsonl", "--why")
    assert "`task.data: nowhere.jsonl` is not here" in " ".join(out.split())
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    _, out, _ = quick("plan", "gpt2", "--device", "l4", "--data", str(empty), "--why")
    assert "holds nothing here whose tokens" in " ".join(out.split())


def test_a_folder_that_is_not_here_is_no_unknown_name():
    _, _, err = quick("plan", "./nowhere", "--device", "l4")
    assert err.startswith("error: there is no folder `./nowhere`\nhint: ")


def test_a_budget_reads_tokens_and_shares_as_people_write_them():
    words = "budget --inference-memory 24GB --context 8k --mfu 40%"
    code, out, err = quick(*words.split(), "--json")
    assert (code, err) == (0, "")
    assert out == quick(*words.replace("8k", "8192").replace("40%", "0.4").split(), "--json")[1]
    assert quick("budget", "--mfu", "much")[0] == quick("budget", "--context", "-1")[0] == 2


def test_a_job_for_no_named_device_says_whose_it_is_planned_for(tmp_path):
    job = ["launch", "gpt2", "--on", "slurm", "--out", str(tmp_path / "job")]
    assert "planned for the device of this machine: `--device`" in quick(*job)[2]
    assert "this machine" not in quick(*job, "--device", "l4")[2]
