"""What is exported fits where it runs: `check` answers what the file claims, data are found, and
texts come back as they were."""

import glob
import json
import os
import shlex
import subprocess
from contextlib import chdir
from functools import cache

import datasets
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

import memfit.cli.app as cli
from memfit import api
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.core.wording import VERDICTS
from memfit.export.files import dump_yaml, in_one_line
from memfit.export.target import exports, find_target
from memfit.records import from_data
from memfit.records.request import Request

TARGETS = exports.names()
SCHEDULERS = [name for name in TARGETS if find_target(name).schedules]
SFT, PAIRS = {"objective": "sft"}, {"objective": "dpo", "sequence_length": 1024}
LORA = {"method": "lora"}
PLANS = {
    "full": {"model": "qwen3-0.6b", "method": "full", "hardware": {"device": "a100-sxm-40"}},
    "open": {"model": "smollm2-360m", "hardware": {"device": "l40s"}},
    "lora": {"model": "qwen3-4b", **LORA, "task": SFT, "hardware": {"device": "rtx-a6000"}},
    "nf4": {
        "model": "llama-3.1-8b", **LORA, "base_format": "nf4", "task": SFT,
        "hardware": {"device": "rtx-3090"},
    },
    "many": {"model": "llama-3.1-8b", "method": "full",
             "hardware": {"device": "h100-sxm", "count": 8}},
    "nodes": {
        "model": "llama-3.1-70b", "method": "full", "task": {"global_batch": 32},
        "hardware": {"device": "h100-sxm", "count": 8, "nodes": 4},
    },
    "sharded-lora": {"model": "qwen3-14b", **LORA, "task": SFT,
                     "hardware": {"device": "l40s", "count": 4}},
    "dpo": {"model": "qwen3-0.6b", **LORA, "task": PAIRS, "hardware": {"device": "rtx-4090"}},
    "dpo-full": {"model": "qwen3-0.6b", "method": "full", "task": PAIRS,
                 "hardware": {"device": "h200-sxm"}},
    "8-bit-states": {"model": "qwen3-1.7b", "method": "full", "task": SFT,
                     "optimizer": {"name": "adamw8bit-bnb"}, "hardware": {"device": "h100-pcie"}},
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2."}]}


def read(data):
    return from_data(data, Request, source="a test")


def run_check(made, folder):
    """What the command that the export prints answers; of the files as they were written."""
    api.write_export(made, folder)
    words = [str(folder / word) if word in made.files else word for word in made.check[1:]]
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("click.echo", lambda text="", **_: said.append(text))
        code = cli.run(lambda: cli.app.main([*words, "--json"], standalone_mode=False))
    return code, json.loads(said[-1])["plan"]["memory"]


@cache
def own_memory(name):
    """Of memfit's own step, which a scheduler runs."""
    return api.plan(read(PLANS[name]), levers=False).memory


def judge(name, target, folder):
    """Whether a plan is written for a target; asserts that `check` answers what is claimed."""
    try:
        made = api.export(read(PLANS[name]), target)
    except (InvalidRequest, DoesNotFit) as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.hint, refused.message
        assert target not in SCHEDULERS, refused.message
        return False
    assert made.verdict != "does_not_fit"
    for text in made.files.values():
        assert " ".join(VERDICTS[made.verdict].split()) in text
    if target in SCHEDULERS:
        own = own_memory(name)
        assert (made.peak.peak_allocated, made.peak.device_total) == (
            own.peak_allocated, own.device_total,
        )  # fmt: skip
        assert made.verdict == own.verdict
    if made.check:
        code, found = run_check(made, folder)
        assert code == 0
        assert found["verdict"] == made.verdict
        assert found["peak_allocated"] == made.peak.peak_allocated
        assert found["device_total"] == made.peak.device_total
    return True


LEAST = {"torchtitan": 2, "torchtitan-main": 2, "megatron": 2, "deepspeed": 3}  # of others 7


# in `make test` every plan for a third of the targets, every trainer with a third of the plans;
# schedulers, which all run memfit's own step, with one
SOME = [
    pytest.param(
        target, [*PLANS][at % 3 :: 3] if target not in SCHEDULERS else [*PLANS][at % 10 :][:1],
        id=target,
    )
    for at, target in enumerate(TARGETS)
]  # fmt: skip
ALL = [
    pytest.param(target, list(PLANS), id=f"{target}, every plan", marks=pytest.mark.wide)
    for target in TARGETS
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "names"), [*SOME, *ALL])
def test_check_answers_what_the_export_claims(target, names, tmp_path):
    """Of every plan that the target takes, and it takes several: refusing all would prove nothing.

    A fault of one plan does not hide those of others.
    """
    written, faults = [], {}
    for name in names:
        try:
            if judge(name, target, tmp_path / name):
                written.append(name)
        except AssertionError as fault:
            faults[name] = str(fault)
    assert not faults
    assert written
    assert len(written) >= LEAST.get(target, 7) - (len(PLANS) - len(names))


