"""What a run's start refuses, it refuses before a byte is written."""

import json
import re

import pytest
from msgspec.structs import replace

from memfit import api
from memfit.core.errors import DoesNotFit, InvalidRequest
from memfit.files.run_folder import check_folder
from memfit.records import from_data, read_json, write_json
from memfit.records.habits import RunRequest
from memfit.records.request import Request
from memfit.train.checkpoint.export import save_model
from memfit.train.data.tokenizer import train_tokenizer
from memfit.train.step.build import Built, build_model, build_optimizer, fill_weights

TEXT = "a few words of text that a tokenizer can learn from\n" * 40


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A model as memfit itself writes it, with its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    config = {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    request = from_data(
        {"model": config, "hardware": {"device": "cpu"}}, Request, source="the test"
    )
    recipe = api.plan(request, levers=False).recipe
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    tokenizer = train_tokenizer([TEXT], 300, folder / "tokenizer")
    built = Built(recipe, model, build_optimizer(recipe, model))
    return save_model(folder, built, tokenizer)


def start(folder, model, **limits):
    data = folder / "data.txt"
    data.write_text(TEXT)
    request = from_data(
        {
            "model": str(model), "weights": "pretrained", "precision": "fp32", "limits": limits,
            "hardware": {"device": "cpu"},
            "task": {"data": str(data), "sequence_length": 32, "global_batch": 2, "steps": 2},
        },
        Request,
        source="the test",
    )  # fmt: skip
    api.prepare(request, folder / "run")


def damaged(source, target, change):
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    change(target)
    return target


def shorten(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def widen(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 65}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights in"),
        (shorten, "cannot read the weights in"),
        (widen, "the model needs (65, 32)"),
    ],
)
def test_broken_weights_are_refused_and_nothing_is_left_behind(
    tmp_path, monkeypatch, model_folder, change, said
):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    broken = damaged(model_folder, tmp_path / "broken", change)
    with pytest.raises(InvalidRequest, match=re.escape(said)) as caught:
        start(tmp_path, broken)
    assert caught.value.hint
    assert not (tmp_path / "run").exists()


def test_a_folder_takes_its_run_on_other_ranks_and_nothing_else(tmp_path):
    asked = {"model": "llama-3.1-8b", "task": {"steps": 5, "global_batch": 8}}
    one = from_data(asked, Request, source="the test")
    write_json(tmp_path / "request.json", one)
    hardware = {"hardware": {"count": 4}, "parallel": {"dp_shard": 4}, "micro_batch": 2}
    check_folder(tmp_path, [from_data(asked | hardware, Request, source="the test")])
    for other in (
        {"micro_batch": 2},  # on as many ranks it is another plan's
        hardware | {"seed": 1},
        hardware | {"task": {"steps": 5, "global_batch": 16}},
    ):
        with pytest.raises(InvalidRequest, match="holds a run of another request"):
            check_folder(tmp_path, [from_data(asked | other, Request, source="the test")])


def test_how_a_run_goes_on_around_its_steps_may_change(
    tmp_path, monkeypatch, model_folder, certified_here
):
    asked = {"model": "llama-3.1-8b", "task": {"steps": 5, "global_batch": 8}}
    write_json(tmp_path / "request.json", from_data(asked, Request, source="the test"))
    run = {"run": {"save_every": 2, "best_by": "loss", "patience": 3}}
    check_folder(tmp_path, [from_data(asked | run, Request, source="the test")])
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    home = tmp_path / "run"
    start(tmp_path, model_folder)
    before = [(home / name).read_bytes() for name in ("plan.json", "certificate.json")]
    request = read_json(home / "request.json", Request)
    api.prepare(replace(request, run=RunRequest(keep=5)), home)
    assert [(home / name).read_bytes() for name in ("plan.json", "certificate.json")] == before
    assert read_json(home / "request.json", Request).run.keep == 5


def test_a_limit_that_nothing_meets_leaves_nothing_behind(tmp_path, monkeypatch, model_folder):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DoesNotFit, match=r"needs .* but `cpu-x86` may use"):
        start(tmp_path, model_folder, memory="1 KiB")
    assert not (tmp_path / "run").exists()
