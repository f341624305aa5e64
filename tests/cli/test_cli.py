"""The command line as a user meets it: a real process, its two streams, its exit code."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import click
import msgspec
import pytest
from rich.cells import cell_len

from memfit import api
from memfit.cli import first_contact, options
from memfit.cli.app import REQUEST_VERBS, VERBS, app, join_name, put_model_in_place, run
from memfit.core.errors import DoesNotFit, InvalidRequest, NotCertified, RunFailed
from memfit.core.libraries import install_extra
from memfit.core.wording import set_words
from memfit.files.request_file import KEYS, schema, template
from memfit.records.request import Request
from memfit.workflows import doctor, python_verbs
from typed_commands import ASKED, ROOT, STATED, TINY, memfit, quick, strict, write


def proved(device):
    """What tests/certify/test_self_check.py has of the process that proves, which takes seconds."""
    return "20 checks of known bytes passed"


@pytest.fixture
def request_file(tmp_path):
    file = tmp_path / "request.yaml"
    file.write_text(json.dumps(ASKED))  # JSON is YAML
    return file


# the streams and the codes


def test_data_goes_to_stdout_and_chatter_to_stderr(request_file, tmp_path):
    done = memfit("plan", request_file, "--folder", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FITS  tiny on cpu-x86\nneeds ")
    assert done.stderr == "wrote run/plan.json\n"
    assert "\x1b" not in done.stdout
    assert max(cell_len(line) for line in done.stdout.splitlines()) <= 80
    quiet = memfit("plan", request_file, "--folder", "run", "--quiet", cwd=tmp_path)
    assert (quiet.stdout, quiet.stderr) == (done.stdout, "")


def test_an_impossible_limit_prints_the_nearest_miss_and_exits_3(request_file):
    code, out, err = quick("plan", request_file, "--memory", "64 KiB")
    assert code == 3
    assert err == ""
    assert out.startswith("DOES NOT FIT  tiny on cpu-x86\nneeds ")
    assert "of 64.00 KiB usable" in out
    assert "Next\n  memfit plan " in out
    code, out, _ = quick("plan", request_file, "--memory", "64 KiB", "--json")
    assert (code, json.loads(out)["memory"]["verdict"]) == (3, "does_not_fit")


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidRequest("a"), 2), (DoesNotFit("a"), 3), (NotCertified("a"), 4), (RunFailed("a"), 5),
     (KeyboardInterrupt(), 130), (ZeroDivisionError("a"), 1)],
    ids=lambda v: type(v).__name__ if isinstance(v, BaseException) else "",
)  # fmt: skip
def test_every_way_to_fail_has_its_exit_code(error, code, capsys):
    def fail():
        raise error

    assert run(fail) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


def test_a_bug_says_so_in_one_line_and_where_to_report_it(capsys, monkeypatch):
    def fail():
        raise KeyError("x")

    monkeypatch.delenv("MEMFIT_DEBUG", raising=False)
    assert run(fail) == 1
    assert capsys.readouterr().err == (
        "error: this is a bug in memfit (KeyError: 'x')\n"
        "hint: please report it with the output of `memfit doctor` and MEMFIT_DEBUG=1\n"
    )
    monkeypatch.setenv("MEMFIT_DEBUG", "1")
    assert run(fail) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_training_library_names_the_extra(capsys):
    def fail():
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    assert run(fail) == 2
    assert capsys.readouterr().err == (
        f"error: this needs `torch.nn`, which is not installed\nhint: {install_extra('train')}\n"
    )


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    command = f"{sys.executable} -m memfit devices | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_control_c_outside_training_leaves_with_130(tmp_path):
    code = (  # a shell's background job starts with SIGINT ignored, and its children inherit that
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from memfit.cli import app;"
        "sys.exit(app.run(lambda: (print('up', flush=True), time.sleep(60))))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as started:  # fmt: skip
        assert started.stdout.readline() == "up\n"
        started.send_signal(signal.SIGINT)
        _, err = started.communicate(timeout=300)
        assert (started.returncode, err) == (130, "error: interrupted\n")


# errors, whole


def fails(*arguments):
    code, out, err = quick(*arguments)
    assert out == ""
    return code, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plna"], "error: unknown verb: `plna`\nhint: did you mean `plan`? "
                   "(`memfit --help` lists them)\n"),
        (["estimate", "gpt2"], "error: unknown verb: `estimate`\nhint: that is `memfit plan` here"),
        (["qwen3-8b", "--device", "4090"],
         "error: unknown verb: `qwen3-8b`\nhint: `memfit plan qwen3-8b --device 4090` plans it\n"),
        (["export", "gpt2"],
         "error: Missing option '--to'.\n"
         "hint: it is typed as `memfit export PLAN.JSON|RUN|REQUEST.YAML|MODEL --to TARGET`; "),
        (["launch", "gpt2"],
         "error: Missing option '--on'. Choose from: slurm, skypilot, k8s, ray\nhint: it is "),
        (["predict", "gpt2", "--devcie", "x"],
         "error: No such option '--devcie'."
         ),
        (["plan", "lama-3.1-8b"],
         "error: unknown model: `lama-3.1-8b`\nhint: did you mean `llama-3.1-8b` or "),
        (["plan", "gpt2", "--device", "h10-sxm"],
         "error: unknown device: `h10-sxm`\nhint: did you mean `h100-sxm`"),
        (["plan", "gpt2", "--memory", "72"],
         "error: cannot read `72` as a memory size\n"
         "hint: write a memory size with its unit, for example `72 GiB`\n"),
        (["plan", "gpt2", "--set", "task.stepz=3"],
         "error: unknown key `task.stepz` in the options\nhint: did you mean `steps`?\n"),
        (["plan", "gpt2", "--set", "task.steps"],
         "error: cannot read `--set task.steps`\n"
         "hint: write a key of request.yaml and its value: `--set task.steps=100`\n"),
        (["plan", "gpt2", "--set", "task.steps=many"],
         "error: `task.steps: many` in the options: expected `int | null`, got `str`\n"
         "hint: a whole number, 1 or more\n"),
        (["plan", "gpt2", "--set", "task.steps=-3"],
         "error: `task.steps: -3` in the options: expected `int` >= 1\n"
         "hint: a whole number, 1 or more\n"),
        (["plan", "gpt2", "--set", "lora.targets=[a"],
         "error: cannot read the value of `--set lora.targets=[a`: "),
        (["plan", "gpt2", "--set", "task=3", "--set", "task.steps=3"],
         "error: `task.steps` cannot be set: `task` holds a value, not keys\n"),
        (["models", "lama9"], "error: unknown model: `lama9`\nhint: "),
        (["models", "--family", "lama"],
         "error: unknown family: `lama`\nhint: did you mean `llama`?"),
        (["devices", "--vendor", "nvidai"],
         "error: unknown vendor: `nvidai`\nhint: did you mean `NVIDIA`"),
        (["devices", "--at-least", "9 TiB"],
         "error: no device is within these bounds\nhint: `memfit devices` lists all\n"),
        (["formats", "pi"],
         "error: `pi` is not a number\nhint: X is a number such as 3.14159265 or -2e-5\n"),
        (["solve", "gpt2"], "error: `memfit solve gpt2` names no field to solve for\n"
                            "hint: `memfit solve sequence_length gpt2`, or micro_batch, "),
        (["report", "nowhere"], "error: `nowhere` holds no plan.json\nhint: name the folder"),
        (["plan", "nowhere.yaml"],
         "error: cannot read `nowhere.yaml`: No such file or directory\n"
         "hint: `memfit init` writes a commented one\n"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)  # fmt: skip
def test_what_is_wrong_is_said_once_with_a_hint(arguments, said):
    code, out, err = quick(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(said)
    assert err.count("error:") == err.count("hint:") + ("cannot be set" in err) == 1


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("qwen3-8b 4090", "qwen3-8b --device 4090"), ("llama 8b", "'llama 8b'"),
     ("qwen3 8b qlora on 8 x H100", "'qwen3 8b' --method qlora --device '8 x H100'"),
     ("phi 4 t4", "'phi 4' --device t4"),
     ("nobody/some-7b lora 4090", "nobody/some-7b --method lora --device 4090"),
     ("gpt2 for p5.48xlarge --json", "gpt2 --device p5.48xlarge --json"),
     ("qwen3-4b grpo on 3090", "qwen3-4b --objective grpo --device 3090"),
     ("qwen3-4b online-dpo lora 4bit", "qwen3-4b --objective online_dpo --method qlora"),
     ("qwen3 8b dpo int8 16K bf16 in 2 x a6000 --seed 3",
      "'qwen3 8b' --objective dpo --method lora --set base_format=int8 --seq-len 16k"
      " --precision bf16 --device '2 x a6000' --seed 3"),
     ("phi-4 dora on l4", "phi-4 --method dora --device l4"),
     ("qwen3.5-4b grpo on 4090", "qwen3.5-4b --objective grpo --device 4090"),  # none has it yet
     ("gpt2 on L4, qlora, 8k context", "gpt2 --method qlora --seq-len 8k --device L4"),
     ("qwen3:8b 4090 3 epochs", "qwen3:8b --epochs 3 --device 4090"),
     ("gpt2 50M tokens in 3 days under $500 on 2 nodes of 8 h100", "gpt2 --tokens 50M"
      " --set 'limits.time=3 days' --set 'limits.cost=$500' --nodes 2 --device '8 h100'"),
     ("pretrain gpt2 from scratch on l4", "gpt2 --set weights=random --objective pretrain"
      " --device l4"),
     # what the catalogue says more of
     ("llama 3 8b instruct awq", "'llama 3 8b instruct awq'")],
)  # fmt: skip
def test_a_model_a_method_and_a_device_in_words_are_options(typed, meant):
    assert shlex.join(join_name(["plan", *typed.split()])) == f"plan {meant}"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("plan qwen3-8b --gpu 4090 qlora", "plan qwen3-8b --method qlora --gpu 4090"),
     ("plan --gpu=4090 qwen3 8b qlora --json 8k",
      "plan 'qwen3 8b' --method qlora --seq-len 8k --gpu=4090 --json"),
     ("plan qlora --lora_r 8 --model qwen3-8b", "plan qwen3-8b --method qlora --lora_r 8"),
     ("solve sequence_length --gpu l4 gpt2 full", "solve sequence_length gpt2 --method full"
      " --gpu l4"),
     ("plan gpt2,qlora,4090", "plan gpt2 --method qlora --device 4090"),
     ("plan 'train a gpt2 with lora on l4'", "plan gpt2 --method lora --device l4"),
     ("plan 'qwen3 8b' qlora 8k", "plan 'qwen3 8b' --method qlora --seq-len 8k"),  # in quotes
     ("train gpt2 --folder 4bit --full", "train gpt2 --folder 4bit --full"),  # an option's value
     ("plan gpt2 --frob lora full", "plan gpt2 --frob lora full")],  # whose option is not known
)  # fmt: skip
def test_words_about_a_model_stand_on_either_side_of_options(typed, meant):
    args = put_model_in_place(shlex.split(typed))
    command = app.get_command(click.Context(app), args[0])
    assert shlex.join(join_name(args, command)) == meant


def test_solve_takes_words_after_its_field():
    typed = ["solve", "sequence_length", "llama", "8b", "qlora", "on", "4090"]
    meant = "solve sequence_length 'llama 8b' --method qlora --device 4090"
    assert shlex.join(join_name(typed)) == meant
    assert join_name(["solve", "gpt2"]) == ["solve", "gpt2"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [("gpt2 frob", "`frob` after `gpt2` is no method, objective, length or device"),
     ("mixtral qlora on 48gb", "`48gb` after `mixtral` is no method, objective, length or"
      " device\nhint: `memfit devices 48GB` lists those of that memory"),
     ("gpt2 l4 liger", "`liger` after `gpt2` is no method, objective, length or device\n"
      "hint: that is `--set lean=all --set loss=chunked` here"),
     ("gpt2 lora full", "`lora full` after `gpt2` is not one method, "),
     ("gpt2 4090 --gpu a100", "`4090` after `gpt2` and a flag both set `hardware.device`"),
     ("gpt2 8k --max_seq_length 4k", "`8k` after `gpt2` and a flag both set `task."),
     ("gpt2 dpo --set task.objective=sft", "`dpo` after `gpt2` and a flag both set `task."),
     ("4bit", "`4bit` cannot be trained: its weights are stored in 4 bits"),
     ("gemma-3-12b-it frob 4bit", "`gemma-3-12b-it frob 4bit` cannot be trained: ")],
)  # fmt: skip
def test_words_after_a_model_that_mean_nothing_or_two_things_are_refused(typed, said):
    code, out, err = quick("plan", *typed.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {said}")
    assert "hint: " in err


def test_another_frameworks_step_without_seconds_is_predicted_as_the_hint_says():
    words = ["qwen3.5-9b", "lora", "--framework", "trl", "--gpu", "b200"]
    code, out, err = quick("plan", *words)
    assert (code, out) == (2, "")
    assert "hint: `memfit predict` with the same words" in err
    code, out, _ = quick("predict", *words)
    assert code == 0
    assert out.startswith("FITS")


@pytest.mark.parametrize("verb", REQUEST_VERBS)
def test_offline_the_hub_is_not_asked(verb, monkeypatch):
    monkeypatch.setenv(options.OFFLINE, "0")
    field = ["micro_batch"] if verb == "solve" else []
    code, _, err = quick(verb, *field, "gpt2", "--offline", "--device", "frob")
    assert (code, os.environ[options.OFFLINE]) == (2, "1"), err
    assert "error: " in err


def test_guessed_words_are_no_verbs_and_name_one():
    assert not set(first_contact.GUESSED) & set(VERBS)
    assert set(first_contact.GUESSED.values()) <= {*VERBS, "--version"}


def test_yaml_is_read_as_version_1_2(tmp_path, request_file):
    text = "model: gpt2\noptimizer: {learning_rate: 2e-4}\nseed: 007\n"
    read = api.read(write(tmp_path, text))
    assert read.optimizer.learning_rate == 2e-4
    code, err = fails("plan", write(tmp_path, "model: gpt2\ntask: {packing: no}\n"))
    assert code == 2
    assert "`task.packing: no` in " in err
    assert "hint: true, false or auto" in err
    options_read = options.read_changes(None, None, ("optimizer.learning_rate=2e-4", "a=no"))
    assert options_read == {"optimizer.learning_rate": 2e-4, "a": "no"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("0", 0), ("007", 7), ("-3", -3), ("2e-4", 2e-4), ("true", True), ("no", "no"),
     ("null", None), ("72 GiB", "72 GiB"), ("[q_proj, v_proj]", ["q_proj", "v_proj"]),
     ("{blocks: 3}", {"blocks": 3}), ("", None), ("'3'", "3"), ("bf16", "bf16"),
     ("True", True), ("NULL", None), ("yes", "yes"), ("on", "on")],
)  # fmt: skip
def test_a_value_of_set_is_yaml(text, value):
    from ruamel.yaml import YAML

    assert options.read_value("key", text) == value == YAML(typ="safe", pure=True).load(text)


@pytest.mark.parametrize(("key", "value", "said"), [
    ("micro_batch", 3, "`micro_batch: 3` does not divide `task.global_batch: 4`"),
    ("recompute", {"blocks": 9}, "`recompute.blocks: 9` is more than the 2 blocks of `tiny`"),
    ("optimizer.learning_rate", -1, "`optimizer.learning_rate: -1`"),
    ("hardware.count", 3, "`task.global_batch: 4` is not a multiple of 3: 3 ranks"),
    ("seed", "one", "`seed: one` in "),
    ("limits.time", "soon", "cannot read `soon` as a duration"),
])  # fmt: skip
def test_a_value_that_cannot_be_is_refused_with_both_numbers(tmp_path, key, value, said):
    data = json.loads(json.dumps(ASKED))
    *parents, last = key.split(".")
    place = data
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = value
    code, err = fails("plan", write(tmp_path, data))
    assert code == 2
    assert said in err
    assert "\nhint: " in err


def test_a_lora_target_that_matches_nothing_is_refused(tmp_path):
    asked = {"method": "lora", "lora": {"targets": ["q_prj"]}}
    code, err = fails("plan", write(tmp_path, ASKED | asked))
    assert code == 2
    assert "q_prj" in err
    assert "q_proj" in err


def test_a_broken_file_is_named_with_line_and_column(tmp_path):
    code, err = fails("plan", write(tmp_path, "model: gpt2\ntask: [1, 2\n"))
    assert code == 2
    assert re.search(r"changed\.yaml` line 3, column 1: ", err)


def test_an_edited_plan_is_refused(tmp_path, request_file):
    assert quick("plan", request_file, "--folder", tmp_path, "--quiet")[0] == 0
    file = tmp_path / "plan.json"
    data = json.loads(file.read_text())
    data["recipe"]["micro_batch"] = 1 + data["recipe"]["micro_batch"]
    file.write_text(json.dumps(data))
    code, err = fails("certify", file)
    assert code == 2
    assert "carries digest" in err


def test_options_cannot_change_a_plan(tmp_path, request_file):
    quick("plan", request_file, "--folder", tmp_path, "--quiet")
    code, err = fails("train", tmp_path / "plan.json", "--memory", "1 GiB")
    assert code == 2
    assert "a plan is fixed" in err


# JSON


MEMORY = {"peak_allocated", "peak_reserved", "device_total", "usable", "verdict", "entries"}
TIME = {
    "step_seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", "hfu",
    "model_flops_per_step",
}  # fmt: skip
COST = {"device_hours", "usd", "kwh", "kg_co2"}


@pytest.mark.parametrize("verb", ["plan", "predict"])
def test_the_json_of_a_plan_has_the_keys_of_the_design(tmp_path, verb):
    code, out, err = quick(verb, write(tmp_path, STATED), "--json")
    assert (code, err) == (0, "")
    data = strict(out)
    assert set(data["memory"]) >= MEMORY
    assert set(data["time"]) >= TIME
    assert set(data["cost"]) >= COST
    assert all({"kind", "phase", "owner", "nbytes", "because"} == set(e)
               for e in data["memory"]["entries"])  # fmt: skip
    # of a CPU the process is among them
    held = sum(e["nbytes"] for e in data["memory"]["entries"])
    assert held == data["memory"]["device_total"]


@pytest.mark.parametrize("arguments", [
    ["models"], ["models", "llama", "--up-to", "8B"], ["devices"], ["devices", "h100-sxm"],
    ["formats", "3.14159265"], ["formats", "--", "-1e300"], ["rules", "gpt2"], ["schema"],
    ["budget", "--parameters", "7B", "--tokens", "1.4T"], ["doctor"],
    ["budget", "--time", "14 days", "--devices", "h100-sxm:8,gb10"],
])  # fmt: skip
def test_every_looking_verb_prints_valid_json_only(arguments, monkeypatch):
    monkeypatch.setattr(doctor, "prove", proved)
    verb, *rest = arguments
    code, out, err = quick(verb, "--json", *rest)
    assert (code, err) == (0, "")
    assert strict(out)


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_certify_prints_its_certificate_with_the_plans_time(tmp_path):
    file = write(tmp_path, STATED)
    code, out, err = quick("certify", file, "--json", "--folder", tmp_path / "run", "--quiet")
    assert (code, err) == (0, "")
    data = strict(out)
    assert set(data["memory"]) >= MEMORY
    assert set(data["time"]) >= TIME
    assert data["recipe_digest"] == api.read_plan(tmp_path / "run" / "plan.json").recipe_digest
    assert (tmp_path / "run" / "certificate.json").exists()
    code, out, _ = quick("report", tmp_path / "run", "--json", "--quiet")
    assert code == 0
    assert strict(out)["certificate"]["recipe_digest"] == data["recipe_digest"]


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_a_certificate_of_several_devices_is_of_what_their_plan_says(certified_here, tmp_path):
    ranks = {"device": "h100-sxm", "count": 4, "nodes": 2}
    asked = {"model": TINY, "weights": "random", "hardware": ranks,
             "task": {"sequence_length": 64, "global_batch": 16}}  # fmt: skip
    file, folder = write(tmp_path, asked), tmp_path / "run"
    planned = strict(quick("plan", file, "--json", "--quiet")[1])
    assert planned["recipe"]["micro_batch"] > 1  # plain defaults would be one
    code, out, err = quick("certify", file, "--folder", folder)
    assert code == 0, err
    assert f"certifying recipe {planned['recipe_digest']} for 8 x h100-sxm" in err
    assert "rank 0 of 8" in out
    assert "8 x h100-sxm (certified)" in out
    assert {path.name for path in folder.iterdir()} == {"plan.json", "certificate.json"}
    written = [strict((folder / name).read_text()) for name in ("plan.json", "certificate.json")]
    assert [made["recipe"] for made in written] == [planned["recipe"]] * 2
    code, out, err = quick("certify", file, "--json", "--quiet")
    assert (code, err) == (0, "")
    proved = strict(out)
    assert proved["recipe"] == planned["recipe"]
    assert proved["memory"]["peak_allocated"] == planned["memory"]["peak_allocated"]
    assert python_verbs.certify(file).recipe_digest == planned["recipe_digest"]


def test_what_no_plan_of_several_devices_describes_is_certified_as_stated(certified_here, tmp_path):
    asked = {"model": TINY, "weights": "random", "offload": "activations",
             "hardware": {"device": "h100-sxm", "count": 2},
             "task": {"sequence_length": 64, "global_batch": 4}}  # fmt: skip
    file, folder = write(tmp_path, asked), tmp_path / "run"
    code, out, err = quick("certify", file, "--folder", folder)
    assert code == 0, err
    assert "`offload: activations` on 2 devices is not predicted yet; certified as stated" in err
    assert "method: full, precision: bf16-mixed" in err
    assert "rank 0 of 2" in out
    assert [path.name for path in folder.iterdir()] == ["certificate.json"]
    data = strict(quick("certify", file, "--json", "--quiet")[1])
    assert (data["recipe"]["offload"], data["recipe"]["micro_batch"]) == ("activations", 1)
    assert "not predicted yet" in data["because"]


def test_what_does_not_fit_several_devices_has_a_nearest_that_does(certified_here, tmp_path):
    asked = {"model": {**TINY, "vocab_size": 50304}, "weights": "random", "method": "full",
             "precision": "bf16-mixed", "optimizer": {"name": "adamw"}, "micro_batch": 2,
             "recompute": "none", "loss": "plain", "hardware": {"device": "rtx-4090", "count": 2},
             "limits": {"memory": "6 GiB"}, "parallel": {"dp_shard": 2},
             "task": {"sequence_length": 16384, "global_batch": 4}}  # fmt: skip
    file = write(tmp_path, asked)
    code, out, err = quick("certify", file, "--json", "--quiet")
    assert (code, err) == (3, "")
    nearest = strict(out)["nearest"]
    assert nearest["memory"]["verdict"] == "fits"
    words = [f"{key}={json.dumps(value)}" for key, value in nearest["changes"].items()]
    changed = [part for word in words for part in ("--set", word)]
    code, out, err = quick("certify", file, "--json", "--quiet", *changed)
    assert code == 0, err
    proved = strict(out)
    assert proved["recipe_digest"] == nearest["recipe_digest"]
    assert proved["recipe"]["parallel"]["dp_shard"] == 2


@pytest.mark.parametrize(
    ("verb", "hardware", "said", "hint"),
    [
        (
            "train",
            {},
            "`parallel` names 4 ranks (1 x 4), but `hardware` has `count: 1` x",
            "`hardware.count: 4`",
        ),
        ("measure", {"count": 4}, "for 4 devices, and `memfit measure` runs on one", "for one"),
    ],
)
def test_devices_that_are_not_there_are_refused(verb, hardware, said, hint, tmp_path):
    changed = {
        **STATED,
        "parallel": {"dp_shard": 4},
        "hardware": STATED["hardware"] | hardware,
        "task": {**STATED["task"], "data": "x.txt"},
    }
    file = write(tmp_path, changed)
    code, out, err = quick(verb, file)
    assert (code, out) == (2, "")
    error, _, advice = err.partition("\nhint: ")
    assert said in error
    assert hint in advice
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.slow
def test_measure_prints_measured_memory_and_time(tmp_path):
    # in a process of its own, whose memory is what is measured
    words = ("measure", write(tmp_path, STATED), "--steps", "2", "--json", "--quiet")
    done = memfit(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    data = strict(done.stdout)
    assert set(data["memory"]) >= MEMORY
    assert set(data["time"]) >= TIME
    assert data["memory"]["verdict"] == "fits"
    assert data["time"]["step_seconds"] > 0


@pytest.mark.slow
def test_calibrate_writes_the_users_row_and_shows_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = quick("calibrate", "--device", "cpu", "--quick")
    assert code == 0
    assert f"wrote [cpu-x86] of {tmp_path / 'memfit' / 'devices.toml'}" in err
    assert "matmul" in out  # "fp32" may stand below it, where a busy machine spreads widely
    assert max(cell_len(line) for line in out.splitlines()) <= 80
    code, out, err = quick("calibrate", "--device", "cpu", "--quick", "--json", "--quiet")
    assert (code, err) == (0, "")
    assert strict(out)["calibration"]["versions"]["torch"]


@pytest.mark.parametrize("count", ["16", "16_000", "1,024", "2K", "1e3"])
def test_a_number_of_devices_is_one_budget_and_names_are_offers(count):
    code, out, _ = quick("budget", "--parameters", "7B", "--devices", count, "--device", "l4")
    assert code == 0
    assert "What" not in out
    code, out, _ = quick("budget", "--time", "1 d", "--devices", "l4")
    assert code == 0
    assert "What 1 d 0 h buy" in out


def test_an_option_of_offers_without_offers_is_refused():
    code, err = fails("budget", "--parameters", "7B", "--model", "gpt2")
    assert code == 2
    assert "`--model` is of offers" in err


# what the screens of the catalogues hold


@pytest.mark.levers
@pytest.mark.parametrize("arguments", [
    ["devices"], ["models"], ["formats", "3.14159265"], ["rules", "gpt2"], ["doctor"], ["--help"],
    ["devices", "h100-sxm"], ["models", "gpt2-xl"],
    ["budget", "--inference-memory", "24 GiB", "--context", "8192", "--device", "a100-sxm-80"],
    ["budget", "--cost", "5000 USD", "--time", "14 days", "--devices",
     "h100-sxm:8,a100-sxm-80:8,rtx-pro-6000:128,gb10:2", "--model", "phi-3-mini-4k-instruct"],
    ["plan", "gpt2", "--device", "rtx-4090"], ["plan", "gpt2", "--device", "rtx-4090", "--why"],
], ids=" ".join)  # fmt: skip
def test_every_screen_fits_80_columns(arguments, monkeypatch):
    monkeypatch.setattr(doctor, "prove", proved)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = quick(*arguments)
    assert (code, err) == (0, "")
    assert max(cell_len(line) for line in out.splitlines()) <= 80


def test_unverified_figures_carry_a_mark_and_unknown_ones_a_dash():
    rows = api.devices()
    weak = next(d for d in rows if "memory" in d.unverified and d.memory)
    _, out, _ = quick("devices", weak.id)
    assert re.search(rf"^  {re.escape(weak.id)} +[\d.]+ GiB \?", out, re.M)
    unknown = next(d for d in rows if not d.prices)
    _, out, _ = quick("devices", unknown.id)
    assert re.search(rf"^  {re.escape(unknown.id)} .* -$", out, re.M)


def test_search_words_must_all_occur_and_bounds_narrow():
    assert {m.model_type for m in api.models("llama", family="llama")} == {"llama"}
    assert max(m.parameters for m in api.models(up_to="1B")) <= 1_000_000_000
    ids = [d.id for d in api.devices("nvidia", at_least="80 GiB")]
    assert "h100-sxm" not in ids  # 79.1 GiB are left to torch
    assert "h200-sxm" in ids or any(i.startswith("h200") for i in ids)


# init, schema, and what they say of the request


def test_init_writes_a_request_that_reads_and_never_overwrites(tmp_path):
    done = memfit("init", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    file = tmp_path / "request.yaml"
    first, *_ = file.read_text().splitlines()
    assert first == "# yaml-language-server: $schema=./request.schema.json"
    assert json.loads((tmp_path / "request.schema.json").read_text()) == json.loads(
        json.dumps(schema())
    )
    asked = api.read(file)
    assert (asked.model, asked.hardware.device) == ("llama-3.1-8b", "h100-sxm")
    again = memfit("init", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr == (
        "error: `request.yaml` exists already\nhint: name another file: `memfit init second.yaml`\n"
    )


def test_the_template_with_every_comment_opened_still_is_the_default_request(tmp_path):
    head, body = template().split("\n\n", 1)
    assert all(line.startswith("# ") for line in head.splitlines())
    opened = re.sub(r"^# ", "", body, flags=re.M)
    read = api.read(write(tmp_path, opened))
    given = {"model": read.model, "hardware": read.hardware, "task": read.task}
    assert read == Request(**given)
    assert read.task == type(read.task)(data="data/")


def dotted(kind, prefix=""):
    for field in msgspec.structs.fields(kind):
        yield prefix + field.encode_name
        types = [field.type, *getattr(field.type, "__args__", ())]
        for inner in types:
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                yield from dotted(inner, f"{prefix}{field.encode_name}.")


def test_every_key_of_the_request_is_described_and_no_other():
    assert set(KEYS) == set(dotted(Request))


def test_the_schema_refuses_unknown_keys_and_describes_every_key():
    made = schema()
    records = [made, *made["$defs"].values()]
    assert all(r["additionalProperties"] is False for r in records)
    assert made["required"] == ["model"]
    assert all(f["description"] for r in records for f in r["properties"].values())


def test_without_a_model_or_a_request_plan_says_what_to_type(tmp_path):
    done = memfit("plan", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no model was named" in done.stderr
    assert "memfit plan llama-3.1-8b --device h100-sxm" in done.stderr


# what links the verbs


@pytest.mark.parametrize("changes", [
    {}, {"method": "lora", "lora": {"rank": 4, "targets": ["q_proj"]}}, {"precision": "bf16"},
    {"limits": {"memory": "3 MiB"}}, {"method": "freeze", "freeze": {"last_blocks": 1}},
    {"optimizer": {"name": "sgd", "learning_rate": 0.1}},
    {"loss": "chunked", "loss_chunk": 64},
], ids=str)  # fmt: skip
def test_a_plan_stated_as_a_request_plans_to_the_same_recipe(tmp_path, changes):
    plan = api.plan(api.read(write(tmp_path, ASKED | changes)), levers=False)
    stated = api.state(plan)
    assert api.plan(stated, levers=False).recipe_digest == plan.recipe_digest
    assert api.predict(stated).recipe_digest == plan.recipe_digest


def test_the_next_command_can_be_typed(tmp_path, request_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, out, _ = quick("plan", "request.yaml", "--set", "task.global_batch=8", "--memory", "2 GiB")
    (line,) = [line.strip() for line in out.splitlines() if line.startswith("  memfit ")]
    assert line == "memfit certify request.yaml --memory '2 GiB' --global-batch 8"


def test_every_verb_has_help_and_json():
    for verb in VERBS:
        code, out, err = quick(verb, "--help")
        assert (code, err) == (0, "")
        assert "--json" in out
        assert out.startswith(f"Usage: memfit {verb}")


@pytest.mark.wide  # `make check` runs it
def test_the_generated_docs_are_fresh():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_docs.py", "--check"], check=False,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_no_heavy_library_is_imported_before_it_is_needed():
    code = (
        "import sys; from memfit.cli import app; app.app.get_command(None, 'plan');"
        "print(sorted({'rich', 'ruamel', 'memfit.catalog', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout == "[]\n"


def test_a_plan_imports_nothing_of_the_other_verbs():
    code = (
        "import sys, memfit.api;"
        "print([m for m in sys.modules if m.startswith(('memfit.certify', 'memfit.accuracy.',"
        " 'memfit.workflows.prepare', 'memfit.train', 'torch', 'email'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.stdout == "[]\n"
    assert [name for name in api._LATER if not callable(getattr(api, name))] == []


# run folders


@pytest.fixture
def text_data(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / "data" / f"{name}.txt").write_text(f"{name} quick brown fox jumps. " * 200)
    return tmp_path / "data"


def trainable(tmp_path, text_data, **task):
    data = ASKED | {"task": ASKED["task"] | {"data": str(text_data)} | task}
    return write(tmp_path, data)


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
def test_plan_certify_train_generate_report_share_one_folder(tmp_path, text_data, monkeypatch):
    """Each verb takes what the one before it left, and the recipe never changes."""
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "run"
    assert quick("plan", trainable(tmp_path, text_data), "--folder", home, "--quiet")[0] == 0
    digest = api.read_plan(home / "plan.json").recipe_digest
    assert quick("certify", home / "plan.json", "--quiet", "--json")[0] == 0
    code, out, err = quick("train", home / "plan.json", "--json", "--quiet")
    assert (code, err) == (0, "")
    data = strict(out)
    assert (data["recipe_digest"], data["steps_done"], data["finished"]) == (digest, 3, True)
    code, out, err = quick("generate", home, "a quick", "--tokens", "5", "--json")
    assert (code, err) == (0, "")
    sample = strict(out)
    assert (home / "sample.txt").read_text() == sample["prompt"] + sample["text"]
    code, out, _ = quick("report", home, "--json", "--quiet")
    assert strict(out)["sample"] == sample["prompt"] + sample["text"]
    assert "a quick" in (home / "report.html").read_text()
    names = {f.name for f in home.iterdir()}
    assert {"request.json", "plan.json", "certificate.json", "run.json", "log.jsonl",
            "report.json", "report.html", "model"} <= names  # fmt: skip
    monkeypatch.chdir(tmp_path)  # a path is one word, and longer than a line here
    assert max(cell_len(line) for line in quick("report", "run")[1].splitlines()) <= 80


@pytest.mark.slow
@pytest.mark.usefixtures("certified_here")
@pytest.mark.parametrize("left", ["plan.json", "request.json"])
def test_a_run_folder_of_another_request_is_refused_untouched(
    tmp_path, text_data, left, monkeypatch
):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "run"
    file = trainable(tmp_path, text_data)
    quick("plan", file, "--folder", home, "--quiet")
    if left == "request.json":
        assert quick("train", file, "--folder", home, "--quiet")[0] == 0
    before = {f: f.stat().st_mtime_ns for f in home.rglob("*")}
    code, err = fails("train", file, "--folder", home, "--set", "task.steps=4")
    assert code == 2
    assert "holds a run of another request: `task.steps` (3 there, 4 here) differ" in err
    assert {f: f.stat().st_mtime_ns for f in home.rglob("*")} == before


def test_a_run_that_cannot_fit_leaves_nothing_behind(tmp_path, text_data, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    file = trainable(tmp_path, text_data)
    code, out, err = quick("train", file, "--folder", tmp_path / "run", "--memory", "64 KiB")
    assert (code, out) == (3, "")
    assert err.startswith("error: needs ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"data": "nowhere"}, "nowhere"),
        ({"data": ""}, "no training data is named"),
    ],
)
def test_data_that_is_not_there_is_named(tmp_path, text_data, task, said, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    code, err = fails("train", trainable(tmp_path, text_data, **task), "--folder", "run")
    assert code == 2
    assert said in err
    assert not (tmp_path / "run").exists()


SMALL = ["--set", "task.global_batch=8", "--set", "task.sequence_length=1024"]


def test_plan_compares_offers_in_eighty_columns():
    code, out, _ = quick("plan", "gpt2", "--devices", "rtx-4090,h100-sxm:2", *SMALL)
    assert code == 0
    assert "rtx-4090:1" in out
    assert "h100-sxm:2" in out
    assert max(map(len, out.splitlines())) <= 80


def test_offers_on_which_nothing_fits_exit_with_3():
    asked = ["plan", "llama-3.1-405b", "--devices", "rtx-4090", "--set", "method=full"]
    code, out, _ = quick(*asked, *SMALL)
    assert code == 3
    assert "DOES NOT FIT" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "h100-sxm:8", "--device", "h100-sxm"], "both say where to train"),
        (["--devices", "h100-sxm:8", "--why-not", "micro_batch=2"], "asks about one offer"),
        (["--devices", "h100-sxm:0"], "`h100-sxm:0` names no device"),
    ],
)
def test_questions_that_exclude_each_other(options, message):
    code, _, err = quick("plan", "gpt2", *options)
    assert code == 2
    assert message in err


def test_why_not_in_words_and_as_json():
    asked = ["plan", "gpt2", "--device", "rtx-4090", *SMALL, "--why-not", "recompute=full"]
    code, out, _ = quick(*asked)
    assert code == 0
    assert "recompute=full: it fits, and is slower" in out
    found = json.loads(quick(*asked, "--json")[1])
    assert found["answer"] == "slower"
    assert found["changes"] == {"recompute": "full"}


def test_solve_in_words_and_as_json():
    stated = ["method=full", "precision=bf16", "recompute=full", "loss=chunked"]
    asked = ["solve", "micro_batch", "gpt2", "--device", "rtx-4090", *SMALL]
    asked += [text for word in stated for text in ("--set", word)]
    code, out, _ = quick(*asked)
    assert code == 0
    found = json.loads(quick(*asked, "--json")[1])
    assert f"micro batch: {found['value']}" in out
    assert found["plan"]["memory"]["verdict"] == "fits"


@pytest.mark.parametrize(
    ("words", "want", "message"),
    [
        (["solve", "micro_batch"], 2, "no model was named to solve for `micro_batch`"),
        (["solve", "sequences", "gpt2"], 2, "memfit does not solve for `sequences`"),
        (["solve", "batch", "mixtral", "--device", "l4"], 2, "hint: say which: `mixtral-8x7b-v0"),
        (["solve", "micro_batch", "gpt2", "--device", "l4", "--memory", "200 MiB"], 3, ""),
    ],
)
def test_what_solve_cannot_answer(words, want, message):
    code, _, err = quick(*words)
    assert code == want
    assert message in err


def test_a_searched_plan_can_be_typed_again_as_one_configuration():
    asked = ["llama-3.1-8b", "--device", "h100-sxm", *SMALL]
    asked += ["--set", "framework=torchtitan", "--set", "hardware.count=4"]
    plan = json.loads(quick("plan", *asked, "--json")[1])
    (chosen,) = [row for row in plan["considered"] if row["chosen"]]
    stated = [text for word in set_words(chosen["changes"]) for text in ("--set", word)]
    again = json.loads(quick("predict", *asked, *stated, "--json")[1])
    assert again["recipe_digest"] == plan["recipe_digest"]
    assert again["time"] == plan["time"]
