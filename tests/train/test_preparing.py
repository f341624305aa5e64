"""Preparing data in shards and processes: the same bits as one process, resumed, within memory.

The oracle is the plain loop: each document by transformers' own call, one after the other.
"""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import killed_preparing
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers

from forked import fork
from memfit.core import units
from memfit.core.errors import InvalidRequest, RunFailed
from memfit.core.system import memory
from memfit.train.data import tokens
from memfit.train.data.readers import find_sources
from memfit.train.data.shards import parts, split, workers
from memfit.train.data.tokenizer import Talk, Tokenizer, read_tokenizer, train_tokenizer
from memfit.train.data.tokens import read_corpus

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system forks no processes")
WORDS = "the/cat/sat/on/a/mat,/naïve/☃/snow\n\nfalls;/don't/42/stop.\r\nSay:/blue/".split("/")  # noqa: SIM905


def write(count, seed):
    chance = np.random.default_rng(seed)
    return " ".join(WORDS[i] for i in chance.integers(0, len(WORDS), count))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    own = train_tokenizer([write(2000, 0)], 320, folder)
    own.wrapped.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    own.wrapped.chat_template = TEMPLATE
    own.save(folder)
    return read_tokenizer(own.source)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts shorter and longer than a shard and a piece, lines, and tables, of several contents."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(5):
        (folder / f"a{number}.txt").write_bytes(write(50, number).encode())
    (folder / "b.txt").write_bytes(write(12_000, 9).encode())
    with (folder / "c.jsonl").open("wb") as file:
        for number in range(300):
            text = json.dumps({"text": write(20, number)}, ensure_ascii=number % 2 == 0)
            file.write(text.encode() + (b"\n", b"\r\n", b"\r", b"\n\n")[number % 4])
    talks = [
        {"messages": [{"role": "user", "content": write(5, n)},
                      {"role": "assistant", "content": write(8, n + 1)}] * (1 + n % 3)}
        for n in range(200)
    ]  # fmt: skip
    (folder / "d.jsonl").write_text("\ufeff" + "".join(json.dumps(t) + "\n" for t in talks))
    rows = [{"prompt": write(5, n), "completion": write(9, n + 1)} for n in range(100)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "e.parquet")
    return folder


@pytest.fixture
def small(monkeypatch):
    """Shards and pieces of a few KiB, and processes for any of them."""
    monkeypatch.setattr(split, "SHARD", 8000)
    monkeypatch.setattr(workers, "ENOUGH", 0)
    monkeypatch.setattr(workers, "_count_cores", lambda: 3)
    monkeypatch.setattr(parts, "COMMIT", 0.0)


def read(data, tokenizer, cache, objective="sft", **more):
    return read_corpus(find_sources(str(data)), tokenizer, objective, cache, **more)


def listed(corpus):
    learned = None if corpus.learned is None else corpus.learned.tolist()
    return corpus.tokens.tolist(), corpus.offsets.tolist(), learned


def encode_plainly(tokenizer, text):
    return tokenizer.wrapped(text, add_special_tokens=False)["input_ids"]


def documents_of(data, tokenizer):
    """(ids, learned) of every document, each by a call of its own."""
    end = [tokenizer.end]
    for path in sorted(data.glob("*.txt")):
        ids = encode_plainly(tokenizer, path.read_text(encoding="utf-8")) + end
        yield ids, [1] * len(ids)
    for line in (data / "c.jsonl").read_text(encoding="utf-8").splitlines():
        if line:
            ids = encode_plainly(tokenizer, json.loads(line)["text"]) + end
            yield ids, [1] * len(ids)
    for line in (data / "d.jsonl").read_text(encoding="utf-8-sig").splitlines():
        messages = json.loads(line)["messages"]
        ids, learned = [], []
        for index, message in enumerate(messages):  # marks separate the turns
            head = encode_plainly(tokenizer, f"<|im_start|>{message['role']}\n")
            said = encode_plainly(tokenizer, f"{message['content']}<|im_end|>\n")
            ids += head + said
            learned += [0] * len(head) + [index % 2] * len(said)
        yield ids, learned
    for row in pyarrow.parquet.read_table(data / "e.parquet").to_pylist():
        prompt, answer = (encode_plainly(tokenizer, row[k]) for k in ("prompt", "completion"))
        yield prompt + answer + end, [0] * len(prompt) + [1] * (len(answer) + 1)


