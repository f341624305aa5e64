"""The trained model as a folder: transformers and peft load it, and it speaks."""

import json
import re
import shutil
import warnings

import pytest
import torch
from peft import PeftModel
from tiny_runs import CONFIG, tiny_recipe, write_text
from transformers import AutoModelForCausalLM, AutoTokenizer

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.records.model import ModelReference
from memfit.records.recipe import Freeze, Lora
from memfit.records.request import Request, Task
from memfit.train.checkpoint.export import save_model
from memfit.train.checkpoint.files import newest_checkpoint
from memfit.train.checkpoint.whole import load_checkpoint
from memfit.train.data.prepare import read_data
from memfit.train.model.weights import fill_weights
from memfit.train.run.generate import find_model_folder, generate
from memfit.train.run.loop import train
from memfit.train.step.build import Built, build_model, build_optimizer

GPT2 = {
    "model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 64,
}  # fmt: skip
CONFIGS = {"llama": CONFIG, "tied": {**CONFIG, "tie_word_embeddings": True}, "gpt2": GPT2}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run(text, cache, folder, **changes):
    recipe = tiny_recipe(**{"steps": 3, **changes})
    request = Request(model=recipe.model.config, task=Task(data=str(text)))
    train(recipe, request, folder, cache=cache)
    return recipe, request


