"""Templates overridden and what of a conversation is learned, against transformers' own calls."""

import json

import numpy as np
import pytest
from msgspec.structs import replace
from test_conversations import MARKED, ONE, PLAIN, TALK, masked_by_transformers
from tiny_runs import CONFIG, tiny_recipe

from memfit.core.errors import InvalidRequest
from memfit.records.request import Request, Task
from memfit.train.data.prepare import find_tokenizer, read_data
from memfit.train.data.readers import find_sources
from memfit.train.data.tokenizer import END_OF_TEXT, read_tokenizer, train_tokenizer
from memfit.train.run.loop import Cadence, train

WORDS = "user assistant system hello there how are you I am well Hi again 0123456789 <>|\n" * 40
OWN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([WORDS], 290, folder)
    (folder / "chat_template.jinja").write_text(MARKED)
    return folder


@pytest.fixture
def read(tokenizer, tmp_path, cache):
    data = tmp_path / "talks.jsonl"
    data.write_text("".join(json.dumps({"messages": t}) + "\n" for t in (TALK, ONE)))

    def run(**keys):
        task = Task(data=str(data), objective="sft", **keys)
        asked = Request(model=CONFIG, tokenizer=str(tokenizer), task=task)
        return asked, read_data(asked, tiny_recipe().model, cache)

    return run


def documents(corpus):
    cuts = list(zip(corpus.offsets, corpus.offsets[1:], strict=False))
    return [
        (corpus.tokens[a:b].tolist(), (corpus.learned[a:b] if corpus.learned is not None
                                       else np.ones(b - a, dtype="uint8")).tolist())
        for a, b in cuts
    ]  # fmt: skip


@pytest.mark.parametrize("template", [MARKED, PLAIN, OWN], ids=["marked", "plain", "own"])
@pytest.mark.parametrize("written", ["text", "file"])
def test_a_template_that_is_stated_is_what_transformers_renders(template, written, read, tmp_path):
    stated = template
    if written == "file":
        (tmp_path / "own.jinja").write_text(template)
        stated = str(tmp_path / "own.jinja")
    asked, data = read(chat_template=stated, learns="all")
    wrapped = read_tokenizer(asked.tokenizer).wrapped
    theirs = [
        wrapped.apply_chat_template(talk, chat_template=template, return_dict=True)["input_ids"]
        for talk in (TALK, ONE)
    ]
    assert [ids for ids, _ in documents(data.training)] == theirs


def test_all_answers_the_last_one_or_all_is_learned(read):
    _, data = read()
    answers = documents(data.training)
    wanted = [masked_by_transformers(data.tokenizer, talk) for talk in (TALK, ONE)]
    assert answers == wanted
    everything = documents(read(learns="all")[1].training)
    assert [ids for ids, _ in everything] == [ids for ids, _ in answers]
    assert all(all(flags) for _, flags in everything)
    last = documents(read(learns="last-answer")[1].training)
    for (ids, flags), (_, own) in zip(answers, last, strict=True):
        edges = np.flatnonzero(np.diff([0, *flags]) == 1)  # where answers begin
        assert own == [flag if i >= edges[-1] else 0 for i, flag in enumerate(flags)]
        assert len(ids) == len(own)
    assert sum(flags.count(1) for _, flags in last) < sum(flags.count(1) for _, flags in answers)


def test_another_template_or_mask_is_another_cache_and_digest(read):
    ways = (
        {}, {"learns": "all"}, {"learns": "last-answer"}, {"chat_template": OWN, "learns": "all"}
    )  # fmt: skip
    digests = {read(**keys)[1].training.digest for keys in ways}
    assert len(digests) == 4


def test_a_run_ends_with_the_template_it_was_trained_with(read, tmp_path, cache):
    asked, data = read(chat_template=PLAIN)
    recipe = tiny_recipe(objective="sft", steps=2)
    train(recipe, asked, tmp_path / "run", cache=cache, cadence=Cadence(save_every=2))
    saved = read_tokenizer(str(tmp_path / "run" / "model"))
    assert saved.wrapped.chat_template == PLAIN
    assert saved.chat(TALK) == data.tokenizer.chat(TALK)


def test_a_completion_is_learned_with_its_prompt_where_all_is(tokenizer, tmp_path, cache):
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "hello ", "completion": "there"}) + "\n")
    asked = Request(
        model=CONFIG, tokenizer=str(tokenizer),
        task=Task(data=str(data), objective="sft", learns="all"),
    )  # fmt: skip
    corpus = read_data(asked, tiny_recipe().model, cache).training
    ((ids, flags),) = documents(corpus)
    wrapped = read_tokenizer(str(tokenizer)).wrapped
    assert ids == wrapped(f"hello there{END_OF_TEXT}")["input_ids"]
    assert all(flags)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("missing.jinja", "is no file and no Jinja template"),
        ("{% for %}", "no template that Jinja"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused(stated, said, read, tmp_path, cache):
    asked, _ = read()
    other = replace(asked, task=replace(asked.task, chat_template=stated))
    sources = find_sources(asked.task.data, cache)
    with pytest.raises(InvalidRequest, match=said) as caught:
        find_tokenizer(other, tiny_recipe().model, sources, cache)
    assert caught.value.hint