def test_shards_have_the_tokens_of_one_call_a_document(data, tokenizer, tmp_path, small):
    own = list(documents_of(data, tokenizer))
    corpus = read(data, tokenizer, tmp_path)
    assert corpus.documents == len(own) == 606
    for number, (ids, learned) in enumerate(own):
        cut = slice(*corpus.offsets[number : number + 2])
        assert (ids, learned) == (corpus.tokens[cut].tolist(), corpus.learned[cut].tolist())


@FORK
@pytest.mark.parametrize("objective", ["sft", pytest.param("pretrain", marks=pytest.mark.wide)])
def test_processes_and_one_process_write_the_same_bytes(
    objective, data, tokenizer, tmp_path, small, monkeypatch
):
    started = []
    start = workers._start
    monkeypatch.setattr(workers, "_start", lambda *a: started.append(start(*a)) or started[-1])
    many = read(data, tokenizer, tmp_path / "many", objective)
    assert started[0] is not None
    monkeypatch.setattr(workers, "ENOUGH", 2**60)
    monkeypatch.setattr(split, "SHARD", 2**22)
    one = read(data, tokenizer, tmp_path / "one", objective)
    assert len(started) == 1
    assert listed(many) == listed(one)
    assert many.digest == one.digest
    (folder,) = (tmp_path / "many" / "tokens").iterdir()
    expected = ["meta.json", "offsets.bin", "tokens.bin"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [*expected, *(["learned.bin"] if objective == "sft" else [])]
    )


def test_a_text_in_pieces_is_cut_where_it_always_was(tokenizer, tmp_path, monkeypatch):
    """Runs of earlier versions go on with the tokens that they began with."""
    monkeypatch.setattr(split, "PIECE", 1000)
    lines = write(900, 3).replace("\r\n", "\n")
    text = lines + "x" * 3000 + "\n" * 1500 + lines
    (tmp_path / "a.txt").write_text(text)
    want, start = [], 0
    while start < len(text):  # as versions before shards had it
        stop = start + 1000
        line = text.rfind("\n", start, stop) + 1
        stop = line if line > 0 and stop < len(text) else stop
        want += encode_plainly(tokenizer, text[start:stop])
        start = stop
    assert read(tmp_path / "a.txt", tokenizer, tmp_path).tokens.tolist() == [*want, tokenizer.end]


@FORK
@pytest.mark.parametrize(
    "enough",
    [pytest.param(0, id="processes"), pytest.param(2**60, id="one", marks=pytest.mark.wide)],
)
def test_a_killed_start_is_gone_on_from(enough, data, tokenizer, tmp_path, small, monkeypatch):
    want = listed(read(data, tokenizer, tmp_path / "whole"))
    monkeypatch.setattr(workers, "ENOUGH", enough)
    child = fork(killed_preparing.prepare, data, tokenizer.source, tmp_path, enough)
    until = time.monotonic() + 240
    while not list((tmp_path / "tokens").glob(".*/progress.json")):
        assert child.exitcode is None
        assert time.monotonic() < until
    child.kill()
    child.join()
    (folder,) = (tmp_path / "tokens").glob(".*")
    kept = json.loads((folder / "progress.json").read_text())["shards"]
    (folder / "900.part.npz").write_bytes(b"half a part")
    count = len(list(split.split(find_sources(str(data)))))
    assert 0 < kept < count
    begun = []
    taken = parts.Making.append
    monkeypatch.setattr(parts.Making, "append", lambda *a: begun.append(taken(*a)))
    assert listed(read(data, tokenizer, tmp_path)) == want
    assert len(begun) <= count - kept, "what was tokenised is not tokenised again"
    assert [p.name[0] for p in (tmp_path / "tokens").iterdir()] != ["."]
    deadline = time.monotonic() + 240  # the killed one's processes read the end of their pipe
    while subprocess.run(["pgrep", "-g", str(child.pid)], capture_output=True).stdout:
        assert time.monotonic() < deadline


@FORK
def test_a_process_that_is_ended_costs_no_finished_shard(
    data, tokenizer, tmp_path, small, monkeypatch
):
    want = listed(read(data, tokenizer, tmp_path / "whole"))
    receive, told = workers.Workers._receive, []

    def kill_after_five(self, pipe):
        told.append(pipe)
        if len(told) == 5:
            for child in _children(self._child.pid):
                os.kill(child, signal.SIGKILL)
        return receive(self, pipe)

    monkeypatch.setattr(workers.Workers, "_receive", kill_after_five)
    with pytest.raises(RunFailed, match="a process that tokenises the data was ended"):
        read(data, tokenizer, tmp_path)
    told = [None] * 9
    assert list((tmp_path / "tokens").glob(".*/progress.json"))
    assert listed(read(data, tokenizer, tmp_path)) == want


