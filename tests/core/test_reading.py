"""Bounded readers: every damage is an error that names the file, and soon."""

import os
import time

import pytest

from memfit.core.errors import InvalidRequest
from memfit.core.system.reading import (
    exists,
    is_file,
    is_folder,
    parse_json,
    parse_yaml,
    read_json_table,
    read_text,
    shorten,
)

BOMB = "\n".join(
    ["a0: &a0 [" + "x, " * 9 + "x]"]
    + [f"a{i}: &a{i} [" + f"*a{i - 1}, " * 9 + f"*a{i - 1}]" for i in range(1, 12)]
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "stands for more than"),
        ("a: &a [*a]", "more than 60 deep"),
        ("a: " + "[" * 3000, "more than 60 deep"),
        ("a: " + "{b: " * 200, "more than 60 deep"),
        ("- " * 5000, "too deeply"),
        ("seed: 2001-13-45", "month must be in 1..12"),
        ("seed: 2001-12-05", "which is a date"),
        ("seed: !!int foo", "invalid literal"),
        ("seed: !!binary aGk=", "which is a bytes"),
        ("seed: " + "9" * 5000, "limit"),
        ("seed: " + "9" * 50, "more than 40 digits"),
        ('seed: "\\ud800"', "half a character"),
        ("{[1]: 2}", "a list for a key"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: 1\x00", "not allowed"),
        ("a" * 70_000, "characters of YAML"),
    ],
)
def test_yaml_that_harms_is_refused_soon(text, said):
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=r"^the file") as error:
        parse_yaml(text, source="the file")
    assert said in error.value.message
    assert len(str(error.value)) < 600
    assert time.process_time() - start < 2


def test_brackets_in_quotes_and_comments_are_no_depth():
    brackets = "[" * 100
    text = f"a: \"{brackets}\"\nb: '{brackets}'\n# {brackets}\nc: [1, {{d: e}}]\n"
    assert parse_yaml(text, source="it") == {"a": brackets, "b": brackets, "c": [1, {"d": "e"}]}


def test_aliases_that_stand_for_little_are_read():
    assert parse_yaml("a: &x {b: 1}\nc: *x\nd: *x", source="it")["d"] == {"b": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "deep"), ('{"a": "\\ud800"}', "half a character"), ("{", "is not JSON"),
        ("9" * 5000, "is not JSON"), ("9" * 41, "more than 40 digits"), (b"\xff", "text file"),
        ("[" * 61 + "]" * 61, "more than 60 deep"),
    ],
)  # fmt: skip
def test_json_that_harms_is_refused(text, said):
    with pytest.raises(InvalidRequest, match=r"^the file") as error:
        parse_json(text, source="the file")
    assert said in error.value.message


def test_json_as_published_is_read():
    assert parse_json('{"a": [NaN, Infinity, 1e30, "é"]}', source="it")["a"][3] == "é"


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_text("x" * 100)
    (tmp_path / "odd").write_bytes(b"\xff")
    for name, said in (
        ("pipe", "no regular file"), (".", "Is a directory"), ("none", "No such file"),
        ("odd", "text"),
        ("x" * 5000, "name too long"), ("a\0b", "no name of a file"), ("big", "are the most"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as error:
            read_text(tmp_path / name, most=99)
        assert said in error.value.message.replace("\n", " ")
    with pytest.raises(InvalidRequest, match="no regular file"):
        read_text(type(tmp_path)("/dev/zero"))
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(InvalidRequest, match="holds a list, not keys with values"):
        read_json_table(tmp_path / "list.json")


def test_names_that_no_file_can_have_are_no_files(tmp_path):
    for name in ("x" * 5000, "a\0b", "\ud800"):
        assert not is_file(tmp_path / name)
        assert not is_folder(tmp_path / name)
        assert not exists(tmp_path / name)


def test_what_an_error_repeats_is_short():
    assert shorten("a" * 100) == "a" * 59 + "…"
    assert shorten(10**5000) == "a number of more than 40 digits"
