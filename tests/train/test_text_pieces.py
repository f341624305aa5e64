"""Texts in pieces have the tokens of whole texts, for every expression that is known."""

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from memfit.train.data import words
from memfit.train.data.tokenizer import Tokenizer

SIGNS = [*"abZ éßа中²Ⅷ1234'.,!/-_\n\r\t\u00a0\u0301\u3000☃", "the ", "'s ", " don't", "  "]
TEXTS = st.lists(st.sampled_from(SIGNS), max_size=80).map("".join)
LEARNED = "the cat's don't  1234 a,b\n\n éa 中a ☃ .. Zb/ \r\n the the cat " * 30


def build(name, *, normalizer=None, added=()):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    if name == "byte level":
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        expression = words.EXPRESSIONS.get(name, name)
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(expression), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    if normalizer:
        made.normalizer = normalizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, show_progress=False, special_tokens=["<end>"]
    )
    made.train_from_iterator([LEARNED], trainer)
    made.add_tokens(list(added))
    return made


KNOWN = {
    name: build(name, normalizer=normalizer)
    for name, normalizer in {
        **dict.fromkeys(("byte level", "llama3", "o200k", "gpt2")),
        "qwen2": tokenizers.normalizers.NFC(),
    }.items()
}


@pytest.mark.parametrize("name", KNOWN)
@given(text=TEXTS, piece=st.integers(1, 9))
@settings(max_examples=150)
def test_pieces_have_the_tokens_of_the_whole(name, text, piece):
    own = KNOWN[name]
    assert words.may_be_cut(own.to_str())
    before, words.PIECE = words.PIECE, piece
    try:
        pieces = list(words.cut(text))
    finally:
        words.PIECE = before
    assert "".join(pieces) == text
    found = [i for p in pieces for i in own.encode(p, add_special_tokens=False).ids]
    assert found == own.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_cuts_long_texts_and_keeps_texts_apart(monkeypatch):
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(words, "PIECE", 20)
    own = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=KNOWN["llama3"]), "here")
    texts = ["the cat " * 50, "a", LEARNED, ""]
    assert len(list(words.cut(texts[0]))) > 10
    want = own.wrapped(texts, add_special_tokens=False)["input_ids"]
    assert own.encode_many(texts) == want
    assert own._cuts


AddedToken = tokenizers.AddedToken
UNKNOWN = {
    "another expression": build(r"\\w+|\\s+"),
    "a token with a space": build("gpt2", added=[AddedToken("the cat")]),
    "a token that swallows the space behind it": build(
        "gpt2", added=[AddedToken("t", rstrip=True)]
    ),
    "another normalizer": build("gpt2", normalizer=tokenizers.normalizers.NFKC()),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_tokenizers_get_whole_texts(name):
    assert not words.may_be_cut(UNKNOWN[name].to_str())


@pytest.mark.parametrize("change", ["prefix space", "both expressions", "dropout", "unigram"])
def test_what_changes_the_split_or_the_model_is_no_longer_known(change):
    rules = json.loads(KNOWN["llama3"].to_str())
    level = rules["pre_tokenizer"]["pretokenizers"][1]
    if change == "prefix space":
        level["add_prefix_space"] = True
    elif change == "both expressions":
        level["use_regex"] = True
    elif change == "dropout":
        rules["model"]["dropout"] = 0.1
    else:
        rules["model"]["type"] = "Unigram"
    assert not words.may_be_cut(json.dumps(rules))
