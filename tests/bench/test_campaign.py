"""A seeded share of the campaign, and every input that once broke a reader, read again."""

import json
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench" / "campaign"))

import relations  # noqa: E402
from fuzz import WHOLE, judge  # noqa: E402
from mutate import minimise, mutate  # noqa: E402
from readers import all_readers, draw  # noqa: E402

READERS = {reader.name: reader for reader in all_readers() if reader.seeds}
SHARE = 20  # inputs of a reader
BROKE = sorted((ROOT / "tests" / "regressions").glob("*/*"))


@pytest.mark.parametrize("name", READERS)
def test_a_whole_input_is_read(name, tmp_path):
    for at, content in enumerate(READERS[name].seeds):
        assert READERS[name].read(content, tmp_path / str(at)) in WHOLE


@pytest.mark.parametrize("name", READERS)
def test_damaged_inputs_are_answered(name):
    chance = random.Random(name)
    for _ in range(SHARE):
        content = draw(READERS[name], chance)
        assert judge(READERS[name], content)[0] == "", content


@pytest.mark.parametrize("path", BROKE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_broke_a_reader_is_answered(path):
    assert judge(READERS[path.parent.name], path.read_bytes())[0] == ""


def test_a_reader_that_fails_is_found_and_its_input_made_small():
    def read(content, folder):
        del folder
        if b"bad" in content:
            raise KeyError("bad")
        return 0

    reader = type(READERS["request"])("made up", (b"good",), read)
    assert judge(reader, b"good") == ("", 0)
    found = b"a long text with a bad word in it"
    assert judge(reader, found)[0].startswith("KeyError in test_campaign.py")
    assert minimise(found, lambda content: bool(judge(reader, content)[0])) == b"bad"


def test_a_reader_that_takes_too_long_is_found(monkeypatch):
    monkeypatch.setattr("fuzz.MOST_SECONDS", 0.1)

    def read(content, folder):
        del content, folder
        while True:
            pass

    assert "s of CPU" in judge(type(READERS["request"])("slow", (b"",), read), b"")[0]


def test_mutations_change_most_inputs_and_the_seed_decides_them():
    content = READERS["request"].seeds[0]
    made = [mutate(random.Random(seed), content) for seed in range(100)]
    assert made == [mutate(random.Random(seed), content) for seed in range(100)]
    assert len(set(made)) > 90


def ask_relations(monkeypatch, out, count):
    monkeypatch.setattr(sys, "argv", ["relations.py", "--count", str(count), "--out", str(out)])
    return relations.main(), json.loads(out.read_bytes())


def test_a_share_of_the_relations_holds_and_the_campaign_goes_on_where_it_stopped(
    monkeypatch, tmp_path
):
    code, found = ask_relations(monkeypatch, tmp_path / "found.json", 4)
    assert (code, found["requests"], found["violations"]) == (0, 4, [])
    asked = []
    monkeypatch.setattr(
        relations, "ask", lambda data, ask=relations.ask: asked.append(data) or ask(data)
    )
    code, found = ask_relations(monkeypatch, tmp_path / "found.json", len(relations.RELATIONS))
    assert (code, found["requests"], found["violations"]) == (0, len(relations.RELATIONS), [])
    assert set(found["relations"].values()) == {1}
    assert asked[0] == relations.draw(random.Random("1 4"))


def test_a_relation_that_does_not_hold_is_found(monkeypatch, tmp_path):
    sizes = iter((2, 1))
    monkeypatch.setattr(relations, "held", lambda plan: next(sizes))
    code, found = ask_relations(monkeypatch, tmp_path / "found.json", 1)
    assert code == 1
    (wrong,) = found["violations"]
    assert (wrong["request"], wrong["relation"]) == (0, "more layers")
    assert "2 B, of more 1 B" in wrong["wrong"]
