"""The check of words in names and docstrings finds them where they are, and nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import check_words


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("def said_of(x): ...", "said"),
        ("class KeptPlan: ...", "kept"),
        ("def run(*, again): ...", "again"),
        ("self.coded = 1", "coded"),
        ("import numpy as lack", "lack"),
        ("for where in (): ...", "where"),
        ('def run():\n    """Return what was asked."""', "asked"),
        ('"""Bytes of so many elements."""', "so many"),
    ],
)
def test_a_word_is_found_in_a_name_and_in_a_docstring(text, word):
    assert [use.word for use in check_words.find_uses("core/units.py", text)] == [word]


@pytest.mark.parametrize(
    "text",
    [
        "x = numpy.where(a, b, c)",  # another library's name is read, not bound
        "# what was asked is kept",
        'print("as asked")',
        "because = 1",
        'def run():\n    """Return where it is."""',
        "against = lacquer = 1",
    ],
)
def test_other_uses_pass(text):
    assert not list(check_words.find_uses("core/units.py", text))


def test_a_module_has_no_such_name():
    assert [use.word for use in check_words.find_uses("plan/because.py", "x = 1")] == ["because"]


def test_a_use_fails_the_check(monkeypatch, capsys):
    use = check_words.Use("core/units.py", 3, "said", "`said`")
    monkeypatch.setattr(check_words, "find_all", lambda: [use])
    assert check_words.main() == 1
    assert "src/memfit/core/units.py:3: said" in capsys.readouterr().out


def test_an_exception_is_a_name_that_still_stands():
    for file, name in check_words.EXCEPTIONS:
        found = check_words.bound_names(ast.parse((check_words.SOURCE / file).read_text()))
        assert name in {bound for _, bound in found}
