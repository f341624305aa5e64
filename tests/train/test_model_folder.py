"""The folder that a run ends with, as transformers reads it."""

import json

import pytest
import torch
from msgspec.structs import replace
from tiny_runs import CONFIG, tiny_recipe
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from memfit.records.model import ModelReference
from memfit.train.checkpoint import export
from memfit.train.checkpoint.export import save_model
from memfit.train.data.tokenizer import train_tokenizer
from memfit.train.model.weights import fill_weights
from memfit.train.step.build import Built, build_model, build_optimizer

TEXT = ["the cat sat on the mat " * 20]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(TEXT, 300, tmp_path_factory.mktemp("tokenizer"))


def publish(folder, ends):
    """A checkpoint with stop tokens and sampling of its own; returns its config."""
    config = {k: v for k, v in CONFIG.items() if k != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**config, eos_token_id=ends))
    model.save_pretrained(folder)
    held = {"eos_token_id": ends, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(held))
    return json.loads((folder / "config.json").read_text())


def save(run, recipe, tokenizer):
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    return model, save_model(run, Built(recipe, model, build_optimizer(recipe, model)), tokenizer)


def read(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("known", [True, False])
def test_stop_tokens_and_sampling_of_the_source_are_kept(known, tokenizer, tmp_path):
    """A list that lacks the token behind trained documents has it added, and is kept otherwise."""
    ends = [2, tokenizer.end] if known else [2, 5]
    assert tokenizer.end not in (2, 5)
    config = publish(tmp_path / "source", ends)
    reference = ModelReference(name="tiny", source=str(tmp_path / "source"), config=config)
    recipe = tiny_recipe(weights="pretrained", model=reference)
    _, folder = save(tmp_path, recipe, tokenizer)
    want = ends if known else [tokenizer.end, *ends]
    found = read(folder)
    assert found.config.eos_token_id == want
    assert found.generation_config.eos_token_id == want
    assert found.generation_config.temperature == 0.6
    assert found.generation_config.top_p == 0.9


def test_a_model_from_scratch_stops_where_its_documents_did(tokenizer, tmp_path):
    _, folder = save(tmp_path, tiny_recipe(), tokenizer)
    assert read(folder).config.eos_token_id == tokenizer.end
    assert not (folder / "generation_config.json").exists()


def test_weights_of_many_gigabytes_are_several_files(tokenizer, tmp_path, monkeypatch):
    """Split as Hugging Face splits them, here at 20 KB, and read back to the bit."""
    split = export.split_torch_state_dict_into_shards
    monkeypatch.setattr(
        export, "split_torch_state_dict_into_shards", lambda t: split(t, max_shard_size="20KB")
    )
    model, folder = save(tmp_path, tiny_recipe(), tokenizer)
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(files) > 2
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    found = dict(read(folder).named_parameters())
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
    again = replace(
        tiny_recipe(weights="pretrained"),
        model=replace(tiny_recipe().model, source=str(folder)),
    )
    read_back = build_model(again, "cpu")
    fill_weights(read_back, again)
    assert all(
        torch.equal(p, q) for p, q in zip(read_back.parameters(), model.parameters(), strict=True)
    )