@pytest.mark.ways_out
@pytest.mark.usefixtures("few_ways_out")
@pytest.mark.parametrize(("target", "asked"), [
    ("trl", {"model": "qwen3-8b", "hardware": {"device": "a100-sxm-80"}}),
    pytest.param("axolotl", {"model": "qwen3-8b", "hardware": {"device": "rtx-4090"}},
                 marks=pytest.mark.wide),
])  # fmt: skip
def test_what_cannot_fit_there_is_refused_with_ways_that_do(target, asked):
    with pytest.raises(DoesNotFit, match="DOES NOT FIT") as caught:
        api.export(read(asked), target)
    assert caught.value.exit_code == 3
    options = shlex.split(caught.value.hint.split("`")[1])
    changes = {}
    for option, word in zip(options[::2], options[1::2], strict=True):
        key, _, value = (
            ("hardware.device", "", word) if option == "--device" else word.partition("=")
        )
        changes[key] = int(value) if value.isdigit() else value
    assert api.export(api.change(read(asked), changes), target).verdict == "fits"


def test_what_a_plan_left_open_is_decided_again_and_what_it_states_is_kept():
    asked = {"model": "qwen3-0.6b", "method": "full", "hardware": {"device": "rtx-4090"}}
    plan = api.plan(read({**asked, "task": {"sequence_length": 2048}}), levers=False)
    made = api.export(plan, "trl")
    written = yaml.safe_load(made.files["trl.yaml"])
    assert written["max_length"] == 2048
    numbers = {"bf16": ("bfloat16", False), "bf16-mixed": ("float32", True)}
    rounds = plan.recipe.optimizer.stochastic_rounding  # which TRL cannot
    wanted = "bf16-mixed" if rounds else plan.recipe.precision
    assert (written["dtype"], written["bf16"]) == numbers[wanted]
    assert ("precision" in made.changed) == (wanted != plan.recipe.precision)
    assert plan.recipe_digest in made.files["trl.yaml"]
    assert made.recipe_digest != plan.recipe_digest


@pytest.mark.parametrize("target", ["trl", "axolotl", "llamafactory", "deepspeed", "torchtitan"])
@pytest.mark.parametrize("name", ["muon", "adafactor", "adamwfp8", "adamwbf16"])
def test_an_optimizer_that_the_tool_lacks_is_refused(target, name):
    asked = {**PLANS["full"], "optimizer": {"name": name}}
    with pytest.raises(InvalidRequest, match=rf"`optimizer.name: {name}` cannot be written") as one:
        api.export(read(asked), target)
    assert "adamw" in one.value.hint


@pytest.mark.parametrize(("changes", "target", "key"), [
    ({"optimizer.name": "sgd"}, "trl", "optimizer.momentum"),
    ({"lora.alpha": 16.5}, "axolotl", "lora.alpha"),
    ({"weights": "random"}, "llamafactory", "weights: random"),
    ({"precision": "bf16"}, "axolotl", "precision: bf16"),
    ({"base_format": "fp4"}, "axolotl", "base_format: fp4"),
    ({"optimizer.stochastic_rounding": True}, "trl", "optimizer.stochastic_rounding"),
    ({"method": "full", "task.objective": "sft"}, "megatron", "objective"),
])  # fmt: skip
def test_what_decides_learning_and_cannot_be_said_is_refused(changes, target, key):
    with pytest.raises(InvalidRequest, match=key):
        api.export(api.change(read(PLANS["lora"]), changes), target)


def test_packages_that_files_ask_for_are_named_with_their_commands():
    made = api.export(read(PLANS["nf4"]), "trl")
    needs = {one.package: one.install for one in made.needs}
    assert needs.keys() == {"peft", "bitsandbytes", "flash-attn"}
    written = " ".join(made.files["trl.yaml"].replace("\n# ", " ").split())
    assert all(install in written for install in needs.values())


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "chat.jsonl").write_text(json.dumps(CHAT) + "\n")
    (folder / "more.jsonl").write_text(json.dumps(CHAT) + "\n")
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one line\nanother\n")
    pairs = {"prompt": "1?", "chosen": "2.", "rejected": "3."}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pairs) + "\n")
    return tmp_path


def load(target, folder):
    """The rows that the tool loads, from the folder where its command runs, by its own calls."""
    written = yaml.safe_load((folder / f"{target}.yaml").read_text())
    with chdir(folder):
        if target == "trl":
            return [row for one in written["datasets"]
                    for row in datasets.load_dataset(**one)]  # fmt: skip
        if target == "axolotl":
            return [row for one in written["datasets"] for row in datasets.load_dataset(
                one["ds_type"], data_files=one["path"], split="train")]  # fmt: skip
        info = json.loads((folder / written["dataset_dir"] / "dataset_info.json").read_text())
        found = []
        for name in written["dataset"].split(","):
            path = os.path.join(written["dataset_dir"], info[name]["file_name"])
            kind = {"jsonl": "json", "txt": "text"}[path.rpartition(".")[2]]
            found += datasets.load_dataset(kind, data_files=[path], split="train")
        return found


