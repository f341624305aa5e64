"""Data sets with weights in other tools' files: as their probabilities, or refused by name."""

import json

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