def _children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


@FORK
def test_the_first_error_is_the_one_that_is_named(tokenizer, tmp_path, small):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": write(60, n)}) + "\n" for n in range(80))
        + '{"text": ""}\n'
        + "".join(json.dumps({"text": write(60, n)}) + "\n" for n in range(80))
        + '{"body": "a"}\n'
    )
    with pytest.raises(InvalidRequest, match=r"a\.jsonl` line 81: `text` is empty") as error:
        read(tmp_path / "a.jsonl", tokenizer, tmp_path / "cache")
    assert error.value.hint == "leave such examples out"
    assert not list((tmp_path / "cache" / "tokens").iterdir()), "nothing is left behind"


@pytest.mark.parametrize("many", [True, False], ids=["processes", "one process"])
def test_much_data_says_how_far_it_is(many, data, tokenizer, tmp_path, small, monkeypatch):
    monkeypatch.setattr(workers, "ENOUGH", 0 if many else 2**60)
    said = []
    monkeypatch.setattr(tokens, "INTERVAL", 0.0)
    read(data, tokenizer, tmp_path / "little", say=said.append)
    assert said[-1].startswith("tokenised 606 documents, ")
    monkeypatch.setattr(tokens, "INTERVAL", 1e9)
    monkeypatch.setattr(tokens, "MUCH", 0)
    said.clear()
    corpus = read(data, tokenizer, tmp_path / "much", say=said.append)
    size = sum(p.stat().st_size for p in data.iterdir())
    assert said == [f"tokenising {units.show_bytes(size)} of data"]
    read(data, tokenizer, tmp_path / "much", say=said.append)
    assert len(said) == 1, "nothing is said of tokens that are there"
    assert corpus.documents == 606


def test_little_memory_and_one_core_mean_one_process(data, tokenizer, tmp_path, small, monkeypatch):
    monkeypatch.setattr(workers, "_start", None)  # a call would fail
    own = memory.read_anonymous() or 0
    if own:
        read(data, tokenizer, tmp_path / "little", memory=2 * own)
    monkeypatch.setattr(workers, "_count_cores", lambda: 1)
    read(data, tokenizer, tmp_path / "one")


def test_a_limit_of_memory_counts_this_process_and_its_parent(monkeypatch):
    held = {None: 300, os.getppid(): 50}
    monkeypatch.setattr(memory, "read_anonymous", held.get)
    monkeypatch.setattr(memory, "_available", lambda: 10_000)
    monkeypatch.setattr(memory, "_left_of_groups", lambda: [9_000])
    assert [memory.find_free(limit) for limit in (None, 1000, 100)] == [9_000, 650, 0]


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limit_is_what_is_left_of_it(version, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "PROCESSES", tmp_path)
    (tmp_path / "self").mkdir()
    most, now = (
        ("memory.max", "memory.current") if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )  # fmt: skip
    line = "0::/outer/own" if version == 2 else "5:memory:/outer/own"
    (tmp_path / "self" / "cgroup").write_text(f"3:cpu:/x\n{line}\n")
    root = tmp_path / "groups" / ("" if version == 2 else "memory")
    own = root / "outer" / "own"
    own.mkdir(parents=True)
    (own / most).write_text("max" if version == 2 else "9223372036854771712")
    (own / now).write_text("100")
    (own.parent / most).write_text("5000")
    (own.parent / now).write_text("1000")
    assert min(memory._left_of_groups()) == 4000


def test_a_folder_that_is_moved_away_while_it_is_claimed_is_made_again(tmp_path, monkeypatch):
    """`mkdir` with `exist_ok` raises where the folder was there and then is not."""
    plain, asked = Path.mkdir, []

    def mkdir(self, *words, **more):
        asked.append(self)
        if len(asked) == 1:
            raise FileExistsError(17, "File exists", str(self))
        plain(self, *words, **more)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with parts.claim(tmp_path / "held"):
        assert (tmp_path / "held" / "lock").exists()


def test_another_process_with_the_same_data_is_waited_for(data, tokenizer, tmp_path, monkeypatch):
    want = listed(read(data, tokenizer, tmp_path))
    (made,) = (tmp_path / "tokens").iterdir()
    monkeypatch.setattr(tokens, "_make", None)  # a call would fail
    hidden = made.with_name(f".{made.name}")
    with parts.claim(hidden):  # it is being made
        made.rename(tmp_path / "finished")
        found = []
        import threading

        other = threading.Thread(target=lambda: found.append(read(data, tokenizer, tmp_path)))
        other.start()
        other.join(timeout=0.5)
        assert not found
        (tmp_path / "finished").rename(made)
    other.join()
    assert listed(found[0]) == want