@pytest.mark.covering
@pytest.mark.parametrize("target", ["trl", "axolotl", "llamafactory"])
@pytest.mark.parametrize(("path", "objective", "rows"), [
    ("data/chat.jsonl", "sft", 1), ("data", "sft", 2), ("texts/a.txt", "pretrain", 2),
    ("texts", "pretrain", 2), ("pairs.jsonl", "dpo", 1),
])  # fmt: skip
def test_local_data_are_found_from_the_exports_folder(
    target, path, objective, rows, data, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(data / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", data / "cache")
    monkeypatch.chdir(data)
    task = {"objective": objective, "sequence_length": 512, "data": path}
    made = api.export(read({**PLANS["dpo"], "task": task}), target)
    assert made.peak.peak_allocated
    written = yaml.safe_load(made.files[f"{target}.yaml"])
    assert "max_steps" not in written
    assert written["num_epochs" if target == "axolotl" else "num_train_epochs"] == 1.0
    api.write_export(made, data / "out")
    assert len(load(target, data / "out")) == rows
    code, found = run_check(made, data / "out")
    assert (code, found["peak_allocated"]) == (0, made.peak.peak_allocated)


def test_a_scheduler_is_given_whole_paths(data, monkeypatch):
    monkeypatch.chdir(data)
    task = {"objective": "sft", "sequence_length": 512, "data": "data/chat.jsonl"}
    made = api.export(read({**PLANS["lora"], "task": task}), "slurm")
    plan = json.loads(made.files["plan.json"])
    assert plan["request"]["task"]["data"] == str(data / "data" / "chat.jsonl")


def test_steps_that_nobody_has_counted_are_asked_for(data):
    task = {"data": str(data / "texts"), "sequence_length": 512}
    with pytest.raises(InvalidRequest, match="number of steps"):
        api.export(read({**PLANS["full"], "task": task}), "torchtitan")


ODD = [
    "a\x85b",
    "a\u2028b\u2029",
    "a\x1cb",
    'it\'s "so"',
    " x ",
    "-x",
    "- x",
    "no",
    "0x1F",
    "1e5",
    "1_000",
    "12:30:00",
    "2026-01-01",
    "a: b",
    "a #b",
    "~",
    "",
    "\ufeffx",
    "&a",
    "!x",
    "%x",
    "@x",
    "`x`",
    "{a}",
    "[a]",
    "a\nb",
    " a\nb",
    "a\n\n",
    "\t",
    "null",
    "0.50",
    "\U0001f600",
]


def read_both(text):
    old, new = YAML(typ="safe", pure=True), YAML(typ="safe", pure=True)
    old.version = (1, 1)
    return yaml.safe_load(text), old.load(text), new.load(text)


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_odd_texts_are_read_back_as_they_were(value):
    data = {"key": value, "list": [value, {"path": value}]}
    assert read_both(dump_yaml(data)) == (data, data, data)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_read_back_as_it_was(value):
    assert read_both(dump_yaml({"key": value})) == ({"key": value},) * 3
    assert len(f"# {in_one_line(value)}".splitlines()) == 1


@pytest.mark.parametrize(
    "odd", ["a\x85b", "a\u2028b", "a\x1cb", 'it\'s "so"', "-x", "a b", "[1]*?"]
)
def test_odd_names_of_data_are_named_as_they_are(odd, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / odd
    folder.mkdir()
    (folder / "d.jsonl").write_text(json.dumps(CHAT) + "\n")
    task = {"objective": "sft", "sequence_length": 512, "data": str(folder / "d.jsonl")}
    asked = read({**PLANS["lora"], "task": task})
    for target in ("trl", "axolotl", "llamafactory") if odd in ("-x", "[1]*?") else ("trl",):
        if glob.has_magic(odd) and target != "trl":
            with pytest.raises(InvalidRequest, match="pattern"):
                api.export(asked, target)
            continue
        api.write_export(api.export(asked, target), tmp_path / "out")
        assert len(load(target, tmp_path / "out")) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_commands_are_words_of_a_shell(target, tmp_path):
    asked = read(PLANS["many"])
    made = api.export(asked, target)
    for path in api.write_export(made, tmp_path):
        if path.suffix in (".sh", ".sbatch"):
            subprocess.run(["bash", "-n", str(path)], check=True)
    subprocess.run(["bash", "-n", "-c", made.start], check=True)
    assert shlex.split(shlex.join(made.check)) == list(made.check)
