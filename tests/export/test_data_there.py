"""Data in other tools' files: weights, what of conversations is learned, and what is left out."""

import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import neighbour_plans
from memfit import api
from memfit.core.errors import InvalidRequest
from memfit.export.data import _look_at
from memfit.train.data.readers import find_sources

PLANS = {"llamafactory": "own-lora", "trl": "trl-qlora", "axolotl": "own-lora"}


@pytest.fixture
def data(tmp_path):
    for name in ("a", "b"):
        row = {"messages": [{"role": "user", "content": "Hello"}]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return f"{tmp_path / 'a.jsonl'}=3, {tmp_path / 'b.jsonl'}=1"


def asked_of(target, data):
    changes = {"task.data": data, "task.objective": "sft"}
    return api.change(neighbour_plans.find_request(PLANS[target]), changes)


def test_llamafactory_interleaves_by_the_shares_until_each_was_shown_whole(data, tmp_path):
    made = api.export(asked_of("llamafactory", data), "llamafactory")
    values = YAML(typ="safe").load(made.files["llamafactory.yaml"])
    entries = json.loads(made.files["dataset_info.json"])
    names = values["dataset"].split(",")
    assert [entries[name]["file_name"] for name in names] == [
        str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"),
    ]  # fmt: skip
    assert [float(share) for share in values["interleave_probs"].split(",")] == [0.75, 0.25]
    # LLaMA-Factory's word for `all_exhausted` of datasets (0.9.4, data/data_utils.py)
    assert values["mix_strategy"] == "interleave_over"
    plain = api.export(asked_of("llamafactory", data.partition("=")[0]), "llamafactory")
    assert "interleave" not in plain.files["llamafactory.yaml"]


@pytest.mark.parametrize("target", ["trl", "axolotl"])
def test_a_tool_that_joins_data_sets_whole_refuses_weights(target, data):
    with pytest.raises(InvalidRequest, match=f"`{target}` joins data sets whole") as caught:
        api.export(asked_of(target, data), target)
    assert "--to llamafactory" in caught.value.hint


def test_a_weight_of_several_files_is_refused(data, tmp_path):
    folder = tmp_path / "more"
    folder.mkdir()
    for name in ("c.jsonl", "d.jsonl"):
        (folder / name).write_text((tmp_path / "a.jsonl").read_text())
    with pytest.raises(InvalidRequest, match=r"more` is 2 files, and LLaMA-Factory gives each"):
        api.export(asked_of("llamafactory", f"{data}, {folder}=1"), "llamafactory")
    with pytest.raises(InvalidRequest, match=r"`own/hub` is not of this machine"):
        api.export(asked_of("llamafactory", f"{data}, own/hub=1"), "llamafactory")


def test_a_json_file_is_described_by_how_training_reads_it(tmp_path):
    records = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    for name, text in (("array", json.dumps(records, indent=1)),
                       ("lines", "\n".join(map(json.dumps, records)))):  # fmt: skip
        file = tmp_path / f"{name}.json"
        file.write_text(text)
        part = _look_at(file)
        assert (part.kind, part.shape) == ("jsonl", "answers"), name
        assert find_sources(str(file)).files[0].kind == {"array": "json", "lines": "jsonl"}[name]


WRITTEN = {  # target, `task.learns` -> what its file has of it and of `task.chat_template`
    ("trl", "all"): {"completion_only_loss": False, "chat_template_path": "own.jinja"},
    ("trl", "answers"): {"assistant_only_loss": True, "chat_template_path": "own.jinja"},
    ("axolotl", "all"): {
        "train_on_inputs": True, "chat_template": "jinja", "chat_template_jinja": "own.jinja",
    },
    ("llamafactory", "all"): {"train_on_prompt": True},
    ("llamafactory", "last-answer"): {"mask_history": True},
}  # fmt: skip


@pytest.mark.parametrize(("target", "learns"), WRITTEN)
def test_what_of_a_conversation_is_learned_is_written(target, learns, data, tmp_path):
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    template = "" if target == "llamafactory" else str(tmp_path / "own.jinja")
    request = api.change(
        asked_of(target, data.partition("=")[0]),
        {"task.learns": learns, "task.chat_template": template, "precision": "bf16-mixed"},
    )
    values = YAML(typ="safe").load(api.export(request, target).files[f"{target}.yaml"])
    keys = {key for wanted in WRITTEN.values() for key in wanted}
    found = {k: Path(v).name if k.endswith(("_path", "_jinja")) else v
             for k, v in values.items() if k in keys}  # fmt: skip
    assert found == WRITTEN[target, learns]
    assert "template" not in values  # LLaMA-Factory then takes the tokenizer's own


def test_what_a_tool_has_no_word_for_is_refused_or_listed(data):
    request = asked_of("trl", data.partition("=")[0])
    for target in ("trl", "axolotl"):
        with pytest.raises(InvalidRequest, match=f"learned, and `{target}` has no word"):
            api.export(api.change(request, {"task.learns": "last-answer"}), target)
    with pytest.raises(InvalidRequest, match=r"`task\.chat_template` is a text, and `trl` reads"):
        api.export(api.change(request, {"task.chat_template": "{{ messages }}"}), "trl")
    own = asked_of("llamafactory", data.partition("=")[0])
    with pytest.raises(InvalidRequest, match="`llamafactory` takes the tokenizer's own"):
        api.export(api.change(own, {"task.chat_template": "{{ messages }}"}), "llamafactory")
    more = {"task.evaluation_share": 0.1, "run.best_by": "loss", "run.evaluate_every": 5}
    made = api.export(api.change(own, more), "llamafactory")
    assert {k: v for k, v in made.left_out.items() if k in more} == {
        "task.evaluation_share": "0.1: not written", "run.best_by": "loss: not written",
        "run.evaluate_every": "5.0: not written",
    }  # fmt: skip


def test_a_job_names_the_users_own_files_by_whole_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("own.jinja", "own.py", "prompts.jsonl"):
        (tmp_path / name).write_text("{}")
    request = api.change(neighbour_plans.find_request("own-lora"), {
        "task.objective": "grpo", "task.data": "prompts.jsonl", "task.chat_template": "own.jinja",
        "run.callbacks": ["own.py:note", "of-a-package"], "reward.funcs": ["own.py:right"],
        "rollout.num_generations": 4, "rollout.max_completion_length": 64,
        "task.global_batch": 8, "task.sequence_length": 128, "lora.dropout": 0.0,
    })  # fmt: skip
    made = api.export(request, "slurm")
    written = json.loads(made.files["plan.json"])["request"]
    assert written["task"]["data"] == str(tmp_path / "prompts.jsonl")
    assert written["task"]["chat_template"] == str(tmp_path / "own.jinja")
    assert written["run"]["callbacks"] == [f"{tmp_path / 'own.py'}:note", "of-a-package"]
    assert any(note.startswith("reward: `own.py` is looked up") for note in made.notes)