def test_a_long_document_without_tokens_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(split, "PIECE", 100)
    monkeypatch.setattr(split, "SHARD", 150)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(" " * 1000)
    with pytest.raises(InvalidRequest, match=r"a\.txt` has no tokens"):
        read(tmp_path / "a.txt", read_tokenizer(str(tmp_path)), tmp_path / "cache")


MODELS = {
    "wordpiece": lambda: _build(
        tokenizers.models.WordPiece({"[UNK]": 0, "the": 1, "c": 2, "##at": 3, "##h": 4, "t": 5},
                                    unk_token="[UNK]"),
        tokenizers.pre_tokenizers.BertPreTokenizer(),
        tokenizers.normalizers.BertNormalizer(),
    ),
    "unigram": lambda: _build(
        tokenizers.models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("c", -3.0),
                                   ("at", -2.5), ("▁cat", -2.2)], unk_id=0, byte_fallback=False),
        tokenizers.pre_tokenizers.Metaspace(),
        tokenizers.normalizers.NFKC(),
    ),
}  # fmt: skip


def _build(model, splitting, normalising):
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer, made.normalizer = splitting, normalising
    made.add_special_tokens(["<end>"])
    made.enable_truncation(4)  # as some files are saved; a wrapper's call ignores it
    made.enable_padding(length=9)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 6)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>"), "here")


@pytest.mark.parametrize("kind", MODELS)
def test_the_shorter_way_to_ids_is_the_wrappers_own(kind):
    own = MODELS[kind]()
    assert own._direct
    texts = ["the cat at the cat", "ﬁ CAT <end> the", "", "naïve ☃ the"]
    want = own.wrapped(texts, add_special_tokens=False, return_offsets_mapping=True)
    own.wrapped.backend_tokenizer.enable_truncation(2)
    assert own.encode_many(texts) == want["input_ids"]
    found = list(own.encode_with_offsets(texts))
    assert [ids for ids, _ in found] == want["input_ids"]
    assert [offsets for _, offsets in found] == want["offset_mapping"]


def test_a_subclass_that_encodes_in_its_own_way_is_called(tokenizer):
    class Shouting(type(tokenizer.wrapped)):
        def _encode_plus(self, text, *args, **more):
            loud = text.upper() if isinstance(text, str) else [t.upper() for t in text]
            return super()._encode_plus(loud, *args, **more)

    wrapped = Shouting.from_pretrained(tokenizer.source)
    assert Tokenizer(wrapped, "here").encode("cat") == tokenizer.encode("CAT")


TEMPLATES = {
    "plain": TEMPLATE,
    "what is around": "{{ bos_token }}{{ tools }}{{ documents }}{{ add_generation_prompt }}"
    "{% for m in messages %}{{ m | tojson }}{{ loop.index }}{% endfor %}{{ eos_token }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_called_directly_says_what_transformers_says(name, tokenizer):
    own = read_tokenizer(tokenizer.source)
    own.wrapped.chat_template = TEMPLATES[name]
    talks = [
        [{"role": "user", "content": "a <b> 'c' ☃"}, {"role": "assistant", "content": "d"}],
        [{"role": "system", "content": ""}],
        [{"role": "assistant", "content": "x", "thinking": "y"}],
    ]
    for prompt in (False, True):
        want = [
            own.wrapped.apply_chat_template(t, tokenize=False, add_generation_prompt=prompt)
            for t in talks
        ]
        held = [Talk(messages) for messages in talks]
        assert own._render(held, prompt=prompt) == want
        assert own._render(held[:2], prompt=prompt) == want[:2]


def test_a_tokenizer_learns_the_same_from_a_text_in_pieces(tmp_path, monkeypatch):
    text = write(4000, 5) + "\n\n  x" + "y" * 9000 + " end"
    (tmp_path / "a.txt").write_bytes(text.encode())
    whole = train_tokenizer([text.replace("\r\n", "\n")], 400, tmp_path / "whole")
    monkeypatch.setattr(split, "LEARNED", 1000)
    texts = list(split.read_texts(find_sources(str(tmp_path / "a.txt"))))
    assert len(texts) > 10
    pieces = train_tokenizer(texts, 400, tmp_path / "pieces")
    assert pieces.fingerprint == whole.fingerprint