def as_it_was(recipe, request, folder, cache):
    """The run's own module, read back from its last checkpoint."""
    model = build_model(recipe, "cpu")
    fill_weights(model, recipe)
    built = Built(recipe, model, build_optimizer(recipe, model))
    digest = read_data(request, recipe.model, cache).training.digest
    load_checkpoint(newest_checkpoint(folder, pytest.fail), built, digest)
    return built


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(5, 25)[None]).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_what_was_trained(name, text, cache, tmp_path):
    reference = ModelReference(name=name, source="", config=CONFIGS[name])
    recipe, request = run(text, cache, tmp_path, model=reference)
    ours = as_it_was(recipe, request, tmp_path, cache)
    theirs, said = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    torch.testing.assert_close(logits(theirs), logits(ours.model), rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert CONFIGS[name].items() <= config.items()


def test_a_bf16_and_a_frozen_model_load_in_their_own_dtype(text, cache, tmp_path):
    run(text, cache, tmp_path / "half", precision="bf16", base_format="bf16")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "half" / "model")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    recipe, request = run(
        text, cache, tmp_path / "frozen", method="freeze", freeze=Freeze(last_blocks=1)
    )
    ours = as_it_was(recipe, request, tmp_path / "frozen", cache)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "frozen" / "model")
    torch.testing.assert_close(logits(theirs), logits(ours.model), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def adapted(text, cache, tmp_path_factory):
    """A LoRA run on a base that memfit trained."""
    root = tmp_path_factory.mktemp("adapted")
    run(text, cache, root / "base")
    source = root / "base" / "model"
    config = json.loads((source / "config.json").read_text())
    recipe, request = run(
        text, cache, root / "lora", method="lora", weights="pretrained",
        model=ModelReference(name="base", source=str(source), config=config),
        lora=Lora(rank=4, alpha=64.0, targets=("q_proj", "v_proj")),
    )  # fmt: skip
    return root, recipe, request


def test_peft_loads_what_was_adapted(adapted, cache):
    root, recipe, request = adapted
    ours = as_it_was(recipe, request, root / "lora", cache)
    base = AutoModelForCausalLM.from_pretrained(root / "base" / "model")
    plain = logits(base)
    with warnings.catch_warnings():  # peft calls what transformers has renamed
        warnings.simplefilter("ignore", FutureWarning)
        theirs = PeftModel.from_pretrained(base, str(root / "lora" / "model"))
    torch.testing.assert_close(logits(theirs), logits(ours.model), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(theirs), plain), "the adapter does something"
    names = {p.name for p in (root / "lora" / "model").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "model.safetensors" not in names


def test_generation_is_transformers_own_when_greedy(adapted):
    root, _, _ = adapted
    folder = root / "base"
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = tokenizer("Chapter 1.", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    want = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert generate(folder, "Chapter 1.", 12, temperature=0) == want
    assert generate(folder / "model", "Chapter 1.", 12, temperature=0) == want


def test_a_message_is_answered_by_the_chat_template(adapted, tmp_path):
    root, _, _ = adapted
    shutil.copytree(root / "base" / "model", tmp_path, dirs_exist_ok=True)
    with pytest.raises(InvalidRequest, match="no chat template"):
        generate(tmp_path, "the cat", 12, chat=True)
    template = "{% for m in messages %}Chapter {{ m.content }}.{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    want = generate(tmp_path, "Chapter the cat.", 12, temperature=0)
    assert want != generate(tmp_path, "the cat", 12, temperature=0)
    assert generate(tmp_path, "the cat", 12, temperature=0, chat=True) == want


def test_the_penalty_and_stop_words_of_generation_are_transformers_own(adapted):
    root, _, _ = adapted
    folder = root / "base"
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = tokenizer("Chapter 1.", return_tensors="pt")

    def theirs(**more):
        out = model.generate(**ids, max_new_tokens=12, do_sample=False, pad_token_id=0, **more)
        return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    plain = theirs()
    penalised = generate(folder, "Chapter 1.", 12, temperature=0, repetition_penalty=1.5)
    assert penalised == theirs(repetition_penalty=1.5) != plain
    word = re.search("[0-9a-z]{2}", plain)[0]
    stopped = generate(folder, "Chapter 1.", 12, temperature=0, stop_words=(word,))
    assert stopped == theirs(stop_strings=[word], tokenizer=tokenizer) != plain
    for narrow in ({"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 1}):
        assert generate(folder, "Chapter 1.", 12, **{"top_k": 0, **narrow}) == plain
    with pytest.raises(InvalidRequest, match="`top_p: 0`"):
        generate(folder, "Chapter 1.", top_p=0)


def test_generation_stops_at_the_end_of_text(adapted, tmp_path):
    root, _, _ = adapted
    source = root / "base" / "model"
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():  # far from any habit: what it says does not repeat
            weight.normal_()
    ids = tokenizer("Chapter 1.", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
    said = out[0, ids["input_ids"].shape[1] :].tolist()
    end = next(i for i, token in enumerate(said) if i > 2 and token not in said[:i])
    model.save_pretrained(tmp_path)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(said[end])
    tokenizer.save_pretrained(tmp_path)
    want = tokenizer.decode(said[:end], skip_special_tokens=True)
    assert generate(tmp_path, "Chapter 1.", 30, temperature=0) == want


def test_generation_is_a_function_of_its_seed(adapted):
    root, _, _ = adapted
    one = generate(root / "lora", "the", 20, seed=1)
    assert generate(root / "lora", "the", 20, seed=1) == one
    assert generate(root / "lora", "the", 20, seed=2) != one
    assert generate(root / "base", "the", 20, seed=1) != one, "the adapter is used"
    greedy = generate(root / "base", "the", 8, temperature=0)
    assert generate(root / "base", "the", 8, top_k=1, seed=3) == greedy


def test_an_empty_prompt_starts_a_document_and_the_positions_end_it(text, cache, tmp_path):
    run(text, cache, tmp_path)
    assert generate(tmp_path, "", 5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    long = generate(tmp_path, "the", 1000, temperature=0)
    assert 10 < len(tokenizer(long)["input_ids"]) <= 128
    with pytest.raises(InvalidRequest, match=r"the prompt has \d+ tokens and the model 128"):
        generate(tmp_path, "the cat " * 200, 5)


def test_a_folder_without_a_model_says_why(tmp_path, adapted):
    with pytest.raises(InvalidRequest, match="no model in"):
        generate(tmp_path, "a")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InvalidRequest) as refused:
        find_model_folder(tmp_path)
    assert "has not finished" in refused.value.hint


def test_an_adapter_whose_base_is_gone_says_so(adapted, tmp_path):
    root, _, _ = adapted
    config = json.loads((root / "lora" / "model" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(tmp_path / "gone")})
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((root / "lora" / "model" / name).read_bytes())
    with pytest.raises(InvalidRequest, match="cannot read the model in"):
        generate(tmp_path, "a")


def test_a_model_that_cannot_be_written_leaves_nothing(text, cache, tmp_path):
    import resource

    recipe, request = run(text, cache, tmp_path)
    built = as_it_was(recipe, request, tmp_path, cache)
    tokenizer = read_data(request, recipe.model, cache).tokenizer
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(RunFailed, match="could not save the model"):
            save_model(tmp_path, built, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob(".model*"))
    assert generate(tmp_path, "the", 3, temperature=0)
