"""Reading and tokenising data; the tokenizer of transformers is the oracle."""

import csv
import io
import json
import shutil
import threading

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from memfit.core.errors import InvalidRequest, RunFailed
from memfit.core.system import json_lists
from memfit.train.data import tokens
from memfit.train.data.readers import find_sources
from memfit.train.data.shards import split as splitting
from memfit.train.data.shards.split import read_parts, read_texts, split
from memfit.train.data.tokenizer import read_tokenizer, train_tokenizer
from memfit.train.data.tokens import read_corpus

CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another?"},
    {"role": "assistant", "content": "Green."},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(["the cat sat on the mat, name a colour: blue " * 20], 300, folder)


@pytest.fixture
def chatty(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "chatty")
    (tmp_path / "chatty" / "chat_template.jinja").write_text(CHAT)
    return read_tokenizer(str(tmp_path / "chatty"))


def write_lines(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def read(data, tokenizer, cache, objective="pretrain"):
    return read_corpus(find_sources(str(data)), tokenizer, objective, cache)


def document(corpus, i):
    cut = slice(corpus.offsets[i], corpus.offsets[i + 1])
    return corpus.tokens[cut].tolist()


def test_a_folder_is_all_its_text_in_the_order_of_names(tokenizer, tmp_path):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "b.md").write_text("on the mat")
    (data / "a.txt").write_text("the cat sat")
    (data / "sub" / "c.py").write_text("print('naïve ☃')")
    (data / ".hidden").write_text("secret")
    (data / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (data / "empty.txt").write_text("")
    corpus = read(data, tokenizer, tmp_path)
    texts = [tokenizer.decode(document(corpus, i)) for i in range(corpus.documents)]
    assert texts == ["the cat sat", "on the mat", "print('naïve ☃')"]
    assert all(document(corpus, i)[-1] == tokenizer.end for i in range(3))
    assert corpus.notes == (
        f"1 empty files passed over in `{data}`",
        f"1 binary files passed over in `{data}`",
    )
    assert corpus.tokens.dtype == np.uint16


def test_a_glob_pattern_chooses_files(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "b.py").write_text("the mat")
    found = find_sources(str(tmp_path / "**" / "*.py"))
    assert [s.path.name for s in found.files] == ["b.py"]


def test_jsonl_parquet_and_text_give_the_same_tokens(tokenizer, tmp_path):
    texts = ["the cat", "sat on the mat"]
    lines = write_lines(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    table = pyarrow.table({"text": texts, "other": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    one = read(lines, tokenizer, tmp_path)
    two = read(tmp_path / "a.parquet", tokenizer, tmp_path)
    want = [tokenizer.wrapped(t)["input_ids"] + [tokenizer.end] for t in texts]
    assert [document(c, i) for c in (one, two) for i in range(2)] == want * 2


def test_a_csv_is_a_table_of_examples_and_not_a_text(tokenizer, tmp_path):
    rows = [
        {"prompt": "the cat", "completion": 'sat, "on"\nthe mat'},
        {"prompt": "2", "completion": "4"},
    ]
    for name, dialect in (("a.csv", "excel"), ("a.tsv", "excel-tab")):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["completion", "id", "prompt"], dialect=dialect)
            writer.writeheader()
            writer.writerows({"id": i, **row} for i, row in enumerate(rows))
    lines = write_lines(tmp_path / "a.jsonl", rows)
    want = read(lines, tokenizer, tmp_path, "sft")
    for name in ("a.csv", "a.tsv"):
        found = read(tmp_path / name, tokenizer, tmp_path, "sft")
        assert found.tokens.tolist() == want.tokens.tolist()
        assert found.learned.tolist() == want.learned.tolist()
    (tmp_path / "b.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InvalidRequest, match="no column to train on: a, b"):
        read(tmp_path / "b.csv", tokenizer, tmp_path, "sft")
    (tmp_path / "c.csv").write_text("text,b\n1\n")
    with pytest.raises(InvalidRequest, match=r"cannot read `.*c\.csv` as CSV: "):
        read(tmp_path / "c.csv", tokenizer, tmp_path, "sft")


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_objects_is_read_as_its_lines(indent, tokenizer, tmp_path, monkeypatch):
    """`alpaca_data.json` of many repositories; in shards too, and the line a reader names."""
    records = [{"text": f"the cat \u2028 {n} sat"} for n in range(40)]
    write_lines(tmp_path / "a.jsonl", records)
    want = read(tmp_path / "a.jsonl", tokenizer, tmp_path / "one")
    (tmp_path / "a.json").write_text(json.dumps(records, indent=indent, ensure_ascii=False))
    monkeypatch.setattr(splitting, "SHARD", 200)
    monkeypatch.setattr(json_lists, "MIB", 7)
    found = read(tmp_path / "a.json", tokenizer, tmp_path / "two")
    assert found.documents == 40
    assert found.tokens.tolist() == want.tokens.tolist()
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "lines.json")  # as some call JSONL
    assert read(tmp_path / "lines.json", tokenizer, tmp_path / "two").documents == 40
    (tmp_path / "a.json").write_text(json.dumps([*records, {"text": 3}]))
    with pytest.raises(InvalidRequest, match=r"a\.json` example 41"):
        read(tmp_path / "a.json", tokenizer, tmp_path / "two")


@pytest.mark.parametrize(("text", "number", "problem"), [
    ("{}", 0, "no array"), ("[{}", 2, "does not end"), ("[{} {}]", 2, "no comma"),
    ("[{},]", 2, "Expecting value"), ('[{"a": 1', 1, "Expecting"), ("[1,2", 3, "does not end"),
])  # fmt: skip
def test_an_array_that_is_broken_is_named_by_its_element(text, number, problem):
    with pytest.raises(json_lists.ListError, match=problem) as caught:
        list(json_lists.read_list(io.StringIO(text).read))
    assert caught.value.number == number


def test_what_describes_a_data_set_is_not_trained_on(tokenizer, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "dataset_info.json").write_text('{"builder_name": "json"}')
    write_lines(data / "train.jsonl", [{"text": "the cat"}])
    corpus = read(data, tokenizer, tmp_path)
    assert corpus.documents == 1
    assert corpus.notes == (
        "1 JSON documents, of which each is one object and no list of examples, passed over in"
        f" `{data}`",
    )


def test_a_message_that_only_calls_tools_has_no_content(chatty, tmp_path):
    """OpenAI's format: `content` is null there; a message without either is refused."""
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    talk = [{"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "user", "content": "2"},
            {"role": "assistant", "content": "It is 2."}]  # fmt: skip
    corpus = read(write_lines(tmp_path / "a.jsonl", [{"messages": talk}]), chatty, tmp_path, "sft")
    assert "It is 2." in chatty.decode(document(corpus, 0))
    silent = [talk[0], {"role": "assistant", "content": None}]
    with pytest.raises(InvalidRequest, match=r"`messages\[1\]\.content` is a NoneType"):
        read(write_lines(tmp_path / "b.jsonl", [{"messages": silent}]), chatty, tmp_path, "sft")


def test_a_completion_is_learned_and_its_prompt_is_not(tokenizer, tmp_path):
    data = write_lines(tmp_path / "p.jsonl", [{"prompt": "name a col", "completion": "our: blue"}])
    corpus = read(data, tokenizer, tmp_path, "sft")
    prompt = tokenizer.encode("name a col")
    answer = [*tokenizer.encode("our: blue"), tokenizer.end]
    assert document(corpus, 0) == prompt + answer
    assert corpus.learned.tolist() == [0] * len(prompt) + [1] * len(answer)
    assert read(data, tokenizer, tmp_path, "pretrain").learned is None


def test_only_what_assistants_wrote_is_learned(chatty, tmp_path):
    corpus = read(write_lines(tmp_path / "c.jsonl", [{"messages": TALK}]), chatty, tmp_path, "sft")
    ids = np.array(document(corpus, 0))
    whole = chatty.wrapped.apply_chat_template(TALK, tokenize=False)
    assert ids.tolist() == chatty.wrapped(whole, add_special_tokens=False)["input_ids"]
    learned = chatty.wrapped.decode(ids[corpus.learned == 1])
    assert learned == "Blue.<|endoftext|>Green.<|endoftext|>"


def test_messages_in_parquet_are_read(chatty, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"messages": [TALK]}), tmp_path / "m.parquet")
    assert read(tmp_path / "m.parquet", chatty, tmp_path, "sft").documents == 1


def test_plain_text_is_learned_whole_whatever_the_objective(tokenizer, tmp_path):
    data = write_lines(tmp_path / "t.jsonl", [{"text": "the cat"}])
    assert read(data, tokenizer, tmp_path, "sft").learned is None


def test_a_text_that_has_no_tokens_is_refused(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    data = write_lines(tmp_path / "t.jsonl", [{"text": "the"}, {"text": " "}])
    with pytest.raises(InvalidRequest, match=r"line 2 has no tokens"):
        read(data, read_tokenizer(str(tmp_path)), tmp_path / "cache")


def test_a_conversation_without_an_answer_is_refused(chatty, tmp_path):
    data = write_lines(tmp_path / "c.jsonl", [{"messages": TALK[:1]}])
    with pytest.raises(InvalidRequest, match=r"line 1 has no answer to learn"):
        read(data, chatty, tmp_path, "sft")
    assert read(data, chatty, tmp_path, "pretrain").documents == 1


def test_messages_without_a_chat_template_are_refused(tokenizer, tmp_path):
    data = write_lines(tmp_path / "c.jsonl", [{"messages": TALK}])
    with pytest.raises(InvalidRequest, match=r"c.jsonl` line 1: .* has no chat template") as error:
        read(data, tokenizer, tmp_path, "sft")
    assert "--set task.chat_template=FILE.jinja" in error.value.hint


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t")
    template = "{{ messages | length }}" + CHAT
    (tmp_path / "t" / "chat_template.jinja").write_text(template)
    data = write_lines(tmp_path / "c.jsonl", [{"messages": TALK}])
    with pytest.raises(InvalidRequest, match="rewrites earlier turns"):
        read(data, read_tokenizer(str(tmp_path / "t")), tmp_path, "sft")


BAD_LINES = {
    '{"text": "a"}\n{"text": ': r"bad.jsonl` line 2 is not JSON",
    '{"text": "a"}\n\n[1]\n': r"line 3 holds a list, not an object",
    '{"body": "a"}\n': r"line 1 has no column to train on: body",
    '{"text": 3}\n': r"line 1: `text` is a int",
    '{"text": ""}\n': r"line 1: `text` is empty",
    '{"prompt": "a", "completion": ""}\n': r"`completion` is empty",
    '{"messages": []}\n': r"line 1: `messages` is empty",
    '{"messages": "Hi"}\n': r"line 1: `messages` is a str, not a list of messages",
    '{"messages": [{"role": "user"}]}\n': r"line 1: `messages\[0\]` has no `content`",
    '{"text": "\\ud800"}\n': r"half a (surrogate pair|character)",
}


@pytest.mark.parametrize("content", BAD_LINES)
def test_a_broken_line_is_named_by_file_and_number(content, tokenizer, tmp_path):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(InvalidRequest, match=BAD_LINES[content]):
        read(tmp_path / "bad.jsonl", tokenizer, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.bin")), "nothing is left behind"


def test_unusable_files_are_refused_by_name(tokenizer, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "program").write_bytes(b"\x7fELF\0\0")
    (tmp_path / "latin.txt").write_bytes("café au lait".encode("latin-1"))
    (tmp_path / "cut.txt").write_bytes("un café".encode()[:-1])
    (tmp_path / "cut.jsonl").write_bytes(b'{"text": "a"}\n\xef')
    (tmp_path / "one.json").write_text('{"features": {\n"text": 1}}')
    (tmp_path / "none.json").write_text("[]")
    (tmp_path / "open.json").write_text('[{"text": "the cat"}, {"text": "a\n')
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nonsense")
    (tmp_path / "void").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "other.parquet")
    for name, says in {
        "missing.txt": "no data at",
        "empty.txt": "is empty",
        "program": "is a binary file",
        "latin.txt": "is not UTF-8 text: it holds the byte 0xe9",
        "cut.txt": "is not UTF-8 text: it holds the byte 0xc3",
        "cut.jsonl": "is not UTF-8 text: it holds the byte 0xef",
        "one.json": "one JSON document",
        "none.json": "is an empty array",
        "open.json": r"open.json` example 2: Invalid control character",
        "broken.parquet": "as parquet",
        "other.parquet": "no column to train on: body",
        "void": "holds no text",
        "*.nothing": "holds no text",
    }.items():
        with pytest.raises(InvalidRequest, match=says):
            read(tmp_path / name, tokenizer, tmp_path / "cache")
    with pytest.raises(InvalidRequest, match=r"did you mean `empty.txt`"):
        find_sources(str(tmp_path / "emty.txt"))


def test_data_is_tokenised_once(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the cat")
    first = read(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    monkeypatch.setattr(tokens, "split", None)  # a second reading would fail
    second = read(tmp_path / "a.txt", tokenizer, tmp_path / "cache")
    assert second.tokens.tolist() == first.tokens.tolist()


def test_the_cache_is_keyed_by_bytes_tokenizer_and_objective(tokenizer, chatty, tmp_path):
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "same.txt").write_text("the cat")
    (tmp_path / "b.txt").write_text("the mat")
    key = read(tmp_path / "a.txt", tokenizer, tmp_path).digest
    assert read(tmp_path / "same.txt", tokenizer, tmp_path).digest == key
    assert read(tmp_path / "b.txt", tokenizer, tmp_path).digest != key
    assert read(tmp_path / "a.txt", chatty, tmp_path).digest != key
    assert read(tmp_path / "a.txt", tokenizer, tmp_path, "sft").digest != key


@pytest.mark.parametrize("damage", ["missing", "short", "meta"])
def test_a_damaged_cache_is_made_again(damage, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat")
    good = read(tmp_path / "a.txt", tokenizer, tmp_path).tokens.tolist()
    (folder,) = (tmp_path / "tokens").iterdir()
    if damage == "missing":
        (folder / "offsets.bin").unlink()
    elif damage == "short":
        (folder / "tokens.bin").write_bytes(b"\0\0")
    else:
        (folder / "meta.json").write_text("{")
    assert read(tmp_path / "a.txt", tokenizer, tmp_path).tokens.tolist() == good


def test_two_readers_at_once_agree(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 5000)
    found = []
    readers = [
        threading.Thread(target=lambda: found.append(read(tmp_path / "a.txt", tokenizer, tmp_path)))
        for _ in range(4)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(found) == 4
    assert all((c.tokens == found[0].tokens).all() for c in found)
    assert len(list((tmp_path / "tokens").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_one_clear_error(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the cat")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RunFailed, match="cannot write the token cache"):
        read(tmp_path / "a.txt", tokenizer, tmp_path / "file")


def test_a_long_text_is_one_document_and_loses_nothing(tokenizer, tmp_path):
    text = "the cat sat on the mat\n" * 120_000  # 2.8 MB: encoded in pieces
    (tmp_path / "long.txt").write_text(text)
    corpus = read(tmp_path / "long.txt", tokenizer, tmp_path)
    assert corpus.documents == 1
    assert tokenizer.decode(corpus.tokens.tolist()) == text


def test_a_short_text_has_the_same_tokens_beside_a_long_one(tmp_path):
    own = train_tokenizer(["cat\n\n"] * 50, 300, tmp_path / "own")
    assert len(own.encode("\n\n")) < len(own.encode("\n\nb")) - 1, "the cut would be seen"
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("cat\n\nb")
    alone = read(data, own, tmp_path)
    (data / "b.txt").write_text("cat\n" * 300_000)
    assert document(read(data, own, tmp_path), 0) == document(alone, 0)


def test_a_trained_tokenizer_loses_no_text_and_loads_with_transformers(tokenizer):
    from transformers import AutoTokenizer

    text = "ünïcode ☃ \t\n tabs, the cat"
    again = AutoTokenizer.from_pretrained(tokenizer.source)
    assert again.decode(again(text)["input_ids"]) == text
    assert read_tokenizer(tokenizer.source).fingerprint == tokenizer.fingerprint
    assert tokenizer.vocab <= 300


def test_vocabularies_that_do_not_fit_are_refused_with_both_numbers(tokenizer, tmp_path):
    tokenizer.check_vocabulary(tokenizer.vocab, "tiny")
    with pytest.raises(InvalidRequest, match=rf"{tokenizer.vocab} tokens but `tiny` has .* 96"):
        tokenizer.check_vocabulary(96, "tiny")
    with pytest.raises(InvalidRequest, match="a vocabulary of 96 cannot hold the 256 bytes"):
        train_tokenizer(["a"], 96, tmp_path)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="no tokenizer in"):
        read_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidRequest, match="cannot read the tokenizer"):
        read_tokenizer(str(tmp_path))


def test_a_tokenizer_learns_from_every_kind_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    write_lines(tmp_path / "b.jsonl", [{"text": "line"}, {"messages": TALK[:2]}])
    texts = list(read_texts(find_sources(str(tmp_path))))
    assert texts == ["plain", "line", "Name a colour.", "Blue."]


def test_examples_name_their_place(tokenizer, tmp_path):
    data = write_lines(tmp_path / "a.jsonl", [{"text": "x"}, {"text": "y"}])
    (shard,) = split(find_sources(data))
    assert [part.place.split("/")[-1] for part in read_parts(shard, tokenizer, "pretrain")] == [
        "a.jsonl` line 1",
        "a.jsonl` line 2",
    ]
